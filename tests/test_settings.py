"""What may be set, how Python values and text become settings, and what contradicts."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from torch import nn

import seqpart
from seqpart import BadInput, Trainer
from seqpart.config import IN_PYTHON
from seqpart.errors import OptionError
from seqpart.fields import per_partition
from seqpart.options import Options
from seqpart.settings import Settings
from tools import write_options


def test_a_limit_and_a_method_are_all_that_must_be_given():
    settings = Settings.of(mem_limit="2GB", method="sil")
    assert (settings.method, settings.objective_name, settings.cache_type, settings.shuffles) == (
        "sil", "orthogonal", torch.float32, True,
    )  # fmt: skip
    with pytest.raises(OptionError, match=r'mem_limit is missing.*mem_limit="2GB"'):
        Settings.of()


def test_settings_do_not_change_once_made():
    with pytest.raises(FrozenInstanceError):
        Settings.of(mem_limit="2GB", method="auto").seed = 3


def test_an_unknown_setting_is_refused_with_the_known_ones():
    """The list lacked quiet, which the trainer takes beside the settings."""
    with pytest.raises(OptionError, match=r"unknown setting\(s\): colour\. Known: .*\blr\b.*\bquiet\b"):
        Trainer([nn.Linear(2, 2)], mem_limit="2GB", method="full", colour=1)


NEAR = {
    "batchsize": "batch_size", "mem_limt": "mem_limit", "memory_limit": "mem_limit", "num_epochs": "epochs", "quite": "quiet",
    "learning_rate": "lr", "micro": "micro_batch_size", "resume": "fit(..., resume=DIR)",
    "callback": "fit(..., callbacks=[...])",
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_a_misspelled_setting_is_answered_with_the_nearest(name):
    with pytest.raises(OptionError, match=re.escape(f"unknown setting(s): {name}. Did you mean {NEAR[name]}?") + "$"):
        Trainer([nn.Linear(2, 2)], mem_limit="2GB", method="full", **{name: 1})


def test_what_goes_elsewhere_in_python_is_there():
    taken = set(inspect.signature(Trainer.fit).parameters)
    names = {field.name for field in fields(Settings)}
    for name, instead in IN_PYTHON.items():
        assert name not in names
        assert name in taken if instead.startswith("fit(") else re.split("=", instead)[0] in names


PYTHON = [
    ("mem_limit", 2_000_000_000, 2_000_000_000),
    ("mem_limit", 0.8, 0.8),
    ("epochs", 5, 5),
    ("epochs", np.int64(5), 5),
    ("epochs", [5, 160], (5, 160)),
    ("lr", (1e-3, 1e-4), (1e-3, 1e-4)),
    ("lr", 1, 1.0),
    ("lr", [1, 2e-3], (1.0, 2e-3)),
    ("optimizer", ["adam", "sgd"], ("adam", "sgd")),
    ("partitions", [0, 20, 40], (0, 20, 40)),
    ("partitions", 3, 3),
    ("partitions", "auto", "auto"),
    ("shuffle", False, False),
    ("save_every", 500, 500),
    ("ram_limit", 10**9, 10**9),
    ("ram_limit", None, None),
    ("output_dir", "runs/mine", Path("runs/mine")),
    ("offload_dir", Path("fast"), Path("fast")),
    ("weight_decay", 1, 1.0),
    ("clip_grad_norm", None, None),
    ("micro_batch_size", 8, 8),
    ("seed", -3, -3),
    ("overwrite", True, True),
]


@pytest.mark.parametrize(("name", "value", "kept"), PYTHON)
def test_python_values_are_kept_as_the_types_of_their_fields(name, value, kept):
    found = getattr(Settings(**{"mem_limit": "2GB", "method": "sil", name: value}), name)
    assert found == kept
    assert type(found) is type(kept) or isinstance(found, Path)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("output_dir", 3, "output_dir: expected a path; found 3"),
        ("overwrite", "no", "overwrite: expected True or False; found 'no'"),
        ("overwrite", 1, "overwrite: expected True or False; found 1"),
        ("micro_batch_size", "8", "micro_batch_size: expected a whole number; found '8'"),
        ("micro_batch_size", 8.0, r"micro_batch_size: expected a whole number; found 8\.0"),
        ("seed", True, "seed: expected a whole number; found True"),
        ("seed", None, "seed: expected a whole number; found None"),
        ("seed", 2**64, r"seed: expected a whole number of 64 bits, at most 18446744073709551615; found 18446744073709551616"),
        ("weight_decay", "0.1", r"weight_decay: expected a number; found '0\.1'"),
        ("epochs", "5,160", "epochs: expected a number, or a list of them; found '5,160'"),
        ("epochs", [5, "6"], r"epochs: expected a number, or a list of them; found \[5, '6'\]"),
        ("epochs", [], r"epochs: expected a number, or a list of them; found \[\]"),
        ("lr", 10**400, "lr: expected a number, or a list of them; found 1000"),
        ("epochs", 0, "epochs: expected numbers above 0; found 0"),
        ("batch_size", (8, 0), "batch_size: expected whole numbers from 1 up; found 0"),
        ("lr", True, "lr: expected a number, or a list of them; found True"),
        ("mem_limit", None, r"mem_limit: expected a size such as 2GB, 1\.5GiB, 0\.8 \(a share\) or auto; found None"),
        ("prototype_scale", "large", "prototype_scale: expected a number, or a list of them; found 'large'"),
        ("shuffle", "perhaps", "shuffle: expected True, False or auto; found 'perhaps'"),
    ],
)
def test_python_values_of_another_type_are_refused(name, value, words):
    with pytest.raises(OptionError, match=words):
        Settings(**{"mem_limit": "2GB", "method": "sil", name: value})


WORDS = [
    ({"optimizer": "adamW"}, "Did you mean adamw?"),
    ({"method": "straemed"}, "Did you mean streamed?"),
    ({"loss": "cross_entropy"}, "Did you mean cross-entropy?"),
    ({"optimizer": ["adam", "sdg"]}, "Did you mean sgd?"),
    ({"method": "straemed", "objective": "protoype"}, "Did you mean streamed?; objective: expected one of"),
    ({"dtype": torch.float16}, "expected fp32 or bf16; found torch.float16. Did you mean bf16?"),
]


@pytest.mark.parametrize(("options", "words"), WORDS, ids=str)
def test_a_misspelled_value_is_answered_with_the_nearest(options, words):
    """Only misspelled options were."""
    with pytest.raises(OptionError, match=re.escape(words)):
        Settings.of(**{"mem_limit": "2GB", "method": "sil", **options})


@pytest.mark.parametrize(
    ("given", "means"),
    [(torch.bfloat16, "bf16"), ("bfloat16", "bf16"), ("torch.bfloat16", "bf16"), (torch.float32, "fp32"), ("float32", "fp32")],
)
def test_types_may_be_called_as_torch_calls_them(given, means):
    settings = Settings.of(mem_limit="2GB", method="sil", dtype=given, cache_dtype=given)
    assert (settings.dtype, settings.cache_dtype) == (means, means)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "boosting"}, "method: expected one of auto, sil, ist, streamed, checkpointed, full, psl; found 'boosting'"),
        ({"objective": "hinge"}, "objective: expected one of orthogonal, prototype, mse; found 'hinge'"),
        ({"sil_inputs": "none"}, "sil_inputs: expected cached or synthetic; found 'none'"),
        ({"method": "ist"}, 'method="ist" needs subnets: how many parts'),
        ({"method": "auto", "subnets": 2, "local_steps": 3}, 'subnets goes with method="ist" only.*local_steps goes with'),
        ({"method": "sil", "subnet_rows": "all", "subnet_moments": "zero"}, "subnet_rows goes with.*subnet_moments goes with"),
        (
            {"method": "ist", "subnets": 0, "subnet_groups": -1},
            "subnets: expected a number above zero; found 0.*subnet_groups:",
        ),
        ({"method": "ist", "subnets": 2, "subnet_rows": "some"}, "subnet_rows: expected shard or all; found 'some'"),
        ({"method": "ist", "subnets": 2, "kappa": 3.0}, 'kappa goes with method="sil" only'),
        ({"method": "ist", "subnets": 2, "recovery_epochs": 1}, 'recovery_epochs goes with method="sil" only'),
        ({"method": "ist", "subnets": 2, "tile": "16MB"}, "tile goes with exact methods"),
        ({"sil_inputs": "synthetic", "method": "full"}, 'sil_inputs goes with method="sil" only'),
        ({"kappa": 3.0}, 'kappa goes with objective="mse"; found objective="orthogonal"'),
        ({"objective": "mse", "prototype_scale": 3.0}, 'prototype_scale goes with objective="orthogonal" or prototype'),
        ({"prototype_scale": [16, 0]}, "prototype_scale: expected a number above zero; found 0.0"),
        ({"method": "full", "objective": "mse"}, 'objective goes with method="sil" only; found method="full"'),
        ({"method": "full", "kappa": 3.0}, 'kappa goes with method="sil" only'),
        ({"method": "full", "cache_dtype": "bf16"}, 'cache_dtype goes with method="sil" only'),
        ({"method": "full", "partitions": 2}, "partitions: method full has one partition; found '2'"),
        ({"cache_dtype": "fp8"}, "cache_dtype: expected fp32 or bf16"),
        ({"micro_batch_size": 0}, "micro_batch_size: expected a number above zero; found 0"),
        ({"clip_grad_norm": float("inf")}, "clip_grad_norm: expected a number above zero; found inf"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(options, words):
    with pytest.raises(OptionError, match=words):
        Settings.of(**{"mem_limit": "2GB", "method": "sil", **options})


@pytest.mark.parametrize(
    ("given", "scales"), [(None, [16, 8, 8]), (5, [5, 5, 5]), ((16, 2), [16, 2, 2]), ([9, 3, 1], [9, 3, 1])]
)
def test_the_last_prototype_scale_holds_for_all_that_follow(given, scales):
    settings = Settings.of(mem_limit="2GB", method="sil", prototype_scale=given)
    assert [settings.prototype_scale_of(partition, 47) for partition in range(3)] == scales


@pytest.mark.parametrize(("classes", "scale"), [(0, 8.0), (2, 8.0), (54, 8.0), (1000, 10.9078), (50_000, 14.8198)])
def test_later_partitions_have_a_larger_scale_where_classes_are_many(classes, scale):
    settings = Settings.of(mem_limit="2GB", method="sil")
    assert settings.prototype_scale_of(0, classes) == 16
    assert settings.prototype_scale_of(1, classes) == pytest.approx(scale, abs=1e-4)


def test_all_contradictions_are_reported_at_once():
    with pytest.raises(OptionError, match=r"kappa goes.*; clip_grad_norm: .*; test_every: "):
        Settings(mem_limit="2GB", method="sil", kappa=3.0, test_every=0, clip_grad_norm=0.0)
    with pytest.raises(OptionError, match=r"epochs: expected.*; seed: expected"):
        Settings(mem_limit="2GB", method="sil", epochs="3", seed=0.5)


def test_the_paper_s_objective_brings_the_paper_s_row_order():
    assert not Settings.of(mem_limit="2GB", method="sil", objective="mse").shuffles
    assert Settings.of(mem_limit="2GB", method="sil", objective="mse", shuffle=True).shuffles
    assert Settings.of(mem_limit="2GB", method="full").shuffles
    assert not Settings.of(mem_limit="2GB", method="sil", shuffle=False).shuffles


@pytest.mark.parametrize(
    ("asked", "choice"),
    [("auto", (None, None)), (1, (1, None)), (7, (7, None)), ((0, 3), (None, (0, 3))), ([0, 3, 9], (None, (0, 3, 9)))],
)
def test_partitions_are_a_number_or_the_first_block_of_each(asked, choice):
    assert Settings(mem_limit="2GB", method="sil", partitions=asked).partition_choice() == choice


@pytest.mark.parametrize("asked", [0, -1, (3, 5), (0, 0), (0, 5, 3), (0, "x"), "", 1.5, (0, None), "0,3", (3,)])
def test_other_partitions_are_refused(asked):
    with pytest.raises(OptionError, match="partitions: expected"):
        Settings(mem_limit="2GB", method="sil", partitions=asked)


def test_one_value_is_for_every_partition_and_otherwise_each_has_its_own():
    assert per_partition("--lr", 1e-3, 3) == (1e-3,) * 3
    assert per_partition("--epochs", (5, 160), 2) == (5, 160)
    with pytest.raises(OptionError, match=r"epochs=\(5, 160\) gives 2 values, and the plan has 3 partition\(s\)"):
        per_partition("--epochs", (5, 160), 3)


def test_no_method_is_taken_silently():
    """It was sil, which is approximate, for whoever did not know that there are methods."""
    words = r"method is missing.*auto \(the fastest exact.*streamed \(exact.*checkpointed.*full.*sil \(approximate"
    with pytest.raises(OptionError, match=words):
        Settings(mem_limit="2GB")
    with pytest.raises(OptionError, match=words):
        Trainer([lambda: nn.Linear(2, 2)], mem_limit="2GB")


def test_what_an_editor_completes_are_the_settings():
    """Trainer took **options: Any, so that no editor and no type checker knew a name or a type of them."""
    assert set(Options.__annotations__) == {field.name for field in fields(Settings)} - {"optimizer", "loss"}
    assert write_options.TARGET.read_text() == write_options.options(), "run python tools/write_options.py"
    assert write_options.REFERENCE.read_text() == write_options.reference(), "run python tools/write_options.py"
    for name in ("method", "lr_schedule", "objective", "sil_inputs"):
        for value in _choices(Options.__annotations__[name]):
            Settings(mem_limit="2GB", **({"method": "sil"} | {name: value} | ({"subnets": 2} if value == "ist" else {})))


FIELD = '''    look_ahead: Annotated[PerPartition[float], Note(most=9, number="numbers above 0"), Also("--ahead")] = 5.0
    """How far, per partition."""
'''
EVERYWHERE = """
import runpy
from pathlib import Path
from torch import nn
from seqpart import BadInput, Trainer
from seqpart.cli.arguments import gathered, groups_of, kept_options, options_of
from seqpart.cli.job import Job

