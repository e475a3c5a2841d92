"""BatchNorm: its statistics count each row once, and it takes no single row."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from seqpart import DoesNotFit, Trainer
from seqpart.errors import ModelError
from seqpart.verify.verification import verify
from tests.choice import only_quick
from tests.given import classified, trained


def test_running_statistics_are_not_applied_twice_when_an_update_is_done_again(tmp_path):
    """A failed allocation in the second half of an update replayed the first half, and BatchNorm counted it twice."""

    class Fails(torch.nn.Module):
        def __init__(self, at):
            super().__init__()
            self.at, self.calls, self.linear = at, 0, torch.nn.Linear(6, 6)

        def forward(self, x):
            if type(x) is torch.Tensor and self.training:
                self.calls += 1
                if self.calls and self.calls in (self.at, 2 * self.at):  # without the heap that was kept it fails once more
                    raise MemoryError
            return self.linear(x)

    def run(name, at, micro_batch):
        x, y = torch.randn(32, 6, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 2
        blocks = [lambda: torch.nn.BatchNorm1d(6), lambda: Fails(at), lambda: torch.nn.Linear(6, 2)]
        trainer = Trainer(
            blocks, mem_limit="2GB", method="full", batch_size=16, micro_batch_size=micro_batch, epochs=1, shuffle=False,
            output_dir=tmp_path / name, quiet=True,
        )  # fmt: skip
        return load_file(trainer.fit((x, y), (x[:4], y[:4])).weights)

    failed, plain = run("failed", 2, 8), run("plain", 0, 4)
    # Both do four passes of 4 rows for every update; the failed one had begun the first with 8.
    assert failed["0.num_batches_tracked"] == plain["0.num_batches_tracked"]
    for name, tensor in plain.items():
        assert torch.equal(failed[name], tensor), name


def test_batch_norm_is_planned_although_it_refuses_a_single_row(tmp_path):
    """The planner measured every model at micro-batch 1 to see what learns, which BatchNorm1d refuses."""
    blocks = [lambda: torch.nn.Linear(6, 8), lambda: torch.nn.BatchNorm1d(8), lambda: torch.nn.Linear(8, 2)]
    x, y = torch.randn(40, 6), torch.arange(40) % 2
    result = Trainer(
        blocks, mem_limit="2GB", method="sil", partitions=2, epochs=1, batch_size=20, output_dir=tmp_path / "run", quiet=True
    ).fit((x, y), (x[:4], y[:4]))
    assert len(result.plan.partitions) == 2


@pytest.mark.parametrize("method", only_quick(["auto", "streamed", "full", "sil"], ["auto"]))
def test_a_limit_that_is_too_small_for_a_model_that_takes_no_single_row_is_refused_with_the_one_that_is_not(
    method, known_machine, tmp_path
):
    """The exact methods tried one row last, and BatchNorm's refusal of it came out as bad input (exit code 2)."""
    model = [lambda: nn.Linear(12, 12), lambda: nn.BatchNorm1d(12), lambda: nn.Linear(12, 4)]
    rows = torch.randn(64, 12), torch.arange(64) % 4
    options = {"method": method, "batch_size": 32, "output_dir": tmp_path}
    with pytest.raises(DoesNotFit, match="smallest limit that fits") as refused:
        Trainer(model, mem_limit="60MB", **options).plan(rows, rows)
    Trainer(model, mem_limit=refused.value.smallest + (4 << 20), **options).plan(rows, rows)


def normed(width=8):
    return [lambda: nn.Linear(6, width), lambda: nn.BatchNorm1d(width), lambda: nn.Linear(width, 2)]


def normed_first(width=8):
    return [lambda: nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width)), lambda: nn.Linear(width, 2)]


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(41, {"batch_size": 20}), (25, {"batch_size": 20, "micro_batch_size": 4}), (24, {"batch_size": 5, "micro_batch_size": 2})],
)
@pytest.mark.parametrize(("model", "method"), [(normed, "streamed"), (normed, "sil"), (normed_first, "streamed")])
def test_a_division_that_leaves_a_single_row_is_refused_before_anything_is_trained(count, sizes, model, method, tmp_path):
    """The last micro-batch of an update or of an epoch had one row: a traceback at the end of the first epoch."""
    rows = torch.randn(count, 6), torch.arange(count) % 2
    with pytest.raises(ModelError, match=r"leave a single row.*Give another batch_size or micro_batch_size"):
        Trainer(model(), mem_limit="2GB", method=method, output_dir=tmp_path / "run", **sizes).fit(rows, rows)
    assert not (tmp_path / "run").exists()


