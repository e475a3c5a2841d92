"""Every malformed or inapplicable option, model, data set, file of options and plan is refused in words.

These call the command's own `main` in this process; they end before anything is trained.
"""

import gzip
import json
import subprocess
import sys

import numpy as np
import pytest

from seqpart.checkpoint.marker import MARKER
from seqpart.model.named_optimizers import NAMES
from seqpart.store.atomic import with_checksum
from seqpart.store.direct import explained
from seqpart.train import main
from tests.command import SMALL, Ran, call, command, files, refused
from tests.given import write_idx, write_own

YAML = {
    "broken": "lr: [1", "unknown": "epoch: 3\ndtpye: bf16\n", "list": "- lr\n", "number": "3", "key": "lr: 1\nlr: 2\n",
    "alias": "a: &a 3\nb: *a\n", "tag": "lr: !!python/object/apply:os.getcwd []\n", "nothing": "lr:\n",
    "nested": "lr: [[1, 2]]\n", "table": "lr: {first: 1}\n", "bf16": "bf16: 3\n",
}  # fmt: skip


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A directory with a file for every kind of damage."""
    folder = tmp_path_factory.mktemp("desk")
    write_own(folder, "desk_own")
    (folder / "desk_broken.py").write_text("def (\n")
    write_idx(folder / "mismatch", labels=39)
    write_idx(folder / "longer", damage=lambda name, data: data + b"x" if name == "train-labels-idx1-ubyte" else data)
    write_idx(folder / "not-idx", damage=lambda name, data: b"JUNK" + data[4:] if name == "t10k-images-idx3-ubyte" else data)
    write_idx(folder / "half-zipped")
    whole = gzip.compress((folder / "half-zipped" / "train-labels-idx1-ubyte").read_bytes())
    (folder / "half-zipped" / "train-labels-idx1-ubyte").unlink()
    (folder / "half-zipped" / "train-labels-idx1-ubyte.gz").write_bytes(whole[:30])
    write_idx(folder / "two")
    (folder / "two" / "other-train-images-idx3-ubyte").write_bytes(b"")
    (folder / "empty").mkdir()
    (folder / "counted").mkdir()
    (folder / "counted" / MARKER).touch()
    (folder / "counted" / "job.json").write_text(with_checksum("job", {"mem_limit": "2GB", "max_steps": 3}))
    (folder / "text.npz").write_text("not a zip file")
    (folder / "desk.txt").write_text("To be, or not to be, that is the question. " * 40)
    np.savez(folder / "names.npz", a=np.zeros(3))
    np.savez(folder / "rows.npz", x=np.zeros((10, 64)), y=np.zeros(9))
    np.savez(folder / "words.npz", x=np.array([["a"] * 4] * 10), y=np.arange(10) % 2)
    np.savez(folder / "objects.npz", x=np.array([[None]] * 10), y=np.arange(10) % 2)
    np.savez(folder / "hot.npz", x=np.zeros((10, 64)), y=np.eye(10))
    (folder / "folder" / "cat").mkdir(parents=True)
    (folder / "notaplan.json").write_text("[1, 2")
    (folder / "half.toml").write_text('lr = "1e-4')
    (folder / "options.json").write_text('{"lr": 1e-4}')
    (folder / "unknown.toml").write_text("learn_rate = 1e-4\n")
    (folder / "twice.toml").write_text("lr = 1e-4\nlearning-rate = 1e-3\n")
    for name, text in YAML.items():
        (folder / f"{name}.yaml").write_text(text)
    (folder / "word.toml").write_text('depth = "deep"\n')
    (folder / "switch.toml").write_text('overwrite = "yes"\n')
    (folder / "table.toml").write_text("[lr]\nfirst = 1\n")
    (folder / "inner.toml").write_text('config = "half.toml"\n')
    return folder


@pytest.fixture
def here(desk, monkeypatch):
    """Work in the desk; importing the user's module leaves no trace."""
    monkeypatch.chdir(desk)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = files(desk)
    yield desk
    for name in ("desk_own", "desk_broken"):
        sys.modules.pop(name, None)
    assert {name for name in files(desk) if "__pycache__" not in name} == {n for n in before if "__pycache__" not in n}


