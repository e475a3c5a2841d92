"""`ema`: the moving average of the weights that torch's AveragedModel has, whatever way the network is trained."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from seqpart import Settings, Trainer
from seqpart.errors import Interrupted, OptionError
from seqpart.runtime import weight_store
from tests.choice import in_turn
from tests.command import run
from tests.exactly import How, numbers
from tests.resuming import Arm, Killed, ended, interrupt, kill
from tests.zoo.test_images import write_images

ROWS, BATCH, EPOCHS, DECAY = 22, 8, 3, 0.9

pytestmark = pytest.mark.usefixtures("known_machine")


class Tied(nn.Module):
    """Its last weight is its first, whose second layer is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.middle = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.middle.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.norm(self.first(x))))))


def chain():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def tied():
    torch.manual_seed(2)
    return Tied()


def plain(model, optimizer=torch.optim.AdamW, **options):
    """A plain loop with torch's own average of it."""
    train, test = numbers((6,))
    x, y = train.open()[0].float(), train.labels
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    step = optimizer(model.parameters(), lr=0.05, **options)
    for _ in range(EPOCHS):
        for start in range(0, ROWS, BATCH):
            F.cross_entropy(model(x[start : start + BATCH]), y[start : start + BATCH]).backward()
            step.step()
            average.update_parameters(model)
            step.zero_grad()
    return average.module.eval(), test


def trained(folder, model, optimizer=None, **options):
    trainer = Trainer(
        model, None, optimizer, mem_limit="2GB", batch_size=BATCH, epochs=EPOCHS, lr=0.05, shuffle=False, quiet=True, ema=DECAY,
        micro_batch_size=BATCH, output_dir=folder, **options,
    )  # fmt: skip
    return trainer.fit(*numbers((6,)))


WAYS = {
    "full": {"method": "full"},
    "streamed": {"method": "streamed", "partitions": 3},
    "checkpointed": {"method": "checkpointed", "partitions": 2},
    "auto": {"method": "auto"},
    "one partition of sil": {"method": "sil", "partitions": 1},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", [chain, tied])
@pytest.mark.few(1)
def test_the_average_is_that_of_torchs_averaged_model_parameter_by_parameter(build, way, tmp_path):
    if build is tied and way == "one partition of sil":
        pytest.skip("sil takes no shared parameters")
    average, test = plain(build(), fused=True, weight_decay=0.0)
    result = trained(tmp_path / "run", build(), **WAYS[way])
    found, weights = load_file(result.average), load_file(result.weights)
    expected = average.state_dict()
    assert set(found) | {"last.weight", "first.weight"} >= set(expected)
    for name, tensor in expected.items():  # buffers are the model's own, as AveragedModel copies them
        assert torch.equal(found[name], tensor), name
    assert any(not torch.equal(found[name], weights[name]) for name in found)
    x, y = test.open()[0].float(), test.labels
    assert result.average_loss == pytest.approx(F.cross_entropy(average(x), y).item(), rel=1e-5)
    assert result.average_accuracy == pytest.approx((average(x).argmax(1) == y).float().mean().item())
    said = json.loads((tmp_path / "run/result.json").read_text())
    assert (said["average_loss"], said["average"]) == (result.average_loss, str(result.average))


@pytest.mark.parametrize("optimizer", ["adafactor", "sgd", lambda parameters: torch.optim.RMSprop(parameters, lr=0.05)])
@pytest.mark.few(1)
def test_any_optimizer_may_have_it(optimizer, tmp_path):
    kind = {"adafactor": torch.optim.Adafactor, "sgd": torch.optim.SGD}.get(optimizer, torch.optim.RMSprop)
    average, _ = plain(chain(), kind, **({"fused": True} if optimizer == "sgd" else {}))
    rate = {"lr": 0.05} if isinstance(optimizer, str) else {}
    trainer = Trainer(
        chain(), None, optimizer, mem_limit="2GB", method="streamed", partitions=3, batch_size=BATCH, epochs=EPOCHS,
        shuffle=False, micro_batch_size=BATCH, quiet=True, ema=DECAY, output_dir=tmp_path, **rate,
    )  # fmt: skip
    found = load_file(trainer.fit(*numbers((6,))).average)
    for name, tensor in average.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_the_callers_metrics_judge_it_too(tmp_path):
    trainer = Trainer(
        chain(), mem_limit="2GB", method="full", batch_size=BATCH, epochs=EPOCHS, lr=0.05, quiet=True, ema=DECAY,
        output_dir=tmp_path / "run",
    )  # fmt: skip
    train, test = numbers((6,))
    result = trainer.fit(train, test, compute_metrics=lambda outputs, _: {"largest": outputs.max()})
    assert (
        result.average_metrics
        == trainer.evaluate(test, weights=result.average, compute_metrics=lambda outputs, _: {"largest": outputs.max()}).metrics
    )
    assert result.average_metrics["largest"] != result.metrics["largest"]
    assert json.loads((tmp_path / "run/result.json").read_text())["average_metrics"] == result.average_metrics


def test_its_figures_are_said_to_be_its_own_and_no_second_plan_is_told(tmp_path, caplog):
    with caplog.at_level("INFO", "seqpart"):
        result = trained(tmp_path / "run", chain(), method="full")
    said = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("plan for ") for line in said) == 1
    accuracy, loss = f"{100 * result.average_accuracy:.2f}", f"{result.average_loss:.4f}"
    assert f"their moving average on the 5 test rows: accuracy {accuracy} %, loss {loss}" in said


