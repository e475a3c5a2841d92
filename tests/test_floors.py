"""The house: imports go down only, nothing imports in a circle, and every room is in the table."""

import ast
from pathlib import Path

import pytest

import seqpart

HOUSE = Path(seqpart.__file__).parent

FLOORS = [
    ["errors", "units", "textfile", "output", "surroundings"],
    ["schedule", "phases", "direct", "interrupts", "kept", "ballast", "ownfiles", "sealed", "replacing"],
    ["layout", "device", "arena", "losses", "sharing", "scratch", "marker", "publication", "leftovers", "rundir"],
    ["gauge", "blocks", "homefile", "store", "rows", "optimizers", "reductions"],
    ["terminal", "meter", "costs", "activations", "ingest", "given"],
    ["resident", "inplace", "simulate", "cutting", "slots", "relay", "lookahead", "tally", "graphs", "slotlayout"],
    ["trial"],
    ["methods.method", "methods.exact", "methods.labels", "methods.objectives", "methods.synthetic", "methods", "rateschedule"],
    ["plan", "silplan", "exactplan", "relaying", "passes", "executor", "checkpoint", "manifest", "settings", "rates"],
    ["changes", "adoption", "inputs", "preparation", "progress", "report"],
    ["saving", "run", "trainer", "watch"],
    ["", "zoo", "zoo.models", "zoo.loading", "zoo.text", "zoo.folders", "zoo.datasets"],
    ["job", "arguments", "doctor", "ways", "verify", "train", "__main__"],
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def found_rooms():
    for path in sorted(HOUSE.rglob("*.py")):
        parts = path.relative_to(HOUSE).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


ROOMS = list(found_rooms())


def imports(path):
    """Rooms that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            package, _, room = name.partition(".")
            if package == "seqpart" and room in FLOOR_OF:
                yield room


@pytest.mark.parametrize(("room", "path"), ROOMS, ids=[room or "seqpart" for room, _ in ROOMS])
def test_a_room_stands_in_the_table_and_imports_only_from_its_floor_or_below(room, path):
    assert room in FLOOR_OF, f"{room} is in no floor: add it to FLOORS"
    for other in imports(path):
        assert FLOOR_OF[other] <= FLOOR_OF[room], f"{room} imports {other} from a floor above"


def test_nothing_imports_in_a_circle():
    graph = {room: {other for other in imports(path) if other != room} for room, path in ROOMS}
    # A package's __init__ gathers its modules; the modules import each other, not the gathering.
    done, walking = set(), []

    def walk(room):
        assert room not in walking, f"circle: {' > '.join([*walking, room])}"
        if room in done:
            return
        walking.append(room)
        for other in sorted(graph.get(room, ())):
            walk(other)
        walking.pop()
        done.add(room)

    for room in graph:
        walk(room)


@pytest.mark.parametrize("room", ["units", "schedule", "cutting", "errors", "rundir"])
def test_rooms_that_decide_with_ints_do_not_touch_tensors(room):
    assert "import torch" not in (HOUSE / f"{room}.py").read_text()
