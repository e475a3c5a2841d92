"""What is imported changes nothing in the process; what a run changes there ends with the run."""

import json
import subprocess
import sys

import pytest

from seqpart.device.device import Device
from seqpart.launch.process import VARIABLES
from tests.command import ENVIRONMENT, SECONDS

STATE = '''
import ctypes, gc, hashlib, json, logging, os, resource, signal, sys, threading, types, warnings

class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks a b c d e f".split()]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def maps(nbytes, count):
    """Whether the C library maps some of so many pieces on their own."""
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = Mallinfo2
    before = libc.mallinfo2().hblks
    held = [libc.malloc(nbytes) for _ in range(count)]
    mapped = libc.mallinfo2().hblks > before
    for pointer in held:
        libc.free(pointer)
    return mapped

def malloc():
    """Its settings, as far as they can be seen: a run maps what is over 64 KiB, and nothing where it keeps a heap."""
    return [maps(100_000, 64), maps(40 << 20, 1)]

def named(value):
    return repr(value).partition(" at 0x")[0]

def state():
    """What a program may rely on, as JSON."""
    found = {
        "environ": dict(os.environ), "meta_path": list(map(named, sys.meta_path)), "hooks": list(map(named, sys.path_hooks)),
        "excepthook": repr((sys.excepthook, sys.unraisablehook, threading.excepthook)), "directory": os.getcwd(),
        "signals": {int(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "warnings": list(map(repr, warnings.filters)), "threads": [thread.name for thread in threading.enumerate()],
        "logging": [repr(logging.root.handlers), logging.root.level, logging.getLogger("seqpart").level],
        "limits": [resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in ("DATA", "AS", "NOFILE", "STACK")],
        "garbage": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()], "stack": threading.stack_size(),
        "malloc": malloc(), "path": sys.path,
        "stand-ins": [name for name, module in sys.modules.items() if type(module).__module__.startswith("seqpart")],
    }
    if "torch" in sys.modules:
        import torch
        found["torch"] = [
            torch.get_num_threads(), torch.get_num_interop_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled(), str(torch.get_default_device()),
            torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic,
            torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled(), torch.backends.mkldnn.enabled,
            hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        ]
    return found

modules = {}

def note(stage):
    """The state as it is now, and that no module was removed or exchanged."""
    lost = [name for name, module in modules.items() if sys.modules.get(name) is not module]
    modules.update(sys.modules)
    launch = [name for name in sys.modules if name.startswith("seqpart.launch")]
    print(json.dumps([stage, state(), lost, launch, "torch" in sys.modules]))
'''
TRAINER = """
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)], nn.Linear(64, 10))
rows = torch.randn(128, 64), torch.arange(128) % 10
given = {"method": "streamed", "partitions": 2, "batch_size": 32, "quiet": True}
note("torch")
trainer = Trainer(model, mem_limit="600MB", epochs=1, output_dir="out", **given)
note("Trainer(...)")
"""
RUNS = """
def seen(event):
    print(json.dumps(["in a run", {"malloc": malloc()}, [], [], True]))

class Looking:
    on_epoch = staticmethod(seen)

trainer.plan(rows)
note("plan")
trainer.fit(rows, rows, callbacks=[Looking()])
note("fit")
trainer.evaluate(rows)
note("evaluate")
random = torch.get_rng_state()
with Trainer(model, mem_limit="600MB", **given).session(rows) as session:
    session.step((rows[0][:32], rows[1][:32]))
    assert torch.equal(torch.get_rng_state(), random), "the loop around a session has random numbers of its own"
note("session")
try:
    Trainer(model, mem_limit="10MB", output_dir="other", **given).fit(rows)
except seqpart.DoesNotFit:
    note("a refusal")
"""


def stages(tmp_path, code):
    """(what comes before, the state, modules that were lost, those of launch, whether torch is there), in order."""
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in (*VARIABLES, "PYTEST_CURRENT_TEST")}
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", STATE + code], cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for stage, _, lost, launch, _ in found:
        assert not lost and not launch, stage
    return found


def test_importing_changes_nothing_and_loads_no_torch(tmp_path):
    before, after = stages(tmp_path, 'note("nothing")\nimport seqpart\nnote("seqpart")\n')
    assert before[1] == after[1]
    assert not after[4]


@pytest.fixture(scope="module")
def torch_first(tmp_path_factory):
    code = 'import torch\nimport seqpart\nnote("import")\nfrom seqpart import Trainer\n'
    return stages(tmp_path_factory.mktemp("first"), code + TRAINER + RUNS)


def test_neither_the_facade_nor_a_trainer_changes_anything(torch_first):
    imported, loaded, made = torch_first[:3]
    for part in imported[1]:
        if part != "torch":  # the test's own seed
            assert imported[1][part] == loaded[1][part], part
    assert made[1] == loaded[1]


def test_it_makes_no_difference_whether_torch_comes_first(torch_first, tmp_path):
    """Environment variables were set and an import hook came before torch, where seqpart was imported first."""
    later = stages(tmp_path, "import seqpart\nfrom seqpart import Trainer\nimport torch\n" + TRAINER)
    for (stage, expected, *_), (_, found, *_) in zip(torch_first[1:3], later, strict=True):
        assert found | {"directory": ""} == expected | {"directory": ""}, stage


def test_after_each_kind_of_run_the_process_is_as_it_was(torch_first):
    made, *runs = torch_first[2:]
    inside = [state for stage, state, *_ in runs if stage == "in a run"]
    assert [stage for stage, *_ in runs if stage != "in a run"] == ["plan", "fit", "evaluate", "session", "a refusal"]
    if Device().keeps_heap:
        assert inside[-1]["malloc"] != made[1]["malloc"]
    for stage, state, *_ in runs:
        for part in state if stage != "in a run" else ():
            assert state[part] == made[1][part], (stage, part)
