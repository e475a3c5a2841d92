"""Values and files that nobody means: absurd sizes, names that no file can have, pipes, devices and files cut anywhere.

Each is answered within seconds by one message, and nothing is read without end.
"""

import gzip
import io
import json
import os
import struct
import sys
import time
import zipfile

import numpy as np
import pytest
from PIL import Image

from seqpart.checkpoint.marker import MARKER
from seqpart.train import main
from tests.choice import in_turn
from tests.command import SMALL, call, files, refused
from tests.given import write_idx

LONG, ZERO, ROUND = "x" * 300, "a\0b", "round/and/round"
PATHS = ("--data-dir", "--config", "--resume", "--plan", "--plan-out", "--output-dir", "--offload-dir")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "round").symlink_to("round")
    return tmp_path


# --- Sizes -----------------------------------------------------------------------------------------------------------

PLANNED = [
    "--epochs 200000000",
    "--epochs 200000000 --partitions 2 --test-every 1 --recovery-epochs 200000000 --warmup-updates 999999",
    "--epochs 200000000 --method streamed --partitions 3 --test-every 7",
    "--batch-size 999999999",
    "--seed 18446744073709551615",
    "--seed -1",
    "--save-every 99999999999999999999",
    "--test-every 99999999999999999999",
]
ABSURD = {
    "--epochs 99999999999999": (2, "--epochs: expected numbers above 0, at most 1000000000; found 99999999999999"),
    "--recovery-epochs 99999999999999": (2, "--recovery-epochs: expected 0 or more, and at most 1000000000"),
    "--batch-size 99999999999999": (2, "--batch-size: expected whole numbers from 1 up, at most 1000000000"),
    "--micro-batch-size 99999999999999": (2, "--micro-batch-size 99999999999999 is more than the batch of 64"),
    "--warmup-updates 99999999999999": (2, "so the learning rate would never be reached"),
    "--partitions 999999999": (2, "--partitions 999999999: the model has 4 blocks"),
    "--method streamed --partitions 999999999": (2, "--partitions 999999999: the model has 4 blocks"),
    "--partitions 0,999999999": (2, "block 999999999 does not exist"),
    "--width 999999999": (3, "block 1 (ResidualBlock) alone has 4000000004.00 GB of weights"),
    "--width 99999999999999": (2, "--width: expected at most 1000000000"),
    "--depth 1000000": (2, "--depth: expected at most 1022 blocks, each of which is planned on its own; found 1000000"),
    "--depth 99999999999999": (2, "--depth: expected at most 1022 blocks"),
    "--epochs " + "9" * 5000: (2, "--epochs: expected numbers above 0, at most 1000000000; found inf"),
    "--mem-limit " + "9" * 400: (2, "--mem-limit: expected a size such as 2GB"),
    "--mem-limit 3000000TB": (2, "--mem-limit: expected at most 2000000000.00 GB; found more"),
    "--ram-limit " + "9" * 400: (2, "--ram-limit: expected a size such as 2GB"),
}


@pytest.mark.parametrize("text", PLANNED)
@pytest.mark.few(2)
def test_a_large_number_that_costs_nothing_is_planned(text, here, capsys):
    """200 million epochs were so many objects before anything was planned: the command seemed to hang."""
    began = time.process_time()
    ran = call(capsys, *SMALL, "--dry-run", "--print-schedule", *text.split())
    assert ran.code == 0, ran.err
    assert time.process_time() - began < 10


@pytest.mark.parametrize("text", ABSURD, ids=lambda text: text[:40])
def test_an_absurd_size_is_refused_before_anything_is_built(text, here, capsys):
    """A width of a billion drew labels of that size piece by piece, a depth of a million was looked at stretch by stretch.

    A limit of 400 digits ended in OverflowError.
    """
    small = [word for flag, word in zip(SMALL[::2], SMALL[1::2], strict=True) if flag not in text for word in (flag, word)]
    began = time.process_time()
    code, words = ABSURD[text]
    ran = call(capsys, *small, "--dry-run", *text.split())
    assert refused(ran, code, words) and len(ran.err) < 1000
    assert time.process_time() - began < 10


def test_a_limit_that_asks_for_too_many_blocks_names_the_cure(here, capsys):
    ran = call(capsys, "--mem-limit", "2GB", "--width", "16", "--dry-run")
    assert refused(ran, 2, "--depth: expected at most 1022", "twice the limit of 2.00 GB: give a --depth, or a larger --width")


