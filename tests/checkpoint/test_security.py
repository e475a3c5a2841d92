"""Nothing that a user is given, a data set, a run or a plan, is run as a program; files say what they are and no more."""

import ast
import io
import json
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch

from seqpart.checkpoint.manifest import FORMAT
from seqpart.checkpoint.marker import latest
from seqpart.store.atomic import with_checksum
from seqpart.store.scratch import CHECKPOINT, JOB
from tests.command import SMALL, call, files
from tests.test_packages import MODULES

FORBIDDEN = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "code", "codeop", "runpy",
    "subprocess", "pty", "multiprocessing.managers",
}  # fmt: skip
"""Modules that run, or unpack into running, what they read."""
CALLS = {"eval", "exec", "compile", "__import__", "execfile", "input"}
ATTRIBUTES = {
    ("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load"), ("np", "fromfile"), ("jit", "load"),
    ("hub", "load"), ("os", "system"), ("os", "popen"), ("os", "execv"), ("os", "execve"), ("os", "spawnv"),
    ("builtins", "eval"), ("yaml", "unsafe_load"), ("yaml", "full_load"), ("yaml", "Loader"), ("yaml", "UnsafeLoader"),
    ("yaml", "FullLoader"), ("yaml", "load_all"),
}  # fmt: skip
IMPORTS_BY_NAME = {"zoo.libraries", "device.compiler"}
"""Where the user's own `package.module:function` is imported, as the command line names it; and torch's own compiler."""

PLAIN_YAML = {"cli.arguments"}
"""Where YAML is read by a SafeLoader, which makes plain values alone; test_bad_options gives it a tag that calls."""

BEGINS_ANEW = {"launch.process"}
"""Where the command starts itself again: the words that it was started with, and nothing that it has read."""


def dangers(tree, module):
    """What in a file's text could run what it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            forbidden = FORBIDDEN - ({"yaml"} if module in PLAIN_YAML else set())
            yield from (name for name in names if name in forbidden or name.split(".")[0] in forbidden)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield f"{node.func.id}()"
        elif isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if (owner, node.attr) == ("os", "execv") and module in BEGINS_ANEW:
                continue
            if (owner, node.attr) in ATTRIBUTES or (node.attr == "import_module" and module not in IMPORTS_BY_NAME):
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "shell", "weights_only"):
            yield node.arg


@pytest.mark.parametrize(("module", "path"), MODULES.items(), ids=MODULES)
def test_no_file_of_ours_unpickles_evaluates_or_runs_anything(module, path):
    assert list(dangers(ast.parse(path.read_text()), module)) == []


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from torch import load\neval('1')", "torch.load(x)", "np.load(x, allow_pickle=True)", "os.system('x')",
     "torch.hub.load('x')", "importlib.import_module('x')", "__import__('x')", "os.execv('x', [])"],
)  # fmt: skip
def test_the_search_finds_what_it_is_for(text):
    assert list(dangers(ast.parse(text), "store"))


class Bomb:
    """Whoever unpickles it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def bomb(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "notes.txt").write_text("years of work")
    return pickle.dumps(Bomb(tmp_path / "went-off"))


def npz(path, **arrays):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in arrays.items():
            archive.writestr(f"{name}.npy", data)