@pytest.mark.slow
def test_behind_a_training_that_kept_its_heap_the_limit_holds_where_a_worker_has_no_room(tmp_path):
    """A heap that was kept does not shrink, so an allocation in it cannot fail at the limit. The plan of the average's test ran
    blocks for real beside a worker, as if it had that one's memory too: 717 MB."""
    images = write_images(tmp_path / "images" / "train", 60, (48, 48)).parent
    write_images(images / "val", 20, (48, 48))
    ran = run(
        tmp_path, "--model", "torchvision:resnet18", "--data", f"imagefolder:{images}", "--image-size", 48, "--workers", 1,
        "--mem-limit", "710MB", "--method", "auto", "--epochs", 1, "--batch-size", 16, "--ema", 0.9, "--output-dir", "run",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.out.count("violations 0") == 2 and "their moving average on the 40 test rows" in ran.out
    # The last line is of the evaluation too: it took 374 MB where the proof of the training said 354.
    training, whole = (int(line.split(" samples")[0].rsplit(", ")[-1]) for line in ran.out.splitlines() if "proof:" in line)
    assert json.loads((tmp_path / "run/result.json").read_text())["proof"]["samples"] == whole > training


def test_without_test_rows_it_is_written_and_not_tested(tmp_path):
    trainer = Trainer(
        chain(), mem_limit="2GB", method="full", batch_size=BATCH, epochs=1, quiet=True, ema=DECAY, output_dir=tmp_path / "run"
    )
    result = trainer.fit(numbers((6,))[0])
    assert result.average.exists() and result.average_loss is None


def test_the_weights_are_those_of_a_run_without_it(tmp_path):
    with_it = trained(tmp_path / "a", chain(), method="streamed", partitions=3)
    without = Trainer(
        chain(), mem_limit="2GB", batch_size=BATCH, epochs=EPOCHS, lr=0.05, shuffle=False, quiet=True, micro_batch_size=BATCH,
        output_dir=tmp_path / "b", method="streamed", partitions=3,
    ).fit(*numbers((6,)))  # fmt: skip
    assert with_it.weights.read_bytes() == without.weights.read_bytes()
    assert without.average is None and not (tmp_path / "b/average.safetensors").exists()


@pytest.mark.parametrize(
    ("how", "end"),
    in_turn([How(), How(slots=2, keeps=0), How(stays=0.5), How(weights=1), How(method="full")], [interrupt, kill]),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.few(1)
def test_a_run_that_is_stopped_anywhere_leaves_the_average_of_one_that_was_not(how, end, monkeypatch, tmp_path):
    # Plans are forced here, and a test of the average has one of its own: there are no test rows.
    options = {"optimizer": "adamw", "epochs": EPOCHS, "ema": DECAY, "partitions": (0, 2, 4)}
    arm = Arm(monkeypatch, tmp_path, how, chain, (numbers((6,))[0], None), **options)
    whole, steps = arm.whole()
    found, stops = arm.stopped(iter([(len(steps) // 3, end), (len(steps) // 4, end), (len(steps) // 6, end)]), save_every="1")
    assert stops == 3 and found == whole
    assert (tmp_path / "stopped/average.safetensors").read_bytes() == (tmp_path / "whole/average.safetensors").read_bytes()


@pytest.mark.parametrize("end", [interrupt, kill])
@pytest.mark.few(1)
def test_a_run_that_ends_between_its_two_files_of_weights_goes_on_with_both(end, monkeypatch, tmp_path):
    options = {"optimizer": "adamw", "epochs": EPOCHS, "ema": DECAY, "partitions": (0, 2, 4), "save_every": "1"}
    arm = Arm(monkeypatch, tmp_path, How(), chain, (numbers((6,))[0], None), **options)
    whole, _ = arm.whole()
    export = weight_store.export_weights

    def ends(*arguments, averages=False):
        written = export(*arguments, averages=averages)
        if averages:
            end()
        return written

    with monkeypatch.context() as patched:
        patched.setattr(weight_store, "export_weights", ends)
        with pytest.raises((Interrupted, Killed)):
            arm.fit()
    assert ended(arm.fit(resume=arm.root)) == whole
    assert (arm.root / "average.safetensors").read_bytes() == (tmp_path / "whole/average.safetensors").read_bytes()


def test_partitions_of_sil_have_each_their_own_average_of_their_own_updates(tmp_path):
    one = trained(tmp_path / "one", chain(), method="sil", partitions=(0, 3), seed=3)
    again = trained(tmp_path / "again", chain(), method="sil", partitions=(0, 3), seed=3)
    assert one.average.read_bytes() == again.average.read_bytes() != one.weights.read_bytes()
    assert set(load_file(one.average)) == set(load_file(one.weights))


@pytest.mark.own_process  # what other tests have left differs between two plans
def test_the_plan_counts_it_like_a_moment(tmp_path):
    """Wide enough that the state is more than a trial of the blocks ever took: one of 16 MB passed a state of 0.7 MB once."""

    def planned(**options):
        model = [lambda: nn.Linear(6, 1 << 18, bias=False), lambda: nn.Linear(1 << 18, 4, bias=False)]
        return Trainer(model, mem_limit="2GB", method="full", quiet=True, **options).plan(*numbers((6,)))

    with_it, without = planned(ema=DECAY), planned()
    weights = 4 * (6 + 4 << 18)
    assert with_it.full_state - without.full_state == weights
    grown = (with_it.peak - with_it.runtime) - (without.peak - without.runtime)
    assert 0 <= grown - weights <= 8192
    assert with_it.disk_bytes - without.disk_bytes >= weights


def test_weights_of_a_file_are_evaluated_and_the_model_keeps_its_own(tmp_path):
    model = chain()
    trainer = Trainer(
        model, mem_limit="2GB", method="full", batch_size=BATCH, epochs=EPOCHS, lr=0.05, quiet=True, ema=DECAY,
        output_dir=tmp_path / "run",
    )  # fmt: skip
    data = numbers((6,))
    result = trainer.fit(*data)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert trainer.evaluate(data[1], weights=result.average).loss == result.average_loss
    assert trainer.evaluate(data[1]).loss == pytest.approx(result.test_loss)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ema": 1.0}, r"ema: expected a decay between 0 and 1, such as 0\.999; found 1\.0"),
        ({"ema": 0.9, "method": "ist", "subnets": 2}, r"ema does not go with method=\"ist\", whose subnets"),
        ({"ema": 0.9, "method": "sil", "recovery_epochs": 1}, "ema does not go with recovery_epochs"),
    ],
)
def test_what_it_does_not_go_with_is_refused(options, words):
    with pytest.raises(OptionError, match=words):
        Settings(**{"mem_limit": "2GB", "method": "auto", **options})