# --- Paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [LONG, ZERO, ROUND, "\ud800"], ids=["long", "zero byte", "circle", "surrogate"])
@pytest.mark.parametrize("option", [*PATHS, "idx", "npz", "folder", "text"])
def test_a_name_that_no_file_can_have_is_refused(option, name, here, capsys):
    """A zero byte comes from a file of options, where it may be spelled."""
    before = sorted(here.iterdir())
    given = [option, name] if option in PATHS else ["--data", f"{option}:{name}"]
    if option == "--data-dir":
        given += ["--data", "mnist"]
    ran = call(capsys, *SMALL, *given, *(["--dry-run"] if option != "--resume" else []))
    assert refused(ran, 2, f"{given[0]}: expected a path; found")
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "folder", "/dev/null", "big"])
@pytest.mark.parametrize("option", ["--config", "--plan", "--data npz", "--data text", "--data idx", "--data folder"])
def test_what_is_no_file_is_not_read(option, kind, here, capsys):
    """A plan was read to its end, which a device has not; a pipe that nobody writes to was waited for."""
    os.mkfifo(here / "pipe")
    (here / "folder").mkdir()
    with open(here / "big", "wb") as file:
        file.truncate(1 << 40)
    flag, _, prefix = option.partition(" ")
    if prefix == "text" and kind == "big":
        pytest.skip("a text may be of any size")
    ran = call(capsys, *SMALL, flag, f"{prefix}:{kind}" if prefix else kind, "--dry-run")
    assert refused(ran, 2, flag if kind == "/dev/zero" or not prefix else kind.strip("/"))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000])
def test_what_is_nested_too_deeply_is_refused(text, here, capsys):
    """RecursionError is no ValueError: a plan nested 100,000 deep ended in a traceback of as many lines."""
    (here / "plan.json").write_text(text)
    assert refused(call(capsys, *SMALL, "--dry-run", "--plan", "plan.json"), 2, "is not a plan that --plan-out wrote")
    (here / "options.toml").write_text(f"lr = {text}")
    assert refused(call(capsys, *SMALL, "--dry-run", "--config", "options.toml"), 2, "--config: options.toml is not TOML")


@pytest.mark.parametrize("name", ["job.json", "checkpoint.json"])
def test_a_checkpoint_s_files_that_are_nested_too_deeply_are_damaged(name, here, capsys):
    (here / "run").mkdir()
    (here / "run" / MARKER).write_text(json.dumps({"state": "interrupted"}))
    (here / "run" / name).write_text("[" * 100_000)
    assert refused(call(capsys, "--resume", "run"), 6, f"{name} is damaged")


# --- Data ------------------------------------------------------------------------------------------------------------


def npy(header, data=b""):
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def archive_of(**parts):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in parts.items():
            archive.writestr(f"{name}.npy", data)
    return file.getvalue()