OPTIONS = {
    "--quiet --print-schedule --dry-run": "--quiet and --print-schedule: leave one of them out",
    "--warmup-updates 100000": "--warmup-updates 100000: the run has; updates, so the learning rate would never be reached",
    "--method full --best-by accuracy": "--best-by compares evaluations: give --eval-every",
    "--loss ce": "found 'ce'. Did you mean cross-entropy?",
    "--resume counted --epochs 2": "--epochs: the run in counted has its length in updates, --max-steps 3. Leave it out.",
    "--resume nowhere": "--resume: nowhere does not exist. Give the directory of a run",
    "--resume text.npz": "--resume: expected the directory of a run, or one of its checkpoint files; found text.npz",
    "--trace empty": "--trace: expected the name of a file; found the directory empty",
    "--output-dir=": "--output-dir: expected a path; found ''",
    "--mem-limit 2XB": "--mem-limit: expected a size such as 2GB, 1.5GiB, 0.8 (a share) or auto; found '2XB'",
    "--mem-limit -1": "--mem-limit: expected a size such as 2GB; found '-1'",
    "--mem-limit 2": "--mem-limit: expected a size such as 2GB; '2' is 2 bytes, less than any process has.",
    "--mem-limit 0": "--mem-limit: expected a size above zero; found '0'",
    "--mem-limit nan": "--mem-limit: expected a size; found 'nan'",
    "--mem-limit 1.5": "--mem-limit: a number with a point is a share; up to 1.0; found 1.5",
    "--mem-limit 5000TB": "--mem-limit: 5000000.00 GB were asked for, and the device has; Give less, or auto",
    "--ram-limit 2XB": "--ram-limit: expected a size; found '2XB'",
    "--ram-limit 99TB": "--ram-limit: 99000.00 GB were asked for; of RAM are free",
    "--method adaboost": "--method: expected one of auto, sil, ist, streamed, checkpointed, full, psl; found 'adaboost'",
    "--device tpu": "--device: expected auto, cpu, cuda or cuda:N, sim or sim:CARD; found 'tpu'",
    "--device cuda:99": "--device cuda:99",
    "--lr nan": "--lr: expected a finite number, zero or above; found nan",
    "--lr -1": "--lr: expected a finite number; found -1.0",
    "--lr inf": "--lr: expected a finite number; found inf",
    "--lr fast": "--lr: expected a number, or numbers with commas; found 'fast'",
    "--lr 1,2": "--lr 1,2 gives 2 values, and the plan has 1 partition(s); --partitions 2",
    "--partitions 2 --lr 1,2,3": "--lr 1,2,3 gives 3 values, and the plan has 2 partition(s)",
    "--epochs 0": "--epochs: expected numbers above 0; found 0",
    "--epochs 1.5": "--epochs: method sil trains its parts for whole epochs; found 1.5",
    "--epochs 1,2": "--epochs 1,2 gives 2 values",
    "--epochs ,": "--epochs: expected a number; found ','",
    "--batch-size 0": "--batch-size: expected whole numbers from 1 up; found 0",
    "--batch-size 64,-1 --partitions 2": "--batch-size: expected whole numbers from 1 up; found -1",
    "--micro-batch-size 0": "--micro-batch-size: expected a number above zero; found 0",
    "--micro-batch-size many": "--micro-batch-size; 'many'",
    "--partitions 0": "--partitions: expected auto, a number from 1 up; found '0'",
    "--partitions -2": "--partitions: expected auto; found '-2'",
    "--partitions 99": "--partitions 99: the model has 4 blocks at which a partition can begin",
    "--partitions 5,3": "--partitions: expected; rising block numbers from 0 such as 0,20,40; found '5,3'",
    "--partitions 0,2,2": "rising block numbers; found '0,2,2'",
    "--partitions 0,9": "--partitions: block 9 does not exist; the model has blocks 0..3",
    "--partitions some": "--partitions: expected a whole number; found 'some'",
    "--optimizer adagrad": f"--optimizer: expected one of {', '.join(NAMES)}; found 'adagrad'",
    "--optimizer adam,sgd": "--optimizer adam,sgd gives 2 values",
    "--weight-decay -1": "--weight-decay: expected a finite number, zero or above; found -1.0",
    "--weight-decay nan": "--weight-decay: expected a finite number; found nan",
    "--clip-grad-norm 0": "--clip-grad-norm: expected a number above zero; found 0.0",
    "--clip-grad-norm nan": "--clip-grad-norm: expected a number above zero; found nan",
    "--seed x": "--seed; 'x'",
    "--shuffle maybe": "--shuffle: expected yes, no or auto; found 'maybe'",
    "--cache-dtype fp8": "--cache-dtype: expected fp32 or bf16; found 'fp8'",
    "--objective hinge": "--objective: expected one of orthogonal, prototype, mse; found 'hinge'",
    "--objective mse --kappa 0": "--kappa: expected a number above zero; found 0.0",
    "--width 0": "--width and --depth: expected whole numbers, from 1 and from 0 up; found 0 and 2",
    "--depth -1": "--width and --depth; found 64 and -1",
    # Options that do not go with each other.
    "--kappa 3": "--kappa goes with --objective mse; found --objective orthogonal",
    "--objective mse --prototype-scale 3": "--prototype-scale goes with --objective orthogonal or prototype; found",
    "--method full --objective mse": "--objective goes with --method sil only; found --method full. Leave it out",
    "--method full --cache-dtype bf16": "--cache-dtype goes with --method sil only",
    "--method full --partitions 2": "--partitions: method full has one partition; found '2'",
    "--momentum 0.9": "--momentum goes with --optimizer sgd; the others keep moments of their own",
    "--model desk_own:fits": "--width and --depth go with --model mlp; found --model desk_own:fits",
    "--model gpt": "--model gpt takes rows of tokens; found rows of quantities of shape (64,), of --data digits (the default: "
    "; with labels of shape () each",
    "--heads 2": "--heads goes with --model gpt; found --model mlp",
    "--model gpt --data text:desk.txt --context 9 --heads 3": "--heads: expected a number; width of 64; found 3",
    "--model gpt --data text:desk.txt --context 9 --heads 0": "divides the width of 64; found 0",
    "--data text:desk.txt": "--model mlp takes quantities; --data text:desk.txt are tokens. Take --model gpt",
    "--context 8": "--context goes with --data text:FILE; found --data digits",
    "--data text:desk.txt --context 0": "--context: expected characters from 1 up; found 0",
    "--image-size 8": "--image-size goes with --data folder:DIR; found --data digits",
    "--data-dir .": "--data-dir and --download go with mnist, fashion-mnist, emnist; found --data digits",
    "--download": "--data-dir and --download go with mnist",
    "--plan notaplan.json --partitions 2": "--plan brings its own cut and micro-batch",
    # Data.
    "--data imagenet": "--data: expected digits, mnist; package.module:function; found 'imagenet'",
    "--data npz:": "--data: expected; found 'npz:'",
    "--data idx:nowhere": "--data idx:nowhere: expected the files in nowhere, but there is no such directory",
    "--data idx:empty": "--data idx:empty: expected a file with train and images in its name; found none",
    "--data idx:two": "--data idx:two: two holds several sets; Give a directory with one of them",
    "--data idx:mismatch": "has 40 images; has 39 labels; the numbers must be equal",
    "--data idx:longer": "train-labels-idx1-ubyte is damaged: it is longer than its header says",
    "--data idx:not-idx": "t10k-images-idx3-ubyte is not an idx file; 4a554e4b",
    "--data idx:half-zipped": "train-labels-idx1-ubyte.gz is damaged",
    "--data npz:nowhere.npz": "--data npz:nowhere.npz: no such file",
    "--data npz:text.npz": "text.npz is damaged or not an npz file",
    "--data npz:names.npz": "names.npz: expected arrays x_train; found a",
    "--data npz:rows.npz": "rows.npz: 10 rows in x and 9 in y; the numbers must be equal",
    "--data npz:words.npz": "words.npz: expected x to be rows of numbers",
    "--data npz:objects.npz": "objects.npz: expected x to be rows of numbers",
    "--data npz:hot.npz": "method sil needs classes (integers) as labels; found floats",
    "--data text:nowhere.txt": "--data text:nowhere.txt: no such file",
    "--data text:rows.npz": "rows.npz is not; text; Give a UTF-8 text file",
    "--data folder:nowhere": "--data folder:nowhere: no such directory",
    "--data folder:folder": "--data folder:folder: found no images",
    "--data folder:folder --image-size 0": "--image-size: expected pixels from 1 up; found 0",
    "--data mnist": "--data mnist needs --data-dir",
    "--data mnist --data-dir empty": "--data mnist; MNIST/raw; no such directory. Give --download to fetch it",
    "--data nothere:f": "--data nothere:f: no module named 'nothere'",
    "--data nothere.py:f": "Give the name of the module: nothere:FUNCTION.",
    "--data desk_own:words": "training data: expected a pair (x, y) of tensors or arrays, or a data set; found the text",
    "--data desk_own:triple": "--data desk_own:triple: expected a pair (training, test); found tuple",
    "--data desk_own:one_class": "training labels: every row has class 3. Training needs at least two classes",
    "--data desk_own:negative": "training labels: found class -1; expected classes that count from 0",
    "--data desk_own:unseen": "test labels: class 0 does not occur in the training rows",
    "--data desk_own:sparse": "training labels: found class 1000000000 among 3 classes; number them 0 to 2",
    "--data desk_own:nobody": "training data: the set is empty. Give at least one row",
    "--data desk_own:short": "training data: 4 rows of x and 3 labels; the numbers must be equal",
    "--data desk_own:floats": "labels differ: training has torch.float32 and test torch.int64",
    "--data desk_own:other_shape": "training rows have shape (8,) and test rows (64,). Bring both to one shape",
    "--data desk_own:featureless": "training data: rows of shape (0,) hold no numbers",
    # Files of options and plans.
    "--config": "--config",
    "--config nowhere.toml": "--config: cannot read nowhere.toml: No such file or directory",
    "--config half.toml": "--config: half.toml is not TOML",
    "--config options.json": (
        "--config: options.json is not TOML (options are read from TOML, and from YAML in a .yaml file): "
    ),
    "--config unknown.toml": "--config: unknown.toml has unknown option(s) learn_rate; --help",
    "--config twice.toml": "--config: twice.toml says lr twice, in two spellings",
    "--config broken.yaml": "--config: broken.yaml is not YAML: while parsing",
    "--config unknown.yaml": "--config: unknown.yaml has unknown option(s) dtpye, epoch. Did you mean dtype and epochs?",
    "--config list.yaml": "--config: list.yaml is not YAML: expected a table of options, each as `name: value`",
    "--config number.yaml": "expected a table of options",
    "--config key.yaml": "--config: key.yaml is not YAML: line 1 begins a table that has 'lr' twice",
    "--config alias.yaml": "--config: alias.yaml is not YAML: line 2 has an alias, *a",
    "--config tag.yaml": "--config: tag.yaml is not YAML: could not determine a constructor for the tag",
    "--config nothing.yaml": "a name without a value; leave it out for the default",
    "--config nested.yaml": "expected a value or a list of values; found a list in a list",
    "--config table.yaml": "--config: table.yaml: lr must be a value or a list of values; found a table",
    "--config bf16.yaml": "--config: bf16.yaml: bf16 must be true or false; found 3",
    "--bf16 --dtype fp32": "--bf16 is short for --dtype bf16; found --dtype fp32 beside it",
    "--config inner.toml": "--config: inner.toml has unknown option(s) config",
    "--config word.toml": "--depth; 'deep'",
    "--config switch.toml": "--config: switch.toml: overwrite must be true or false; found 'yes'",
    "--config table.toml": "--config: table.toml: lr must be a value or a list of values; found a table",
    "--plan nowhere.json": "--plan: cannot read nowhere.json",
    "--plan notaplan.json": "--plan: notaplan.json is not a plan that --plan-out wrote",
}

