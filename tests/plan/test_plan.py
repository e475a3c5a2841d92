"""A plan as a value: saved, read again, also as 0.2.0 wrote it, and shown."""

import json
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.device.device import Device
from seqpart.errors import DoesNotFit, OptionError
from seqpart.plan.plan import PartitionPlan, Plan, as_text_rows

PART = PartitionPlan(
    first=0, last=2, micro_batch=8, weights=1, state=2, slot=3, gradients=4, activations=5, buffers=6, boundary_row=7, peak=8,
    tier="disk",
)  # fmt: skip
PLAN = Plan(
    method="streamed", device="a test", limit=9, margin=1, runtime=2, growth=3, full_state=4, parameters=5,
    partitions=(
        PART, replace(PART, first=2, last=3, stays=True), replace(PART, first=3, last=5, graph="kept", boundary_tier="disk"),
    ),
    host_limit=0, disk_bytes=6, seconds=7.0, reasons=("why",), fingerprint="x", slots=2, live_bytes=8,
)  # fmt: skip


def test_a_plan_is_read_as_it_was_written():
    assert Plan.from_json(PLAN.to_json(), "plan.json") == PLAN
    assert (PLAN.stays, PLAN.keeps) == (frozenset({1}), frozenset({2}))


def test_a_plan_of_format_2_is_read_with_the_names_of_today():
    """Checkpoints of 0.2.0 hold one, and a run may be resumed after an update."""
    body = json.loads(PLAN.to_json())
    for part in body["partitions"]:
        del part["stays"], part["weights_stay"], part["graph"], part["boundary_tier"]
    body |= {"format": 2, "relay": "disk", "given": body.pop("live_bytes"), "keeps_graph_from": 1}
    found = Plan.from_json(json.dumps(body), "plan.json")
    parts = tuple(
        replace(part, stays=False, graph="kept" if p >= 1 else "again", boundary_tier="disk")
        for p, part in enumerate(PLAN.partitions)
    )
    assert found == replace(PLAN, partitions=parts)
    assert not Plan.from_json(json.dumps(body | {"keeps_graph_from": None}), "plan.json").keeps


@pytest.mark.parametrize("tier", ["device", "disk"])
def test_a_plan_of_format_4_has_one_place_for_all_boundaries(tier):
    body = json.loads(PLAN.to_json())
    for part in body["partitions"]:
        del part["boundary_tier"]
    found = Plan.from_json(json.dumps(body | {"format": 4, "boundary_tier": tier}), "plan.json")
    assert found.tiers == (() if tier == "device" else ("disk",) * 3)
    assert [part.graph for part in found.partitions] == ["again", "again", "kept"]


def test_a_place_that_no_boundary_has_is_no_plan():
    body = json.loads(PLAN.to_json())
    body["partitions"][0]["boundary_tier"] = "tape"
    with pytest.raises(OptionError, match=r"partitions\[0\]\.boundary_tier: expected one of device, host, disk"):
        Plan.from_json(json.dumps(body), "plan.json")


@pytest.mark.parametrize(
    "change",
    [{"format": 6}, {"format": 1}, {"slots": "2"}, {"slots": -2}, {"heap": -5}, {"partitions": []}, {"boundary_tier": "disk"}],
)
def test_another_file_is_no_plan(change):
    with pytest.raises(OptionError, match=r"plan.json is not a plan that plan_out wrote"):
        Plan.from_json(json.dumps(json.loads(PLAN.to_json()) | change), "plan.json")


def test_the_table_says_what_stays_and_what_is_kept_where_there_is_a_choice():
    said = [(row["device"], row["graph"]) for row in as_text_rows(PLAN)]
    assert said == [("in turn", "again"), ("stays", "again"), ("in turn", "kept")]
    weights = (replace(PART, weights_stay=True), *PLAN.partitions[1:])
    assert [row["device"] for row in as_text_rows(replace(PLAN, partitions=weights))] == ["weights stay", "stays", "in turn"]
    assert [row["boundary"] for row in as_text_rows(PLAN)] == ["device", "device", "disk"]
    near = tuple(replace(part, boundary_tier="device") for part in PLAN.partitions)
    assert "boundary" not in as_text_rows(replace(PLAN, partitions=near))[0]
    assert as_text_rows(replace(PLAN, partitions=(replace(PART, graph="kept"), PLAN.partitions[1])))[1]["graph"] == "kept"
    assert "device" not in as_text_rows(replace(PLAN, partitions=(PART,)))[0]


