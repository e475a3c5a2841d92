"""What is typed, or stands in a file or a saved job, becomes values with types; --help shows the options in groups."""

import dataclasses
import json
import re
import sys

import pytest

from seqpart.checkpoint.run_directory import RunDirectory
from seqpart.cli.arguments import gathered, groups_of, kept_options, options_of
from seqpart.cli.commands import VerifyJob
from seqpart.cli.job import Job
from seqpart.errors import OptionError
from seqpart.fields import flags_of
from seqpart.model.named_optimizers import NAMES
from seqpart.store.atomic import with_checksum, write_text
from tests.command import call

LIMIT = ("--mem-limit", "1GB")


def typed(*words):
    return options_of(Job, gathered([*LIMIT, *words], Job), "test")


READ = [
    ("epochs", "5,160", (5, 160)),
    ("epochs", "5, 160", (5, 160)),
    ("epochs", "7", 7),
    ("batch_size", "1", 1),
    ("lr", "1e-3,1e-4", (1e-3, 1e-4)),
    ("lr", "1", 1.0),
    ("optimizer", "adam, sgd", ("adam", "sgd")),
    ("optimizer", "sgd", "sgd"),
    ("partitions", "0,20,40", (0, 20, 40)),
    ("partitions", "3", 3),
    ("partitions", "auto", "auto"),
    ("prototype_scale", "16,4", (16.0, 4.0)),
    ("shuffle", "no", False),
    ("shuffle", "yes", True),
    ("shuffle", "auto", "auto"),
    ("save_every", "500", "500"),
    ("mem_limit", "0.8", "0.8"),
    ("ram_limit", "2GB", "2GB"),
    ("momentum", "0.5", 0.5),
    ("clip_grad_norm", "1", 1.0),
    ("cache_dtype", "bf16", "bf16"),
]


@pytest.mark.parametrize(("name", "text", "value"), READ, ids=[f"{name} {text}" for name, text, _ in READ])
def test_a_text_becomes_the_value_that_it_means_and_comes_back_from_a_saved_job(name, text, value, tmp_path):
    job = typed(f"--{name.replace('_', '-')}={text}")
    assert getattr(job, name) == value and type(getattr(job, name)) is type(value)
    assert kept_and_found(tmp_path, kept_options(job)) == job


def kept_and_found(tmp_path, options):
    """The job of a run that was killed before its first checkpoint, with those options in its job.json."""
    directory = RunDirectory(tmp_path / "run")
    write_text(directory.result("job.json"), with_checksum("job", json.loads(json.dumps(options))))
    directory.close("failed")
    resumed = options_of(Job, gathered(["--resume", str(tmp_path / "run")], Job), "test")
    return dataclasses.replace(resumed, resume=None)


MISSPELLED = [
    (["--mem-limt", "2GB"], "unknown option(s): --mem-limt. Did you mean --mem-limit? --help shows all."),
    (
        ["--mem-limt=2GB", "--batchsize", "3"],
        "unknown option(s): --mem-limt, --batchsize. Did you mean --mem-limit and --batch-",
    ),
    (["--mem_limt", "2GB", "--no-dry-run"], "unknown option(s): --mem_limt. Did you mean --mem-limit? --help"),
    (["--mem", "2GB"], "unknown option(s): --mem. Did you mean --mem-limit? --help"),
    (["--colour", "red"], "unknown option(s): --colour. --help"),
]


@pytest.mark.parametrize("kind", [Job, VerifyJob])
@pytest.mark.parametrize(("words", "said"), MISSPELLED, ids=[" ".join(words) for words, _ in MISSPELLED])
def test_a_misspelled_flag_is_answered_with_the_nearest_where_a_required_one_is_missing_too(words, said, kind):
    """The parser names what is near to an unknown flag, but for the one that is misspelled most: the limit."""
    with pytest.raises(OptionError) as refused:
        options_of(kind, gathered(words, kind), "test")
    assert refused.value.with_flags.startswith(said)


def test_no_flag_of_the_command_is_unknown_to_it():
    """--no-decay was taken for the contrary of --decay, which does not exist, and could not be given at all."""
    known = {flag: field for field in dataclasses.fields(Job) for flag in flags_of(field.name, field.type)}
    for flag, field in known.items():
        words = ["--mem-limit", "1GB", flag, *(() if field.type is bool else ("?",))]
        try:
            options_of(Job, gathered(words, Job), "test")
        except OptionError as refused:
            assert "unknown option" not in refused.with_flags


@pytest.mark.parametrize("words", [["--mem_limit", "1GB"], ["-m", "1GB"], ["--mem-limit=1GB", "--no-quiet"]], ids=" ".join)
def test_other_ways_to_write_a_flag_are_not_taken_for_mistakes(words):
    assert options_of(Job, gathered(words, Job), "test").mem_limit == "1GB"


def test_a_job_that_version_0_2_0_kept_as_texts_is_found_again(tmp_path):
    options = {"mem_limit": "1GB", "epochs": "5,160", "lr": "1e-3, 1e-4", "partitions": "0,2", "shuffle": "no", "seed": 3}
    found = kept_and_found(tmp_path, options)
    assert (found.epochs, found.lr, found.partitions, found.shuffle, found.seed) == ((5, 160), (1e-3, 1e-4), (0, 2), False, 3)
    assert found.method == "sil", "it was the default, and is what that run is"


