"""The command's process before torch loads."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seqpart.errors import SeqpartError
from seqpart.launch import prepare
from seqpart.launch.process import VARIABLES
from tests.command import ENVIRONMENT, SECONDS, SMALL

ROOT = Path(__file__).parents[2]
STARTS = """
import os
with open("starts", "a") as file:
    print(os.environ.get("GLIBC_TUNABLES", ""), file=file)
"""


def printed(tmp_path, code, **environment):
    clean = {name: value for name, value in ENVIRONMENT.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=clean | environment, capture_output=True, text=True, timeout=SECONDS,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("given", "starts"),
    [
        ("", ["", "glibc.malloc.tcache_count=0"]),
        ("glibc.malloc.perturb=0", ["glibc.malloc.perturb=0", "glibc.malloc.perturb=0:glibc.malloc.tcache_count=0"]),
        ("glibc.malloc.tcache_count=3", ["glibc.malloc.tcache_count=3"]),
    ],
)
@pytest.mark.few(1)
def test_the_command_begins_anew_without_glibcs_cache_unless_the_user_has_set_it(given, starts, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(STARTS)
    environment = ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "GLIBC_TUNABLES": given}
    command = [sys.executable, "-m", "seqpart.train", *SMALL, "--method", "full", "--dry-run"]
    subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, timeout=SECONDS, check=True)
    assert (tmp_path / "starts").read_text().splitlines() == starts


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("program", ["seqpart.train", "seqpart train"])
@pytest.mark.few(1)
def test_a_signal_while_the_command_loads_ends_it_in_one_line(program, how, tmp_path):
    """It was a traceback of fifty lines, or lost where the program begins anew, and then the whole run was made."""
    words = [sys.executable, "-m", *program.split(), *SMALL, "--method", "full"]
    process = subprocess.Popen(words, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    maps = Path(f"/proc/{process.pid}/maps")
    while process.poll() is None and "libtorch_cpu" not in maps.read_text():
        time.sleep(0.001)
    process.send_signal(how)
    _, said = process.communicate(timeout=SECONDS)
    assert (process.returncode, said) == (130, "interrupted: nothing was begun.\n")


def test_a_signal_outlives_the_replacement_of_the_program():
    code = """
import os, signal, sys
from seqpart import interrupts
if sys.argv[1] == "first":
    interrupts.hold_back()
    os.kill(os.getpid(), signal.SIGTERM)
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[2], "second"])
interrupts.nothing_begun_yet()
"""
    words = [sys.executable, "-c", code, "first", code]
    done = subprocess.run(words, env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stderr) == (130, "interrupted: nothing was begun.\n")


def test_a_script_may_have_the_process_of_the_command(tmp_path):
    """With what the user has set, and without the tables that torch's libraries bring."""
    code = """
import json, os, sys
from seqpart.launch import prepare
finders = list(sys.meta_path)
prepare()
from seqpart.device.gpu_tables import _gpu_tables, _mappings
left = sum(mapping.anonymous for mapping in _gpu_tables(_mappings()))
print(json.dumps([os.environ["GOMP_SPINCOUNT"], os.environ["THP_MEM_ALLOC_ENABLE"], "torch" in sys.modules,
    sys.meta_path[: len(finders)] == finders, left if not os.path.exists("/dev/nvidiactl") else 0]))
"""
    assert printed(tmp_path, code, GOMP_SPINCOUNT="7") == ["7", VARIABLES["THP_MEM_ALLOC_ENABLE"], True, True, 0]


def test_it_is_refused_where_torch_is_loaded_already():
    before = dict(os.environ)
    with pytest.raises(SeqpartError, match=r"^seqpart\.launch\.prepare\(\) must run before torch"):
        prepare()
    assert "torch" in sys.modules and dict(os.environ) == before