Y = npy("{'descr': '<i8', 'fortran_order': False, 'shape': (10,), }\n", np.arange(10).tobytes())
HEADERS = {
    "cut": "{'descr': '<f4', 'fortran_order': False, 'shape': (10, 6",
    "cut in a string": "{'descr': '<f4', 'fortran_or",
    "empty": "",
    "nested": "(" * 5000,
    "negative": "{'descr': '<f4', 'fortran_order': False, 'shape': (10, -64), }",
    "twice negative": "{'descr': '<f4', 'fortran_order': False, 'shape': (-10, -64), }",
    "huge": "{'descr': '<f4', 'fortran_order': True, 'shape': (10, 999999999999999999999999), }",
    "many rows": "{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999, 64), }",
    "no type": "{'descr': 'no such', 'fortran_order': False, 'shape': (10, 64), }",
    "words": "{'descr': '<U4', 'fortran_order': False, 'shape': (10, 64), }",
    "call": "{'descr': open('x'), 'fortran_order': False, 'shape': (10, 64), }",
    "truth": "{'descr': '<f4', 'fortran_order': 7, 'shape': (10, 64), }",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_an_npz_file_with_a_broken_header_is_damaged(kind, here, capsys):
    """numpy's reader of headers has errors of its own (TokenError), and believes the sizes that it finds."""
    (here / "rows.npz").write_bytes(archive_of(x=npy(HEADERS[kind], bytes(2560)), y=Y))
    assert refused(call(capsys, *SMALL, "--dry-run", "--data", "npz:rows.npz"), 2, "rows.npz")


@pytest.mark.parametrize("at", range(0, 600, 37))
def test_an_npz_file_cut_anywhere_is_damaged(at, here, capsys):
    whole = archive_of(x=npy("{'descr': '<f4', 'fortran_order': False, 'shape': (10, 2), }\n", bytes(80)), y=Y)
    (here / "rows.npz").write_bytes(whole[: len(whole) * at // 600])
    assert refused(call(capsys, *SMALL, "--dry-run", "--data", "npz:rows.npz"), 2, "rows.npz is damaged")


@pytest.mark.parametrize(
    "shape", [(-1, 8, 8), (40, -8, 8), (2**31 - 1, 8, 8), (40, 2**31 - 1, 2**31 - 1), (0, 8, 8), (40, 0, 8)], ids=str
)
@pytest.mark.parametrize("zipped", [False, True])
def test_an_idx_file_with_a_hostile_header_is_refused(shape, zipped, here, capsys):
    write_idx(here / "idx")
    for path in (here / "idx").iterdir():
        if path.name.startswith("train-images"):
            data = path.read_bytes()[:4] + struct.pack(">iii", *shape) + path.read_bytes()[16:]
            path.unlink()
            path.with_name(path.name + (".gz" if zipped else "")).write_bytes(gzip.compress(data) if zipped else data)
    assert refused(call(capsys, *SMALL, "--dry-run", "--data", "idx:idx"), 2)


def test_labels_that_say_more_than_they_have_are_refused(here, capsys):
    write_idx(here / "idx")
    path = here / "idx" / "train-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:4] + struct.pack(">i", 2**31 - 1) + path.read_bytes()[8:])
    assert refused(call(capsys, *SMALL, "--dry-run", "--data", "idx:idx"), 2, "train-labels-idx1-ubyte is damaged")


def images(folder, count, spoil=None):
    for number in range(count):
        path = folder / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
        if spoil is not None and number == 3:
            spoil(path)


@pytest.mark.parametrize("spoil", [lambda p: p.write_bytes(b""), lambda p: p.write_bytes(p.read_bytes()[:40])])
def test_an_image_that_cannot_be_read_is_named(spoil, here, capsys):
    images(here / "folder", 10, spoil)
    ran = call(capsys, *SMALL, "--epochs", "1", "--data", "folder:folder", "--output-dir", "out")
    assert refused(ran, 2, "training data: item", "cannot be read")


def test_a_pipe_among_images_is_no_image(here, capsys):
    """Its name ended in .png, and the run waited for somebody to write to it."""
    images(here / "folder", 10)
    os.mkfifo(here / "folder" / "cat" / "pipe.png")
    assert call(capsys, *SMALL, "--dry-run", "--data", "folder:folder").code == 0


def test_an_image_size_beyond_all_memory_is_refused(here, capsys):
    images(here / "folder", 10)
    ran = call(capsys, *SMALL, "--dry-run", "--data", "folder:folder", "--image-size", "100000")
    assert refused(ran, 2, "--image-size: expected pixels from 1 up, and at most 4096; found 100000")


@pytest.mark.parametrize("spec", ["npz:few.npz", "folder:few", "idx:half", "text:few.txt"])
def test_data_with_half_a_test_set_are_refused_with_what_is_missing(spec, here, capsys):
    rows = np.zeros((4, 64), np.float32)
    np.savez(here / "few.npz", x_train=rows, y_train=np.arange(4) % 2, x_test=rows)
    images(here / "few", 4)
    write_idx(here / "half")
    for path in (here / "half").glob("t10k*"):
        path.unlink()
    (here / "few.txt").write_text("abc")
    ran = call(capsys, *SMALL, "--dry-run", "--data", spec, *(["--model", "gpt"] if "txt" in spec else []))
    assert refused(ran, 2, "test")


def test_bytes_of_a_name_that_are_no_text_are_printed_all_the_same(here, monkeypatch):
    """`run directory out\\udcff` ended in a UnicodeEncodeError: the terminal's encoding has no such character."""
    name, terminal = os.fsdecode(b"out\xff"), io.TextIOWrapper(io.BytesIO(), "ascii", "strict")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main([*SMALL, "--epochs", "1", "--output-dir", name]) == 0
    terminal.flush()
    assert b"run directory out\\udcff" in terminal.buffer.getvalue()
    assert set(files(here / name)) >= {"model.safetensors", "result.json"}


OPTIONS_FILES = {
    "zero byte": 'offload-dir = "a\\u0000b"',
    "date": "lr = 1979-05-27",
    "nan": "lr = nan",
    "infinity": "clip-grad-norm = inf",
    "list of lists": "lr = [[1, 2], [3]]",
    "list of tables": "lr = [{a = 1}]",
    "large": f"seed = {'9' * 5000}",
    "empty text": 'epochs = ""',
    "empty list": "epochs = []",
    "unicode": 'epochs = "٣٣x"',
    "empty path": 'plan = ""',
}


@pytest.mark.parametrize("kind", OPTIONS_FILES)
def test_a_file_of_options_with_a_hostile_value_is_refused(kind, here, capsys):
    (here / "options.toml").write_text(OPTIONS_FILES[kind], encoding="utf-8")
    assert refused(call(capsys, *SMALL, "--dry-run", "--config", "options.toml"), 2)


@pytest.mark.slow
@pytest.mark.parametrize(("option", "value"), in_turn([
    "--mem-limit", "--method", "--device", "--ram-limit", "--epochs", "--batch-size", "--micro-batch-size", "--lr",
    "--optimizer",
    "--weight-decay", "--momentum", "--clip-grad-norm", "--lr-schedule", "--warmup-updates", "--dtype", "--recovery-epochs",
    "--recover", "--recovery-batch-size", "--recovery-lr", "--test-every", "--save-every", "--partitions", "--objective",
    "--kappa", "--prototype-scale", "--sil-inputs", "--shuffle", "--cache-dtype", "--seed", "--model", "--data", "--image-size",
    "--context", "--width", "--depth", "--heads",
] * 2, ["", "nan", "-inf", "1e999", "9" * 400, "\ud800", "--", "1_0"]))  # fmt: skip
def test_every_option_answers_any_value_with_a_plan_or_one_message(option, value, here, capsys):
    """Two of the values for each option; each value for nine of them."""
    ran = call(capsys, *SMALL, "--dry-run", f"{option}={value}")
    assert ran.code in (0, 2, 3), ran.err
    assert ran.code == 0 or refused(ran, ran.code)