MODELS = {
    "transformer": "or package.module:function; found 'transformer'",
    "torchvision:resnet81": "--model torchvision:resnet81: torchvision has no model of that name. Near it: resnet",
    "timm:resnet81": "--model timm:resnet81: timm has no model of that name. Near it: resnet",
    "torchvision:resnet18": "takes images (channels, height, width); found rows of quantities of shape (64,), of --data digits "
    "(the default: scikit-learn's 8 x 8 digits as rows of 64 numbers); Give --data imagefolder:DIR, folder:DIR",
    "timm:resnet18": "takes images (channels, height, width); of --data digits (the default; Give --data imagefolder:DIR",
    "desk_own:narrow": "cannot take rows of shape (64,); no --data given: digits, the default: scikit-learn's 8 x 8 digits",
    "lenet": "of at least 16 pixels a side; of --data digits (the default; Give --data mnist",
    "hf:.": "--model hf:.: expected a directory with a config.json, as save_pretrained writes it; found none",
    ":f": "--model: expected package.module:function; found ':f'",
    "..x:f": "--model: expected package.module:function; found '..x:f'",
    "desk_own:": "--model: expected package.module:function; found 'desk_own:'",
    "desk_own:nothing": "--model desk_own:nothing: desk_own has no function 'nothing'. It has",
    "desk_own:value": "desk_own has no function 'value'",
    "desk_broken:f": "--model desk_broken:f: importing desk_broken failed: SyntaxError; --debug",
    "desk_own:raises": "--model desk_own:raises: calling raises() failed: ValueError: boom; --debug",
    "desk_own:asks": "calling asks() failed: TypeError; It must run without arguments",
    "desk_own:number": "a model must be an nn.Module; found int",
    "desk_own:module": "a model must be an nn.Module; found ModuleList; give list(model)",
    "desk_own:empty": "the model has no blocks: give at least one",
    "desk_own:no_module": "block 0 (<lambda>): the factory returned a int, not an nn.Module",
    "desk_own:few": "the network ends with outputs of shape (5,), and the labels have 10 classes, counted from 0. Let",
}


