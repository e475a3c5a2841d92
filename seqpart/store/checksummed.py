"""JSON that tells whether it is what was written: a checksum of the body stands before it."""

import json
from typing import Any

import xxhash

from seqpart.text import parsed


def with_checksum(kind: str, body: object) -> str:
    text = json.dumps(body)
    return f'{{"xxh3_64": "{xxhash.xxh3_64_hexdigest(text.encode())}",\n"{kind}": {text}}}\n'


def checked_body(kind: str, text: str) -> Any:
    """The body. Raises ValueError unless the text is what `with_checksum` gave."""
    try:
        body = parsed(text)[kind]
        whole = text == with_checksum(kind, body)
    except (ValueError, KeyError, TypeError, IndexError):
        whole = False
    if not whole:
        raise ValueError("its checksum is not the one that was written")
    return body
