"""Output that nobody takes any more ends; training does not. Signals end a run alike in the command and in a script."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import termios
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.errors import Interrupted, StoreError
from seqpart.store.scratch import RESULT
from tests.command import ENVIRONMENT, SECONDS, SMALL, call, command, refused

QUICK = [*SMALL, "--epochs", "1", "--method", "full", "--output-dir", "out"]


def through_shell(folder, line, **named):
    """A line of bash, in which `$TRAIN` is the command; its exit code is that of the command, also before a pipe."""
    environment = {**ENVIRONMENT, "TRAIN": " ".join(command(QUICK))}
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=SECONDS, check=False, **named,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "err"),
    [
        ("$TRAIN | head -n 1", ""),
        pytest.param("$TRAIN >&-", "", marks=pytest.mark.slow),
        (
            "$TRAIN >/dev/full",
            "the output is not complete: No space left on device. What a run prints is in its events.jsonl too.\n",
        ),
        pytest.param("$TRAIN >/dev/full 2>/dev/full", "", marks=pytest.mark.slow),
        ("$TRAIN <&- >&- 2>&-", ""),
    ],
)
@pytest.mark.few(1)
def test_a_closed_or_full_output_ends_the_output_and_not_the_training(line, err, tmp_path):
    done = through_shell(tmp_path, line)
    assert (done.returncode, done.stderr) == (0, err)
    assert json.loads((tmp_path / "out" / RESULT).read_text())["proof"]["violations"] == 0


@pytest.mark.parametrize("line", ["$SEQPART --help", "$SEQPART doctor", "$TRAIN --dry-run", "$TRAIN --help"])
@pytest.mark.few(1)
def test_what_is_there_to_be_read_alone_ends_with_an_error_where_the_disk_is_full(line, tmp_path):
    """The help, the machine's figures and a plan ended with 0, and a file had half of them."""
    ran = through_shell(tmp_path, f"SEQPART='{sys.executable} -m seqpart'; {line} >/dev/full")
    assert ran.returncode == StoreError.exit_code
    assert ran.stderr.startswith("the output is not complete: No space left on device.")
    assert through_shell(tmp_path, f"SEQPART='{sys.executable} -m seqpart'; {line} | head -n 1").returncode == 0


@pytest.mark.slow
def test_a_mistake_has_its_exit_code_where_no_message_can_be_written(tmp_path):
    assert through_shell(tmp_path, "$TRAIN --epochs 0 2>/dev/full >&-").returncode == 2


class Sending(nn.Module):
    """Sends its process a signal in its fifth pass."""

    def __init__(self, number):
        super().__init__()
        self._left = [5, number]  # private: a run goes on where they are others

    def forward(self, x):
        if type(x) is torch.Tensor:
            self._left[0] -= 1
            if self._left[0] == 0 and self._left[1] is not None:
                os.kill(os.getpid(), self._left[1])
        return x


def fit(folder, number=None, **named):
    x, y = torch.arange(320.0).view(40, 8).sin(), torch.arange(40) % 3
    options = {"mem_limit": "2GB", "method": "full", "batch_size": 8, "epochs": 2, "quiet": True}
    if not named:
        options["output_dir"] = folder / "out"
    return Trainer([lambda: nn.Linear(8, 3), lambda: Sending(number)], **options).fit((x, y), (x, y), **named).test_loss


@pytest.fixture
def disposition():
    """`disposition(number, how)`: how this process takes a signal, until the test ends."""
    with ExitStack() as undo:

        def of(number, how):
            undo.callback(signal.signal, number, signal.signal(number, how))

        yield of


def test_a_signal_that_is_ignored_stays_ignored(disposition, tmp_path):
    """nohup: the terminal goes, the run goes on."""
    disposition(signal.SIGHUP, signal.SIG_IGN)
    assert fit(tmp_path, signal.SIGHUP) > 0
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.few(1)
def test_a_script_that_is_ended_by_a_signal_saves_as_at_ctrl_c(number, disposition, tmp_path):
    """SIGTERM killed the process, and what it had trained since the last checkpoint was gone."""
    disposition(number, signal.SIG_DFL)
    with pytest.raises(Interrupted) as ended:
        fit(tmp_path, number)
    assert ended.value.directory == tmp_path / "out"
    assert signal.getsignal(number) == signal.SIG_DFL
    assert fit(tmp_path, resume=tmp_path / "out") == fit(tmp_path / "alone")


