"""Files that are whole, by their checksums, and say what no run wrote: one value of a run's JSON is another."""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import xxhash

from seqpart.checkpoint.manifest import CHECKPOINT
from seqpart.checkpoint.marker import MARKER
from seqpart.store.atomic import with_checksum

Place = tuple[str | int, ...]
"""Where something stands in JSON: the names and numbers that lead to it."""
TOLD = {"settings", "label_bytes", "loop", "tally", "losses", "test", "job", "tuned"}
"""What a state says of the past or of the user's wishes: nothing else contradicts another such value."""
OTHERS: list[Any] = [
    None, True, False, 0, -1, 1, 7, 2**40, 2**70, 0.5, -0.5, 1e300, float("nan"), float("inf"), "", "x", "a\0b", "../x",
    "\ud800", "x" * 5000, [], [0], [None], {}, {"x": 1}, [[]], "0" * 16, "block-00001.0.safetensors",
]  # fmt: skip


def inside(found: Any) -> list[str | int]:
    return [*found] if isinstance(found, dict) else [*range(len(found))] if isinstance(found, list) else []


def places(found: Any, place: Place = ()) -> Iterator[Place]:
    """Of everything in JSON, the whole of it first."""
    yield place
    for name in inside(found):
        yield from places(found[name], (*place, name))


def at(found: Any, place: Place) -> Any:
    for name in place:
        found = found[name]
    return found


def put(found: Any, place: Place, value: Any) -> Any:
    if not place:
        return value
    found = copy.deepcopy(found)
    at(found, place[:-1])[place[-1]] = value
    return found


def changes(value: Any) -> Iterator[Any]:
    """What else may stand in its place."""
    yield from OTHERS
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield from (value + 1, value - 1, -value, value * 10**9, float(value), str(value))
    elif isinstance(value, str):
        yield from (value + "x", value[:-1], value.upper(), f"{value}\0")
    elif isinstance(value, list):
        yield from (value[:-1], [*value, *value[:1]], value[::-1])
    elif isinstance(value, dict):
        yield {**value, "x": 1}
        yield from ({name: one for name, one in value.items() if name != left_out} for left_out in value)


def body_of(root: Path) -> Any:
    """Of the checkpoint, its plan as JSON too."""
    body = json.loads((root / CHECKPOINT).read_text())["checkpoint"]
    body["state"]["plan"] = json.loads(body["state"]["plan"])
    return body


def checkpoint_of(body: Any) -> str:
    if isinstance(body, dict) and isinstance(body.get("state"), dict) and isinstance(body["state"].get("plan"), dict):
        body = put(body, ("state", "plan"), json.dumps(body["state"]["plan"]))
    return with_checksum("checkpoint", body)


def one_changed(random: Random, found: Any) -> tuple[Any, str]:
    """`found` with one value changed, and in words which. Whatever stands next to each other is drawn as often."""
    while True:
        place: Place = ()
        while (names := inside(at(found, place))) and random.random() > (0.1 if place else 0.02):
            place = (*place, random.choice(names))
        if place[:1] == ("state",) and (len(place) == 1 or place[1] in TOLD):
            continue
        was = at(found, place)
        value = random.choice([*changes(was)])
        if json.dumps(value) != json.dumps(was):
            said = f"{'.'.join(map(str, place)) or 'all of it'}: {json.dumps(value)[:60]}, was {json.dumps(was)[:60]}"
            return put(found, place, value), said


@dataclass(frozen=True)
class Lie:
    """A change of some files, which are there to be put right again."""

    path: Path
    said: str
    true: dict[Path, bytes]

    def put_right(self) -> None:
        for path, data in self.true.items():
            path.write_bytes(data)


def tell(seed: int, out: Path, files: list[Path]) -> Lie | None:
    """Change one value that the killed run in `out` has left among its `files`; None where there is none."""
    random, checkpoint = Random(seed), out / CHECKPOINT
    markers = sorted(path for path in files if path.name == MARKER)
    body = body_of(out) if checkpoint.exists() else None
    kinds = ["marker"] * bool(markers)
    if body is not None:
        kinds += ["checkpoint", "plan", *["sums"] * bool(body["rows"])]
    kind = random.choice(kinds) if kinds else None
    if kind is None:
        return None
    if kind == "marker":
        path = random.choice(markers)
        found, said = one_changed(random, json.loads(path.read_text()))
        return _written({path: json.dumps(found)}, said)
    if kind == "checkpoint":
        found, said = one_changed(random, body)
        return _written({checkpoint: checkpoint_of(found)}, said)
    if kind == "plan":
        found, said = one_changed(random, body["state"]["plan"])
        return _written({checkpoint: checkpoint_of(put(body, ("state", "plan"), found))}, f"plan: {said}")
    row = random.choice(sorted(body["rows"]))
    (path,) = (path for path in files if path.name == body["rows"][row]["sums"])
    found, said = one_changed(random, json.loads(path.read_text()))
    text = json.dumps(found)
    body = put(body, ("rows", row, "digest"), xxhash.xxh3_64_hexdigest(text.encode()))
    return _written({path: text, checkpoint: checkpoint_of(body)}, said)


def _written(texts: dict[Path, str], said: str) -> Lie:
    true = {path: path.read_bytes() for path in texts}
    for path, text in texts.items():
        path.write_text(text)
    path = next(iter(texts))
    return Lie(path, f"{path.name}: {said}", true)


def lying_plan(seed: int, plan: str) -> tuple[str, str]:
    """A plan with one value changed, and in words which."""
    found, said = one_changed(Random(seed), json.loads(plan))
    return json.dumps(found), said
