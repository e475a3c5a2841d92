"""Rows that a plan keeps in memory: counted, chosen where there is room, replayed, and the bits of rows on the disk."""

import json
import re

import numpy as np
import pytest
import torch

from seqpart import Trainer
from seqpart.data.boundary_cache import Boundaries
from seqpart.device.device import Device
from seqpart.store.row_file import RowLayout
from seqpart.zoo.models import mlp
from tests import machine
from tests.choice import only_quick
from tests.command import run

ROWS, FEATURES = 30_000, 256
NETWORK = ("--data", "npz:rows.npz", "--model", "mlp", "--width", "128", "--depth", "2", "--batch-size", "512")


def trained(folder, *arguments):
    """(plan, proof, weights) of a run of the command."""
    done = run(folder, *NETWORK, *arguments, "--output-dir", "out", "--overwrite")
    assert done.code == 0, done.out + done.err
    plan, result = (json.loads((folder / "out" / name).read_text()) for name in ("plan.json", "result.json"))
    return plan, result["proof"], (folder / "out" / "model.safetensors").read_bytes(), re.sub(r"\s+", " ", done.out)


@pytest.fixture
def folder(tmp_path):
    numbers = np.random.default_rng(0)
    x, y = numbers.standard_normal((ROWS, FEATURES), np.float32), np.arange(ROWS) % 10
    np.savez(tmp_path / "rows.npz", x_train=x, y_train=y, x_test=x[:512], y_test=y[:512])
    return tmp_path


@pytest.mark.parametrize("method", only_quick(["sil", "full"], ["full"]))
@pytest.mark.few(1)
def test_where_there_is_room_rows_lie_in_memory_as_planned_and_have_the_bits_of_rows_on_the_disk(method, folder):
    how = ("--mem-limit", "1GB", "--method", method, *(("--partitions", "2") if method == "sil" else ()))
    plan, proof, weights, said = trained(folder, *how)
    assert all(part["rows_in_memory"] for part in plan["partitions"])
    assert "lie in memory: there is room for their" in said
    assert proof["peak"] <= 1.01 * proof["predicted"] and proof["predicted"] <= 1.05 * proof["peak"], proof
    for part in plan["partitions"]:
        part["rows_in_memory"] = False
    (folder / "plan.json").write_text(json.dumps(plan))
    again, other, same, _ = trained(folder, "--mem-limit", "1GB", "--method", method, "--plan", "plan.json")
    assert not any(part["rows_in_memory"] for part in again["partitions"])
    assert other["peak"] < proof["peak"] - ROWS * FEATURES * 4 // 2
    assert same == weights


def rows_in_memory(limit, **options):
    data = torch.zeros(20_000, 1024), torch.arange(20_000) % 10
    options = {"method": "sil", "partitions": 2, "batch_size": 256, **options}
    with pytest.MonkeyPatch.context() as patch:
        machine.known(patch)  # 500 MiB are taken by libraries
        plan = Trainer(mlp(1024, 10, width=512, depth=2), mem_limit=limit, **options).plan(data, data)
    assert plan.peak <= plan.limit - plan.margin
    return plan.rows_in_memory


def test_rows_lie_in_memory_where_the_limit_has_room_for_them():
    assert rows_in_memory("2GB") == {0, 1}
    assert rows_in_memory("720MB") == {1}, "164 MB of the data's rows have no room there, 82 of the second partition's have"
    assert rows_in_memory("600MB") == frozenset()


def test_rows_that_ram_limit_grants_room_for_are_not_under_the_limit():
    assert rows_in_memory("2GB", ram_limit="500MB") == frozenset()


def test_rows_of_the_data_wait_on_the_disk_for_a_recovery():
    assert rows_in_memory("2GB", recovery_epochs=1) == {1}


def test_rows_leave_memory_when_another_plan_has_no_room_for_them(tmp_path):
    layout, data = RowLayout((8,), torch.float32), torch.randn(40, 8)
    boundaries = Boundaries(tmp_path, Device(), None, in_memory={0, 1})
    for p in (0, 1):
        rows = boundaries.create("train", p, layout, len(data))
        rows.append(data)
        rows.finish()
    boundaries.keep_in_memory({1})
    assert [boundaries.rows("train", p).in_memory is not None for p in (0, 1)] == [False, True]
    assert boundaries.create("train", 0, layout, 1).in_memory is None
    boundaries.close()