def in_a_terminal():
    """Of its own; what nohup may have left ignored in this process is not ignored there."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_terminal_that_is_closed_ends_the_run_with_a_checkpoint(tmp_path):
    """The bar writes into a terminal that is no more, and the signal comes at once."""
    master, terminal = os.openpty()
    process = subprocess.Popen(
        [*command(QUICK), "--epochs", "4000"], cwd=tmp_path, env=ENVIRONMENT, stdin=terminal, stdout=terminal, stderr=terminal,
        start_new_session=True, preexec_fn=in_a_terminal,
    )  # fmt: skip
    os.close(terminal)
    said = b""
    while b"train epoch" not in said:
        said += os.read(master, 4096)
    os.close(master)
    try:
        assert process.wait(SECONDS) == 130
    finally:
        process.kill()
    assert (tmp_path / "out" / "checkpoint.json").exists()


EXITS = {
    "factory": ("--model", "def net():\n    import sys\n    sys.exit(0)", "net in {file}, line 3, ended the program with 0"),
    "import": (
        "--model", "import argparse\nargparse.ArgumentParser().parse_args(['--x'])", "in {file}, line 2, ended the program",
    ),
    "block": (
        "--model",
        "import sys, torch\nclass Leaving(torch.nn.Module):\n    def forward(self, x):\n        sys.exit('enough')\n"
        "def net():\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10), Leaving())",
        "forward in {file}, line 4, ended the program with 'enough'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXITS)
def test_code_of_the_users_that_leaves_the_program_is_named_with_exit_code_1(name, tmp_path, monkeypatch, capsys):
    """sys.exit(0) in a factory ended the command with exit code 0 and not a word."""
    option, code, words = EXITS[name]
    module = tmp_path / f"leaves_{name}.py"
    module.write_text(code)
    monkeypatch.chdir(tmp_path)
    ran = call(capsys, "--mem-limit", "2GB", option, f"{module.stem}:net")
    assert refused(ran, 1, words.format(file=module), "Let it return, or raise an error")


def test_the_parsers_own_endings_stay_as_they_are(capsys):
    assert (call(capsys, "--help").code, call(capsys, "--colour").code) == (0, 2)


def test_a_working_directory_that_is_gone_is_one_message(tmp_path):
    """The matrix library ended the process: cannot load libtorch_cpu.so."""
    done = through_shell(tmp_path, "mkdir gone && cd gone && rmdir ../gone && $TRAIN")
    assert (done.returncode, done.stderr.count("\n")) == (6, 1), done.stderr
    assert done.stderr.startswith("seqpart: the working directory cannot be used")


def test_a_process_that_is_too_small_for_the_libraries_is_one_message(tmp_path):
    """A traceback of the import of libtorch_cpu.so."""
    done = through_shell(tmp_path, "ulimit -v 1000000; $TRAIN")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("seqpart: PyTorch does not fit into this process, whose size is limited (ulimit -v)")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["v", "d"])
def test_a_limit_beyond_what_the_process_may_have_is_refused_and_auto_keeps_below_it(kind, tmp_path):
    """Allocations failed inside the limit until memory ran out, and the advice was a larger one."""
    code = "from seqpart.device.process_limits import room; import torch; print(room())"
    size = 6_000_000 if kind == "v" else 2_000_000
    inside = subprocess.run(
        ["bash", "-c", f"ulimit -{kind} {size}; exec '{sys.executable}' -c '{code}'"],
        capture_output=True, text=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    assert 200e6 < int(inside.stdout) < 1024 * size
    refused = through_shell(tmp_path, f"ulimit -{kind} {size}; $TRAIN --mem-limit 7GB")
    assert refused.returncode == 2 and "7.00 GB were asked for, and this process may have (ulimit -v, -d)" in refused.stderr
    assert through_shell(tmp_path, f"ulimit -{kind} {size}; $TRAIN --mem-limit auto --dry-run").returncode == 0


@pytest.mark.slow
def test_too_few_files_are_one_message(tmp_path):
    """The thread that watches the memory died of it in a traceback, and the run went on without."""
    done = through_shell(tmp_path, "ulimit -n 8; $TRAIN")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "this process may open 8 files, and a run needs 32. Allow more: ulimit -n 32" in done.stderr


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="takes root, to become a user with a limit")
def test_too_few_threads_are_refused_in_words():
    """A number of processes is limited for users other than root; the one here may read what root may."""
    code = "from seqpart.device.process_limits import files_and_threads; files_and_threads(1).__enter__()"
    may = ["+dac_override,+dac_read_search"]
    user = ["setpriv", "--reuid", "54321", "--clear-groups", "--inh-caps", *may, "--ambient-caps", *may]
    line = f"ulimit -u 3; OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 exec '{sys.executable}' -c '{code}'"
    done = subprocess.run([*user, "bash", "-c", line], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert "OptionError: this process may start 2 threads more, and a run needs 5. Allow more (ulimit -u" in done.stderr