def objects(bomb):
    """An array of one pickled object, as numpy.save writes it."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    return head.getvalue() + bomb


def hostile_data(bomb, folder):
    torch.save({"x": torch.ones(2, 2)}, folder / "honest.pt")
    np.savez(folder / "honest.npz", x=np.ones((8, 2), np.float32), y=np.arange(8) % 2)
    honest = zipfile.ZipFile(folder / "honest.npz").read("y.npy")
    npz(folder / "objects.npz", x=objects(bomb), y=honest)
    header = b"{'descr': __import__('os').mkdir('went-off'), 'fortran_order': False, 'shape': (8, 2)}"
    npz(folder / "header.npz", x=b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header, y=honest)
    npz(folder / "raw.npz", x=bomb, y=honest)
    (folder / "pickle.npz").write_bytes(bomb)
    (folder / "MNIST" / "raw").mkdir(parents=True)
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        (folder / "MNIST" / "raw" / name).write_bytes(bomb)
    (folder / "MNIST" / "processed").mkdir()
    for name in ("training.pt", "test.pt"):
        (folder / "MNIST" / "processed" / name).write_bytes(bomb)
    for name in ("cat", "dog"):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(5):
            (folder / "images" / name / f"{number}.png").write_bytes(bomb)
    return [
        *(["--data", f"npz:{name}.npz"] for name in ("objects", "header", "raw", "pickle")),
        ["--data", "mnist", "--data-dir", "."], ["--data", "idx:MNIST/raw"], ["--data", "folder:images"],
        ["--data", "npz:honest.pt"], ["--plan", "pickle.npz"], ["--config", "pickle.npz"], ["--resume", "pickle.npz"],
        ["--model", "__import__('os').mkdir('went-off')"], ["--model", "os.path:__import__"], ["--loss", "os:abort"],
    ]  # fmt: skip


def test_hostile_data_plans_and_options_are_refused_in_words_and_run_nothing(bomb, tmp_path, capsys):
    for number, options in enumerate(hostile_data(bomb, tmp_path)):
        ran = call(capsys, *SMALL, *options, "--output-dir", f"out{number}")
        assert ran.code in (2, 6), (options, ran)
        assert "Traceback" not in ran.err, options
        assert not (tmp_path / "went-off").exists(), options


DEEP = "[" * 100_000 + "]" * 100_000


def hostile_runs(bomb, folder):
    """Directories of runs as somebody may hand them over."""
    job = {"width": 64, "depth": 2, "mem_limit": "2GB"}
    for name, change in {
        "output": {"output_dir": "user"}, "plan": {"plan_out": "user/notes.txt"}, "over": {"overwrite": True},
        "unknown": {"exec": "import os"}, "table": {"lr": {"a": 1}}, "list": [],
    }.items():  # fmt: skip
        (folder / name).mkdir()
        (folder / name / JOB).write_text(with_checksum("job", job | change if isinstance(change, dict) else change))
    texts = {
        "pickled": bomb,
        "deep": DEEP.encode(),
        "edited": with_checksum("job", job).replace("64", "65").encode(),
        "plain": b"{}",
    }
    for name, text in texts.items():
        (folder / name).mkdir()
        (folder / name / JOB).write_bytes(text)
    for name, body in {
        "scratch": {"format": FORMAT, "scratch": 7, "state": {}, "homes": {}, "rows": {}},
        "homes": {"format": FORMAT, "scratch": ".", "state": {}, "homes": {"a": {"file": "../user/notes.txt"}}, "rows": {}},
        "state": {"format": FORMAT, "scratch": ".", "state": {"settings": 3, "job": job}, "homes": {}, "rows": {}},
        "nothing": {}, "text": "x",
    }.items():  # fmt: skip
        (folder / f"manifest-{name}").mkdir()
        (folder / f"manifest-{name}" / CHECKPOINT).write_text(with_checksum("checkpoint", body))
    for name, text in {"pickled": bomb, "deep": DEEP.encode()}.items():
        (folder / f"manifest-{name}").mkdir()
        (folder / f"manifest-{name}" / CHECKPOINT).write_bytes(text)
    (folder / "pipe").mkdir()
    os.mkfifo(folder / "pipe" / JOB)
    (folder / "link").mkdir()
    (folder / "link" / JOB).symlink_to(folder / "edited" / JOB)
    return sorted(path.name for path in folder.iterdir())


def test_hostile_runs_are_refused_in_words_and_run_and_change_nothing(bomb, tmp_path, capsys, monkeypatch):
    runs = tmp_path / "runs"
    runs.mkdir()
    names = hostile_runs(bomb, runs)
    before = files(tmp_path / "user")
    for name in names:
        ran = call(capsys, "--resume", runs / name)
        assert ran.code in (2, 6) and "Traceback" not in ran.err, (name, ran)
        assert files(tmp_path / "user") == before, name
        assert not (tmp_path / "went-off").exists(), name


def test_a_log_that_is_a_link_or_another_name_of_a_file_is_not_written_through(tmp_path, monkeypatch, capsys):
    """A run directory that was handed over had events.jsonl lead to a file of the user's: lines were added to that."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("mine")
    options = [*SMALL, "--epochs", "1", "--output-dir", "out", "--quiet"]
    assert call(capsys, *options).code == 0
    for name in ("events.jsonl", "plan.json", "job.json", "result.json", "model.safetensors"):
        path = latest(tmp_path / "out", name)
        path.unlink()
        if name == "plan.json":
            os.link(tmp_path / "mine", path)
        else:
            path.symlink_to(tmp_path / "mine")
    assert call(capsys, *options, "--overwrite").code == 0
    assert (tmp_path / "mine").read_text() == "mine"
    assert all(path.is_file() and not path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert json.loads((tmp_path / "out" / "result.json").read_text())