runpy.run_path("tools/write_options.py", run_name="__main__")

def typed(*words):
    return options_of(Job, gathered(["--mem-limit", "1GB", *words], Job), "test")

job = typed("--look-ahead", "1,2")
assert job.look_ahead == typed("--ahead=1,2").look_ahead == (1.0, 2.0) and typed().look_ahead == 5.0
Path("run.toml").write_text("look-ahead = [1, 2]")
assert typed("--config", "run.toml").look_ahead == (1.0, 2.0)
assert kept_options(job)["look_ahead"] == (1.0, 2.0)
assert "look_ahead" in groups_of(Job)["training"]
assert "    look_ahead: PerPartition[float]" in Path("seqpart/options.py").read_text()
settings = Trainer([lambda: nn.Linear(2, 2)], mem_limit="2GB", method="auto", look_ahead=[1, 2]).settings
assert (settings.look_ahead, settings.texts()["look_ahead"], settings.to_json()["look_ahead"]) == ((1, 2), "1,2", (1, 2))
for value in ("far", [1, 10]):
    try:
        Trainer([lambda: nn.Linear(2, 2)], mem_limit="2GB", method="auto", look_ahead=value)
    except BadInput as error:
        print(error)
typed("--help")
"""


@pytest.mark.slow
def test_an_option_is_one_field(tmp_path):
    """It was a field, an entry of a TypedDict, of a group of the help, and of the checks, each by hand."""
    root = Path(seqpart.__file__).parents[1]
    shutil.copytree(root / "seqpart", tmp_path / "seqpart", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(root / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    config = tmp_path / "seqpart" / "config.py"
    config.write_text(config.read_text().replace("    momentum: float", f"{FIELD}    momentum: float"))
    (tmp_path / "docs").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", EVERYWHERE], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "look_ahead: expected a number, or a list of them; found 'far'." in ran.stdout
    assert "look_ahead: expected numbers above 0, at most 9; found 10.0." in ran.stdout
    assert "--ahead FLOAT[,...], --look-ahead FLOAT[,...]" in ran.stdout
    assert "How far, per partition. (default: 5.0)" in ran.stdout
    row = "| `--look-ahead`, `--ahead` | `FLOAT[,...]` | 5.0 | How far, per partition. |"
    assert row in (tmp_path / "docs" / "options.md").read_text()


def _choices(kind):
    return [value for part in (kind, *get_args(kind)) if get_origin(part) is Literal for value in get_args(part)]


def test_settings_come_whole_or_field_by_field():
    model = [lambda: nn.Linear(2, 2)]
    assert Trainer(model, settings=Settings(mem_limit="2GB", method="auto", epochs=7, lr=1e-3)).settings.epochs == 7
    with pytest.raises(OptionError, match="leave epochs out, or settings"):
        Trainer(model, settings=Settings(mem_limit="2GB", method="auto"), epochs=3)


def test_what_is_free_is_looked_at_once():
    """--mem-limit auto sized the model by one figure and planned by another."""
    trainer = Trainer([lambda: nn.Linear(2, 2)], mem_limit="auto", method="auto")
    assert int(trainer.settings.mem_limit) > 1 << 20


def test_no_partitions_is_not_one_partition():
    """`--partitions 0` was read as the list of first blocks `0`, and trained one partition."""
    with pytest.raises(OptionError, match="found '0'"):
        Settings.of(mem_limit="2GB", method="sil", partitions=0).partition_choice()


def test_a_path_may_be_given_as_text():
    """`Trainer(..., output_dir="out")` failed with an AttributeError deep in the run."""
    assert Settings.of(mem_limit="2GB", method="sil", output_dir="out").output_dir == Path("out")


def test_a_micro_batch_above_the_batch_is_refused(tmp_path):
    """It was cut down to the batch without a word."""
    x, y = torch.randn(40, 4), torch.arange(40) % 2
    trainer = Trainer(
        [lambda: nn.Linear(4, 2)], mem_limit="2GB", method="sil", batch_size=16, micro_batch_size=17, output_dir=tmp_path
    )
    with pytest.raises(BadInput, match="micro_batch_size=17 is more than the batch of 16"):
        trainer.plan((x, y), (x, y))