def settings_without(arguments):
    """The small settings, less what `arguments` (a config file, perhaps) bring themselves."""
    small = list(SMALL)
    for flag in ("--width", "--depth", "--mem-limit"):
        if flag in arguments or (flag == "--depth" and "word.toml" in arguments):
            del small[small.index(flag) : small.index(flag) + 2]
    return small


@pytest.mark.parametrize("text", OPTIONS)
def test_a_malformed_or_inapplicable_option_is_refused_in_words(text, here, capsys):
    arguments = text.split()
    ran = call(capsys, *settings_without(arguments), "--dry-run", *arguments)
    assert refused(ran, 2, *OPTIONS[text].split("; "))


@pytest.mark.parametrize("model", MODELS)
def test_an_unusable_model_is_refused_in_words(model, here, capsys):
    ran = call(capsys, "--mem-limit", "2GB", "--dry-run", "--model", model)
    assert refused(ran, 2, *MODELS[model].split("; "))


def test_without_a_limit_the_command_says_what_is_missing(capsys):
    for arguments in ([], ["--width", "64"]):
        ran = call(capsys, *arguments)
        assert refused(ran, 2, "OptionError: --mem-limit is missing. Give the limit to keep, such as --mem-limit 2GB.")
        assert ran.err.count("\n") == 1, "no box around it"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--width", "128.5"], "--width: expected a whole number; found '128.5'."),
        (["--config", "a.toml"], "--width: expected a whole number; found '128.5'."),
        (["--config", "a.yaml"], "--width: expected a whole number; found '128.5'."),
        (["--weight-decay", "little"], "--weight-decay: expected a number; found 'little'."),
        (["--widht", "3"], "unknown option(s): --widht. Did you mean --width? --help shows all."),
        (["--quiet", "yes"], "found 'yes', which belongs to no option. Give --NAME VALUE; --help shows all."),
        (["--seed", "-3", "--lr"], "--lr: expected a value after it; found none. --help shows what it takes."),
    ],
    ids=str,
)
def test_what_the_parser_drew_a_box_around_is_one_message_too(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text("width = 128.5\n")
    (tmp_path / "a.yaml").write_text("width: 128.5\n")
    ran = call(capsys, "-m1GB", "--dry-run", *arguments)
    assert refused(ran, 2) and ran.err == f"OptionError: {words}\n"


def test_several_mistakes_are_reported_at_once(capsys):
    ran = call(capsys, *SMALL, "--shuffle", "maybe", "--clip-grad-norm", "-1", "--kappa", "3")
    assert refused(ran, 2, "--shuffle: expected", "--clip-grad-norm: expected", "--kappa goes with")


@pytest.fixture(scope="module")
def plan_text(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert main([*SMALL, "--partitions", "0,2", "--dry-run", "--plan-out", str(path)]) == 0
    return path.read_text()


@pytest.fixture
def saved_plan(tmp_path, plan_text):
    path = tmp_path / "plan.json"
    path.write_text(plan_text)
    return path


def test_a_plan_for_another_model_is_refused(saved_plan, capsys):
    ran = call(capsys, "--width", "32", "--depth", "2", "--mem-limit", "2GB", "--dry-run", "--plan", saved_plan)
    assert refused(ran, 2, "--plan: that plan is for another model or method", "Make a new one with --plan-out")


@pytest.mark.parametrize(
    "damage",
    [
        lambda plan: plan.update(format=99),
        lambda plan: plan.update(colour="red"),
        lambda plan: plan.update(partitions=[]),
        lambda plan: plan.update(partitions=7),
        lambda plan: plan["partitions"][1].pop("micro_batch"),
        lambda plan: plan["partitions"][1].update(micro_batch="many"),
        lambda plan: plan["partitions"][1].update(micro_batch=0),
        lambda plan: plan["partitions"][1].update(first=0),
        lambda plan: plan["partitions"][1].update(first=99),
        lambda plan: plan["partitions"][0].update(first=1),
        lambda plan: plan["partitions"][0].update(last=1),
        lambda plan: plan["partitions"][0].update(stays=True, weights_stay=True),
        lambda plan: plan.pop("fingerprint"),
    ],
)
def test_a_damaged_plan_is_refused(saved_plan, damage, capsys):
    plan = json.loads(saved_plan.read_text())
    damage(plan)
    saved_plan.write_text(json.dumps(plan))
    ran = call(capsys, *SMALL, "--dry-run", "--plan", saved_plan)
    assert refused(ran, 2, "--plan: ", "is not a plan that --plan-out wrote")


def test_a_saved_plan_that_no_longer_fits_is_refused(saved_plan, capsys):
    ran = call(capsys, "--width", "64", "--depth", "2", "--mem-limit", "20MB", "--dry-run", "--plan", saved_plan)
    assert refused(ran, 3, "smallest limit that fits")


@pytest.mark.parametrize("path", ["nowhere/plan.json", "."])
def test_a_plan_that_cannot_be_written_is_said(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert refused(call(capsys, *SMALL, "--dry-run", "--plan-out", path), 6, "cannot make", "that you may write to")
    assert files(tmp_path) == {}


@pytest.mark.usefixtures("measured_machine")
@pytest.mark.parametrize(
    ("option", "path"),
    [("--output-dir", "file"), ("--output-dir", "/proc/x"), ("--offload-dir", "file/x"), ("--offload-dir", "/proc")],
)
@pytest.mark.few(2)
def test_a_directory_that_cannot_be_used_is_named(option, path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    ran = call(capsys, *SMALL, option, path)
    assert refused(ran, 6, "DirectoryUnusable", "Give a directory that you may write to")
    assert {name: data for name, data in files(tmp_path).items() if name == "file"} == {"file": b"mine"}


def test_a_full_disk_is_explained_with_the_place_that_helps(tmp_path):
    assert "--offload-dir" in explained(OSError(28, "No space left on device"), tmp_path).with_flags


def test_debug_shows_where_it_failed_and_keeps_the_exit_code(here, capsys):
    ran = call(capsys, "--mem-limit", "2GB", "--dry-run", "--model", "desk_own:raises", "--debug")
    assert ran.code == 2
    assert "Traceback" in ran.err
    assert 'raise ValueError("boom")' in ran.err
    assert "calling raises() failed" in ran.err


def test_a_reader_that_goes_away_is_no_traceback(tmp_path):
    asked = [sys.executable, "-m", "seqpart", "--help"]
    process = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    process.stdout.close()
    with process.stderr:
        assert (process.stderr.read(), process.wait()) == (b"", 0)  # the end of the output is none of the program


def test_the_helpers_of_these_tests_run_the_real_command():
    assert command(["--help"])[1:3] == ["-m", "seqpart.train"]
    assert not refused_or_raises(Ran(0, "", ""))
    assert not refused_or_raises(Ran(2, "", "Traceback"))
    assert refused_or_raises(Ran(2, "", "said"))


def refused_or_raises(ran):
    try:
        return refused(ran, 2)
    except AssertionError:
        return False