def test_a_limit_that_is_too_small_is_refused_where_the_first_block_takes_no_single_row(tmp_path):
    """What does not take the data's rows is an error of the data, unless it is the planner that tried too few."""
    rows = torch.randn(64, 6), torch.arange(64) % 2
    for method in ("streamed", "sil"):
        with pytest.raises(DoesNotFit, match="smallest limit that fits"):
            Trainer(normed_first(200_000), mem_limit="60MB", method=method, batch_size=32, output_dir=tmp_path).plan(rows, rows)


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (9, {"batch_size": [4, 3], "partitions": (0, 1)}),
        (72, {"batch_size": 8, "recovery_batch_size": 9, "recovery_epochs": 1, "partitions": 2}),
    ],
)
@pytest.mark.few(1)
def test_batches_that_no_block_with_statistics_divides_are_no_reason_to_refuse(count, options, tmp_path):
    rows = torch.randn(count, 6), torch.arange(count) % 2
    run = Trainer(normed(), mem_limit="2GB", method="sil", epochs=1, output_dir=tmp_path / "run", quiet=True, **options)
    assert run.fit(rows, rows).proof.violations == 0


def test_the_planner_passes_over_micro_batches_that_leave_a_single_row(known_machine, tmp_path):
    """45 rows in batches of 20 end with 5: by 4 at a time that would be 4 and 1."""
    rows = torch.randn(45, 6), torch.arange(45) % 2
    options = {"method": "streamed", "batch_size": 20, "partitions": (0, 2), "output_dir": tmp_path}
    with pytest.raises(DoesNotFit) as refused:
        Trainer(normed(200_000), mem_limit="60MB", **options).plan(rows, rows)
    found = set()
    for more in (0, 40, 120):
        plan = Trainer(normed(200_000), mem_limit=refused.value.smallest + (more << 20), **options).plan(rows, rows)
        found.add(plan.partitions[0].micro_batch)
    assert len(found) > 1 and not found & {4, 2, 1}, found


def test_a_smaller_micro_batch_that_the_model_does_not_take_is_said_by_verify_and_no_error(tmp_path, monkeypatch):
    """It tried half of the micro-batch, which left a single row, and ended with exit code 2 after all bits had agreed."""
    monkeypatch.chdir(tmp_path)
    rows = torch.randn(24, 6), torch.arange(24) % 2
    found = verify(normed(), rows, mem_limit="2GB", partitions=2, batch_size=6, micro_batch_size=2, epochs=1, steps=2)
    assert "micro-batches of 1 are not compared, since the model does not take them" in found.divided


def test_two_batch_norms_in_one_partition_train(tmp_path):
    """Buffers were views of one slot, so the second's statistics counted as a change of what backward needs of the first."""
    plain = nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    model = copy.deepcopy(plain)
    trained(tmp_path, model, (2, 4, 4), method="full", optimizer="sgd", lr=0.1, shuffle=False)
    x, y = classified(48, (2, 4, 4))
    step = torch.optim.SGD(plain.parameters(), lr=0.1, fused=True)
    for rows, labels in zip(x.split(16), y.split(16), strict=True):
        nn.functional.cross_entropy(plain(rows), labels).backward()
        step.step()
        step.zero_grad()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_running_statistics_of_an_update_that_waits_for_its_norm_are_kept(tmp_path):
    """The visit that ran backward is not the one that updates, and dropped its BatchNorm as if nothing had changed."""
    found = []
    for method, partitions in (("full", 1), ("streamed", 3)):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(3)), nn.Linear(8, 3)
        )
        Trainer(
            model, mem_limit="2GB", method=method, partitions=partitions, clip_grad_norm=0.1, epochs=1, batch_size=16,
            micro_batch_size=8, quiet=True, output_dir=tmp_path / method,
        ).fit(classified(64, (8,)), classified(9, (8,)))  # fmt: skip
        found.append(model.state_dict())
    full, streamed = found
    assert full["2.1.num_batches_tracked"] == 8
    for name, tensor in full.items():
        assert torch.equal(streamed[name], tensor), name
