"""JSON that tells whether it is what was written: a checksum of the body stands before it."""

import json
from typing import Any

import xxhash

from seqpart.files.text import parsed


def sealed(kind: str, body: object) -> str:
    text = json.dumps(body)
    return f'{{"xxh3_64": "{xxhash.xxh3_64_hexdigest(text.encode())}",\n"{kind}": {text}}}\n'


def unsealed(kind: str, text: str) -> Any:
    """The body. Raises ValueError unless the text is what `sealed` gave."""
    try:
        body = parsed(text)[kind]
        whole = text == sealed(kind, body)
    except (ValueError, KeyError, TypeError, IndexError):
        whole = False
    if not whole:
        raise ValueError("its checksum is not the one that was written")
    return body
