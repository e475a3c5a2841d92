"""Past bugs of runs that bring one partition after the other, one test and one story each."""

import json

import pytest
import torch
from torch import nn

from seqpart import Trainer
from seqpart.arguments import gathered
from seqpart.errors import CorruptFile
from seqpart.job import Job
from seqpart.rundir import RunDirectory, write_text
from seqpart.slots import Slot, at_once
from tests.test_bugs import at_home, drop, load


def rows(count=64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 8, generator=generator), torch.arange(count) % 3


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
        ).fit(rows(), rows(9))  # fmt: skip
        found.append(model.state_dict())
    full, streamed = found
    assert full["2.1.num_batches_tracked"] == 8
    for name, tensor in full.items():
        assert torch.equal(streamed[name], tensor), name


def test_a_transfer_that_failed_is_not_told_again_in_the_next_visit(tmp_path):
    """A visit waits for the partition's transfer before it, and that one's error was raised in every visit from then on."""
    resident, store, slot = at_home(tmp_path, nn.Linear(3, 3), (3,))
    path = store.path(resident.blocks[0].home)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CorruptFile):
        load(resident, slot)
    resident.release()
    path.write_bytes(whole)
    load(resident, Slot(slot.buffer, at_once))
    drop(resident)
    store.close()


def test_a_run_that_replaces_another_s_results_leaves_its_options_alone_until_it_is_done(tmp_path):
    """job.json was written over at once: had the new run failed, the old results stood beside the new run's options."""
    for epochs, done in ((1, True), (7, False)):
        directory = RunDirectory(tmp_path, overwrite=True)
        write_text(directory.result("job.json"), json.dumps({"epochs": epochs}))
        assert gathered(["--resume", str(tmp_path)], Job)[0] == f"--epochs={epochs}"
        if done:
            (tmp_path / "model.safetensors").write_text("trained")
            directory.publish()
        directory.close("done" if done else "failed")
    assert json.loads((tmp_path / "job.json").read_text()) == {"epochs": 1}
