"""`--log tensorboard,wandb`: what trackers are told, also of a run that goes on; their memory is planned for."""

import json
import signal
import sys

import pytest
import torch
from torch import nn

from seqpart.errors import OptionError
from seqpart.runtime import tracking
from seqpart.settings import Settings
from seqpart.verify import verify
from tests.command import ENVIRONMENT, SMALL, call, end, refused, run, start
from tests.given import classified, trained

MODEL = [lambda: nn.Linear(8, 16), lambda: nn.Linear(16, 3)]


class MetricSinks:
    """In the place of a library: what it was told."""

    def __init__(self):
        self.told, self.opened, self.closed = [], [], 0

    def open(self, name, folder, run, settings, behind):
        self.opened.append((name, run, behind))
        return self

    def log(self, step, values):
        assert all(isinstance(value, float) for value in values.values())
        self.told.append((step, dict(values)))

    def close(self):
        self.closed += 1


@pytest.fixture
def heard(monkeypatch):
    heard = MetricSinks()
    monkeypatch.setattr(tracking, "opened", heard.open)
    monkeypatch.setattr("seqpart.runtime.setup.load", lambda names: None)
    return heard


def test_every_pass_is_told_with_loss_accuracy_rate_memory_and_speed(heard, tmp_path):
    found = trained(tmp_path, MODEL, (8,), method="streamed", epochs=2, lr=1e-3, lr_schedule="linear", log="wandb")
    (first, last), tests = heard.told[:2], heard.told[2:]
    assert (first[0], last[0]) == (3, 6), "three updates in an epoch"
    told = {"train/loss", "train/accuracy", "train/rows_per_second", "learning_rate", "memory_GB"}
    assert set(first[1]) == told
    assert [first[1]["train/loss"], last[1]["train/loss"]] == list(found.train_losses)
    assert last[1]["learning_rate"] == pytest.approx(1e-3 * (1 - 5 / 6))
    assert 0 < max(values["memory_GB"] for _, values in heard.told) <= found.proof.peak / 1e9
    assert tests[-1][0] == 6 and tests[-1][1]["test/loss"] == found.test_loss
    assert heard.closed == 1


def test_within_a_pass_the_loss_is_that_since_it_was_last_told(heard, tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "_SECONDS", 0.0)
    found = trained(tmp_path, MODEL, (8,), method="full", epochs=1, shuffle=False, log="tensorboard", batch_size=16)
    losses = [values["train/loss"] for _, values in heard.told if "train/loss" in values]
    (mean,) = [values["train/pass_loss"] for _, values in heard.told if "train/pass_loss" in values]
    steps = [step for step, values in heard.told if "train/loss" in values]
    assert steps == [1, 2]  # behind the last the pass is over
    assert mean == found.train_losses[0]
    x, y = classified(48, (8,))
    again = trained(tmp_path / "again", MODEL, data=((x[:16], y[:16])), method="full", epochs=1, shuffle=False, batch_size=16)
    assert losses[0] == pytest.approx(again.train_losses[0], rel=1e-6)


def test_partitions_that_are_trained_one_after_the_other_have_names_of_their_own(heard, tmp_path):
    trained(tmp_path, MODEL, (8,), method="sil", partitions=2, epochs=1, log="wandb")
    assert [(step, sorted(values)[-1]) for step, values in heard.told if "learning_rate" in values] == [
        (3, "partition_0/train/rows_per_second"), (6, "partition_1/train/rows_per_second"),
    ]  # fmt: skip
    assert any("test/loss" in values for _, values in heard.told)


def test_a_tracker_that_fails_ends_and_training_does_not(heard, tmp_path, caplog):
    heard.log = lambda step, values: 1 / 0
    found = trained(tmp_path, MODEL, (8,), method="full", log="wandb")
    assert found.proof.violations == 0
    assert 'log="wandb" is no longer used: ZeroDivisionError' in caplog.text


@pytest.mark.parametrize(
    ("name", "modules", "said"),
    [
        ("tensorboard", ["torch.utils.tensorboard", "tensorboardX"], "pip install tensorboard, or leave it out"),
        ("wandb", ["wandb"], "pip install wandb, or leave it out"),
    ],
)
def test_a_library_that_is_not_there_is_refused_with_the_command_that_installs_it(name, modules, said, monkeypatch, capsys):
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    assert refused(call(capsys, *SMALL, "--log", name), 2, f"--log {name}:", "installed", said)


