"""What a child process says of its run: a JSON file, written whole or not at all."""

import itertools
import json
from pathlib import Path
from typing import Any

DONE, NO_ROOM, OUT_OF_MEMORY, REFUSED = "done", "does not fit", "out of memory", "refused"


def write(path: Path, status: str, **values: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"status": status, **values}))
    part.replace(path)


def read(path: Path) -> dict[str, Any]:
    """What the child wrote; nothing where it died before."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def requested(text: str) -> int | None:
    """Bytes that the failed allocation asked for, as PyTorch's message tells them."""
    units = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    words = text.replace(".  ", " ").split()
    pairs = [(a, b.rstrip(".")) for a, b in itertools.pairwise(words)]
    found = [float(a) * units[b] for a, b in pairs if b in units and a.replace(".", "", 1).isdigit()]
    return int(found[0]) if found else None