def test_the_same_request_gives_the_same_plan_whatever_was_asked_in_between(known_machine, tmp_path):
    """A resumed run, an evaluation and a failed allocation once wrote into what every later plan was made from."""
    rows = torch.randn(24, 8), torch.arange(24) % 4
    blocks = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)]
    trainer = Trainer(blocks, mem_limit="2GB", method="auto", partitions=2, batch_size=8, output_dir=tmp_path, quiet=True)
    with closing(trainer.prepare(*trainer.rows(rows, rows))) as planner:
        first = planner.planned()
        other = planner.prepare(replace(first.request, micro_batch=2, may_keep_heap=False))
        with pytest.raises(DoesNotFit):
            planner.prepare(replace(first.request, limit=1 << 20, label_bytes=0))
        assert planner.prepare(first.request).plan == first.plan
    assert (other.plan.micro_batch, other.plan.heap, other.request.micro_batch) == (2, 0, 2)


def test_a_plan_that_ends_elsewhere_than_the_model_is_refused(known_machine):
    rows = torch.randn(24, 8), torch.arange(24) % 4
    trainer = Trainer([nn.Linear(8, 8), nn.Linear(8, 4)], mem_limit="2GB", method="auto", partitions=2, quiet=True)
    plan = trainer.plan(rows, rows)
    longer = replace(plan, partitions=(*plan.partitions[:-1], replace(plan.partitions[-1], last=80)))
    with pytest.raises(OptionError, match="that plan is for another model or method"):
        trainer.plan(rows, rows, reuse=longer)


def test_disk_for_rows_at_a_boundary_is_planned_only_where_a_partition_leaves_them_for_the_next(
    known_machine, monkeypatch, tmp_path
):
    """Exact training was refused for 80 GB of training rows at a wide boundary, which it never writes, and a session for those
    of as many test rows as are read at once."""
    rows, wide = (torch.randn(4096, 8), torch.arange(4096) % 4), 4000
    options = {"mem_limit": "2GB", "partitions": (0, 2), "batch_size": 8, "output_dir": tmp_path / "run", "quiet": True}
    blocks = [nn.Linear(8, wide), nn.ReLU(), nn.Linear(wide, 4)]
    at_boundary = 2 * 4096 * wide * 4

    def disk(method, test=None):
        return Trainer(blocks, method=method, **options).plan(rows, test).disk_bytes

    assert disk("streamed") < at_boundary < disk("sil")
    assert at_boundary < disk("streamed", rows) - disk("streamed") < 1.1 * at_boundary
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=at_boundary // 4))
    x, y = rows
    with Trainer(blocks, method="streamed", **options).session((x[:8], y[:8])) as session:
        assert session.updates == 0


def test_a_partition_whose_gradients_never_wait_has_no_room_for_them_in_its_slot(monkeypatch):
    """With gradients clipped the peak of a network whose first partition is the largest was predicted 27 % too high."""
    monkeypatch.setattr(Device, "keeps_heap", False)
    rows = torch.randn(16, 3000), torch.arange(16) % 4
    layers = [nn.Linear(3000, 2000), nn.Linear(2000, 8), nn.Linear(8, 4)]
    asked = {"mem_limit": "2GB", "method": "streamed", "partitions": 3, "batch_size": 8, "quiet": True}
    peaks = [Trainer(nn.Sequential(*layers), **asked, **more).plan(rows).peak for more in ({}, {"clip_grad_norm": 1.0})]
    assert abs(peaks[1] - peaks[0]) < 3000 * 2000 * 4 // 4