def test_what_cannot_be_told_is_refused(capsys):
    assert refused(call(capsys, *SMALL, "--log", "mlflow"), 2, "--log: expected tensorboard or wandb; found 'mlflow'")
    assert Settings.of(mem_limit="2GB", method="full", log=["wandb", "tensorboard"]).trackers == ("wandb", "tensorboard")
    with pytest.raises(OptionError, match="verify runs training several times"):
        verify(MODEL, classified(8, (8,)), mem_limit="2GB", log="wandb")


# --- the libraries themselves ---------------------------------------------------------------------------------------------


def scalars(folder):
    """{tag: [(step, value)]} of what TensorBoard shows."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_shows_the_run(tmp_path, processes):
    pytest.importorskip("tensorboard")
    options = ["--method", "full", "--epochs", "3", "--output-dir", "out", "--log", "tensorboard"]
    assert processes.run(tmp_path, [*SMALL, *options])[0] == 0, (tmp_path / "said").read_text()
    (folder,) = (tmp_path / "out" / "tensorboard").iterdir()
    shown, result = scalars(folder), json.loads((tmp_path / "out" / "result.json").read_text())
    assert [value for _, value in shown["train/loss"]] == pytest.approx(result["train_losses"], rel=1e-6)
    assert [step for step, _ in shown["train/loss"]] == [23, 46, 69]
    assert {"train/accuracy", "test/loss", "test/accuracy", "learning_rate", "memory_GB", "train/rows_per_second"} <= set(shown)
    assert result["proof"]["violations"] == 0
    assert result["proof"]["predicted"] == pytest.approx(result["proof"]["peak"], rel=0.05)


@pytest.mark.slow
def test_a_run_that_is_killed_and_goes_on_shows_each_step_once(tmp_path):
    pytest.importorskip("tensorboard")
    arguments = [*SMALL, "--method", "full", "--epochs", "400", "--save-every", "200", "--log", "tensorboard", "-o", "out"]
    assert end(start(tmp_path, *arguments, until="epoch 30 "), signal.SIGKILL).code == -signal.SIGKILL
    ran = run(tmp_path, "--resume", "out", "--epochs", "60")
    assert ran.code == 0, ran.err
    (folder,) = (tmp_path / "out" / "tensorboard").iterdir()
    shown, result = scalars(folder), json.loads((tmp_path / "out" / "result.json").read_text())
    assert [step for step, _ in shown["train/loss"]] == [23 * epoch for epoch in range(1, 61)]
    assert [value for _, value in shown["train/loss"]] == pytest.approx(result["train_losses"], rel=1e-6)


def test_weights_and_biases_without_a_network(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setitem(ENVIRONMENT, "WANDB_MODE", "offline")
    arguments = [*SMALL, "--method", "full", "--epochs", "2", "--output-dir", "out", "--log", "wandb"]
    ran = run(tmp_path, *arguments)
    assert ran.code == 0, ran.err
    assert ran.err == "" and "wandb" not in ran.out.replace("--log wandb", "")
    assert list((tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb"))
    proof = json.loads((tmp_path / "out" / "result.json").read_text())["proof"]
    assert proof["violations"] == 0
    assert proof["predicted"] == pytest.approx(proof["peak"], rel=0.05)


def test_weights_and_biases_without_a_login_is_refused_before_anything_is_planned(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delitem(ENVIRONMENT, name, raising=False)
    monkeypatch.setitem(ENVIRONMENT, "HOME", str(tmp_path))
    monkeypatch.setitem(ENVIRONMENT, "NETRC", str(tmp_path / "netrc"))
    ran = run(tmp_path, *SMALL, "--log", "wandb")
    assert refused(ran, 2, "nobody is logged in. Run wandb login, or set WANDB_MODE=offline")


def test_bits_are_those_of_a_run_that_nobody_is_told_of(heard, tmp_path):
    told = trained(tmp_path / "told", MODEL, (8,), method="streamed", log="wandb").state_dict()
    plain = trained(tmp_path / "plain", MODEL, (8,), method="streamed").state_dict()
    assert all(torch.equal(told[name], plain[name]) for name in plain)
