"""benchmarks/peers: every arm trains the same network, sizes are found honestly, and what cannot run says so."""

import json
import mmap
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import cell, compare, networks, results
from benchmarks.peers.arms import ARMS, Environments
from benchmarks.peers.cell import NoCgroup, parse
from seqpart.device.device import Device
from seqpart.model.blocks import as_chain
from tests.command import ENVIRONMENT

HOUSE = Path(__file__).parents[2]


def module(name, *words):
    return subprocess.run(
        [sys.executable, "-m", name, *map(str, words)], cwd=HOUSE, env=ENVIRONMENT, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("network", networks.NAMES)
def test_all_arms_begin_with_the_weights_that_seqpart_would_make(network):
    made = networks.factories(network, 32, 2)
    for number, (block, theirs) in enumerate(zip(as_chain(made), networks.build_all(made, 7), strict=True)):
        ours = block.build(Device(), 7)
        for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one, other), (number, name)


@pytest.mark.slow
def test_plain_programs_the_mapped_rival_and_seqpart_have_the_same_losses(tmp_path):
    rows = tmp_path / "rows.pt"
    assert module("benchmarks.peers.data", "S", rows).returncode == 0
    common = ["--data", rows, "--width", 48, "--depth", 2, "--batch", 64, "--updates", 4, "--folder", tmp_path]
    found = {}
    for name, words in (
        ("full", ["plain"]), ("checkpointed", ["plain", "--way", "checkpointed"]), ("mapped", ["mapped", "--write", "--ahead"]),
        ("ours", ["ours", "--limit", "1GB", "--note-losses", "--micro", 64]),
    ):  # fmt: skip
        done = module(f"benchmarks.peers.{words[0]}", *words[1:], *common)
        assert done.returncode == 0, done.stderr
        found[name] = json.loads(done.stdout.splitlines()[-1])["losses"][:4]
    assert found["full"] == found["checkpointed"] == found["mapped"] == found["ours"]


@pytest.mark.slow
def test_peers_of_a_gpu_refuse_in_words_where_there_is_none(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    torch.save({}, tmp_path / "rows.pt")
    for name, words in (("on_gpu", []), ("gpu_only", ["--way", "torchao", "--data", tmp_path / "rows.pt"])):
        done = module(f"benchmarks.peers.{name}", *words)
        assert done.returncode == 3 and "refused: " in done.stderr


@dataclass
class Machine:
    """Trains in any cgroup of at least `needs` bytes."""

    needs: float
    step: float = 1.08
    network: str = "S"
    allowed: float = 60
    sizes: list[float] = field(default_factory=list)

    def attempt(self, name: str, size: int, updates: int, **_: Any) -> Any:
        self.sizes.append(size)
        good = size >= self.needs
        told = dict.fromkeys(("peak", "used", "read", "written", "warm", "late", "exit_code"), 0)
        cell = type("Cell", (), told | {"out_of_memory": not good, "errors": ""})()
        return cell, {"seconds": [1.0] * updates} if good else None


@given(needs=st.floats(1e8, 5e9), low=st.floats(5e7, 1e8), above=st.floats(0.3, 4))
def test_the_smallest_size_is_found_to_one_step_whatever_the_first_guess(needs, low, above):
    machine = Machine(needs)
    found = compare._bisect(machine, "full", low, above * needs, None, [])
    if found is None:  # five guesses, each 1.3 times the last, did not reach it
        assert above * 1.3**5 < 1
        return
    too_small = [low, *(size for size in machine.sizes if size < needs)]
    assert needs <= found["size"] + 1 and found["size"] <= machine.step * max(too_small) + 2
    assert found["size"] == min(size for size in machine.sizes if size >= needs)


def test_sizes_are_read_and_a_missing_environment_is_told_with_its_command(tmp_path):
    assert [parse(text) for text in ("620MB", "1.5GB", "7B")] == [620_000_000, 1_500_000_000, 7]
    why = Environments(tmp_path).missing(ARMS["deepspeed_nvme"])
    assert "environment.sh deepspeed" in why
    assert issubclass(NoCgroup, RuntimeError)


def test_libraries_that_another_process_maps_are_waited_for_and_then_refused(tmp_path, monkeypatch):
    library = tmp_path / "library.so"
    library.write_bytes(bytes(32 << 20))
    monkeypatch.setattr(cell, "PATIENCE", 0)
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        if cell.make_cold([library]) == 0:
            pytest.skip("this file system lets pages go that are mapped")
        with pytest.raises(cell.Warm, match="34 MB of the libraries are in use by another process"):
            cell.run(["true"], 1 << 30, cold=[library])
    assert cell._waited_until_cold([library]) == 0


def test_the_environment_script_refuses_in_words():
    done = subprocess.run(
        ["sh", str(HOUSE / "benchmarks/peers/environment.sh"), "nothing"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3 and "expected deepspeed, torch or gpu; found 'nothing'" in done.stderr


def test_the_table_shows_medians_refusals_and_what_was_not_measured():
    run, late = {"seconds": [3.0, 1.0, 2.0]}, {"seconds": [9.0]}
    found = {
        "equal": 10**9,
        "arms": {
            "ours": {"smallest": {"size": 4 * 10**8, "peak": 3 * 10**8}, "at_smallest": [run], "at_equal": [run, late]},
            "fsdp2": {"refused": "no way"},
        },
    }  # fmt: skip
    ours, refused = results.rows(found)
    assert ours[:6] == ["ours", "0.40", "0.30", "2.00", "2.50", "-"]
    assert refused == ["fsdp2", *["-"] * 6, "no way"]
    assert "s at 1.00 GB" in results.markdown({"S": found})