@pytest.mark.parametrize(
    ("other", "usual"),
    [
        (["-o", "out"], ["--output-dir", "out"]),
        (["--learning-rate", "1e-3,1e-4"], ["--lr", "1e-3,1e-4"]),
        (["--learning-rate=1e-3"], ["--lr=1e-3"]),
        (["--bf16"], ["--dtype", "bf16"]),
        (["--bf16", "--dtype", "bf16"], ["--dtype=bf16"]),
        (["-m", "2GB"], ["--mem-limit", "2GB"]),
    ],
)
def test_an_option_may_be_spelled_otherwise(other, usual):
    assert typed(*other) == typed(*usual)


FILE = {"learning-rate": [1e-3, 1e-4], "epochs": 5, "bf16": True, "shuffle": False, "save_every": "30s", "partitions": 2}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "learning-rate: [1e-3, 0.0001]\nepochs: 5\nbf16: true\nshuffle: no\nsave_every: 30s\npartitions: 2\n"),
        ("run.YML", "{learning-rate: [0.001, 1e-4], epochs: 5, dtype: bf16, shuffle: false, save-every: 30s, partitions: 2}"),
        ("run.yaml", json.dumps(FILE)),
        (
            "run.toml",
            'lr = [1e-3, 1e-4]\nepochs = 5\nbf16 = true\nshuffle = false\nsave-every = "30s"\npartitions = 2\n',
        ),
    ],
)
def test_a_file_of_options_is_toml_or_yaml(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    said = ["--lr", "1e-3,1e-4", "--epochs", "5", "--bf16", "--shuffle", "no", "--save-every", "30s", "--partitions", "2"]
    found = dataclasses.replace(typed("--config", str(tmp_path / name)), config=None)
    assert found == typed(*said)
    assert typed("--config", str(tmp_path / name), "--epochs", "7").epochs == 7, "the command line wins"


def test_an_empty_yaml_file_says_nothing(tmp_path):
    (tmp_path / "run.yaml").write_text("# lr: 3\n")
    assert dataclasses.replace(typed("--config", str(tmp_path / "run.yaml")), config=None) == typed()


def test_where_there_is_no_pyyaml_a_yaml_file_is_refused_with_the_command_that_installs_it(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text("lr: 3\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(OptionError, match=r"pip install pyyaml, or write it as TOML"):
        typed("--config", str(tmp_path / "run.yaml"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch-size", "1.5"], "--batch-size: expected a whole number, or whole numbers with commas; found '1.5'"),
        *(
            (["--partitions", text], f"--partitions: expected a whole number, or whole numbers with commas; found '{text}'")
            for text in ("0,x", "", "1.5", "0,")
        ),
        (["--epochs", "0"], "--epochs: expected numbers above 0; found 0"),
        (["--lr", ",1"], "--lr: expected a number, or numbers with commas; found ',1'"),
        (["--prototype-scale", "large"], "--prototype-scale: expected a number, or numbers with commas; found 'large'"),
        (
            ["--method", "boosting"],
            "--method: expected one of auto, sil, ist, streamed, checkpointed, full, psl; found 'boosting'",
        ),
        (
            ["--optimizer", "lamb"],
            f"--optimizer: expected one of {', '.join(NAMES)}; found 'lamb'",
        ),
        (["--shuffle", "perhaps"], "--shuffle: expected yes, no or auto; found 'perhaps'"),
        (["--cache-dtype", "fp8"], "--cache-dtype: expected fp32 or bf16; found 'fp8'"),
        (["--weights-dtype", "fp8"], "--weights-dtype: expected fp32 or bf16; found 'fp8'"),
        (
            ["--augment", "imagenit"],
            "--augment: expected one of imagenet, cifar, none; found 'imagenit'. Did you mean imagenet",
        ),
        (["--method", "straemed"], "found 'straemed'. Did you mean streamed?"),
        *(
            (
                ["--partitions", text],
                f"--partitions: expected auto, a number from 1 up, or rising block numbers.*found '{text}'",
            )
            for text in ("0", "-1", "3,5", "0,0", "0,5,3")
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_the_words_of_the_command(words, said):
    with pytest.raises(OptionError) as refused:
        typed("=".join(words))
    assert re.search(said, refused.value.with_flags)


@pytest.mark.parametrize("kind", [Job, VerifyJob])
def test_every_option_stands_in_one_group(kind):
    named = [name for names in groups_of(kind).values() for name in names]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(kind))


def test_the_help_is_in_groups_that_list_choices_and_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = call(capsys, "--help").out
    places = [said.index(f" {title} options ") for title in groups_of(Job)]
    assert places == sorted(places)
    for words in (
        "--method {auto,sil,ist,streamed,checkpointed,full,psl}",
        "--recover {left,all}",
        "--optimizer {adam,adamw,sgd,adafactor,lion,muon,schedulefree,adamw8bit,",
    ):
        assert words in said
    assert all(len(line) <= 80 for line in said.splitlines())
    assert "-m SIZE, --mem-limit SIZE" in said and "-o PATH, --output-dir PATH" in said
    assert list(groups_of(Job))[-2:] == ["sil", "ist"]


def test_the_command_says_which_method_it_takes_where_none_was_given(capsys):
    small = ["--width", "64", "--depth", "2", "--mem-limit", "1GB", "--dry-run"]
    words = "no --method given: sil, which is approximate; --method auto takes the fastest exact method that fits"
    assert words in call(capsys, *small).out
    assert "no --method given" not in call(capsys, *small, "--method", "sil").out
