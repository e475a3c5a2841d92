"""benchmarks/frontier: its networks train, its peers' points are reckoned right, and its sentences say what the figures say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import frontier, frontier_networks
from benchmarks import frontier_report as report
from benchmarks.peers.networks import mean_loss
from tests.command import ENVIRONMENT


def point(peak, ratio, *, expected=None):
    run = {"method": "streamed", "partitions": 3, "stays": [], "predicted seconds": expected} if expected else {}
    return {"to plain": ratio, "seconds": ratio, "peak": peak, "runs": [run]}


POINTS = {
    "plain": point(2_000_000_000, 1.0),
    report.EVERY_BLOCK: point(1_500_000_000, 1.5),
    "1GB": point(900_000_000, 2.0, expected=2.1),
    "2GB": point(1_800_000_000, 0.9, expected=1.8),
    "1.5GB": point(1_400_000_000, 2.2, expected=2.2),
}
PEERS = {
    "arms": {
        "full": {"unlimited": {"seconds": [2.0], "peak": 1}, "at_smallest": [{"seconds": [9.0], "peak": 1, "size": 5}]},
        "checkpointed": {"at_smallest": [{"seconds": [3.0], "peak": 1, "size": 5}]},
        "deepspeed_nvme": {"unlimited": {"seconds": [8.0, 6.0, 7.0], "peak": 10}, "timed": {"seconds": [9.0], "peak": 12}},
        "mapped": {
            "unlimited": {"seconds": [1.0], "peak": 7}, "at_smallest": [{"seconds": [20.0, 20.0], "peak": 7, "size": 30}],
        },
        "torchao": {"refused": "no GPU"},
    }
}  # fmt: skip


def test_a_peers_ratio_is_to_the_plain_loop_of_its_own_run():
    found = report.peers(POINTS, PEERS)
    assert found == [report.Other("DeepSpeed ZeRO-3, NVMe", 12, 3.5), report.Other("file mappings", 30, 10.0)]


def test_where_a_peers_run_had_no_plain_loop_checkpointing_stands_between():
    arms = {name: arm for name, arm in PEERS["arms"].items() if name != "full"}
    assert report.peers(POINTS, {"arms": arms})[0] == report.Other("DeepSpeed ZeRO-3, NVMe", 12, 7 * 1.5 / 3, "checkpointed")
    assert report.peers({"plain": POINTS["plain"]}, {"arms": arms}) == []


def test_the_sentences_of_a_part():
    found = report.sentences(POINTS, {})
    assert found == [
        "not monotone: the largest step up is 10.0%, from 1GB to 1.5GB",
        "share of the limit used: 90% (at 1GB) to 93%",
        "right end: 0.90 x plain at 2GB, where the peak is 1800 MB",
        "predicted seconds off by more than 15%: 2GB +100%",
        f"below every point of ours: none; not matched by any point of ours: {report.EVERY_BLOCK}",
    ]
    below = {"arms": {"full": {"timed": {"seconds": [2], "peak": 1}}, "deepspeed_cpu": {"timed": {"seconds": [1], "peak": 9}}}}
    assert report.sentences(POINTS, below)[-1].startswith("below every point of ours: DeepSpeed ZeRO-3, CPU;")
    assert report.sentences({"plain": POINTS["plain"]}, {}) == []


def test_a_limit_that_failed_is_named_and_is_no_point():
    points = {**POINTS, "700MB": {"failed": "OutOfMemory: too little", "runs": [{"failed": "OutOfMemory: too little"}]}}
    assert "failed: OutOfMemory: too little" in report.table("S-256", points, PEERS)
    assert report.sentences(points, PEERS) == report.sentences(POINTS, PEERS)


def test_smaller_states_have_curves_of_their_own():
    arms = frontier.arms_of(frontier.PARTS["S-256"], ["600MB", "1.2GB"])
    assert [name for name in arms if "MB" in name or "GB" in name] == ["600MB", "1.2GB", "600MB, bf16", "600MB, 8bit"]
    assert arms["600MB, 8bit"] == (*arms["600MB"], "--states", "8bit")
    points = {**POINTS, "1GB, 8bit": point(850_000_000, 3.0, expected=3.0)}
    assert report.sentences(points, PEERS) == report.sentences(POINTS, PEERS)
    assert report.ours(points) == report.ours(POINTS)
    assert report.ours(points, "8bit") == {"1GB": points["1GB, 8bit"]} and not report.ours(points, "bf16")


def test_peers_are_shown_only_at_their_batch():
    known = {"S": PEERS}
    assert frontier.peers_of(frontier.PARTS["S-256"], known) == PEERS
    assert frontier.peers_of(frontier.PARTS["S-32"], known) == frontier.peers_of(frontier.PARTS["R"], known) == {}


def test_every_part_has_ten_rising_limits_and_its_last_segments_are_its_blocks():
    for part in frontier.PARTS.values():
        sizes = [report.ours({limit: point(1, 1.0, expected=1.0) for limit in part.limits})]
        assert list(sizes[0]) == list(part.limits)
        assert len(part.limits) == 10
        assert part.segments[-1] == len(frontier_networks.blocks_of(part.network))


def test_the_picture_has_a_panel_for_each_part(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    report.picture({name: (name, POINTS, PEERS) for name in "abcd"}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert "picture.png" in capsys.readouterr().out


def test_the_resnet_trains_on_digits():
    x, y = frontier_networks.rows_of("R", torch.arange(4 * 64).view(4, 64) % 17, torch.tensor([1, 2, 3, 4]))
    for block in frontier_networks.blocks_of("R"):
        x = block()(x)
    mean_loss(x, y).backward()
    assert x.shape == (4, 10)


def test_the_transformer_predicts_the_next_pixel():
    pixels = torch.arange(10 * 64).view(10, 64) % 17
    x, y = frontier_networks.rows_of("T", pixels, torch.zeros(10))
    assert torch.equal(x[0, 1:], y[0, :-1])
    assert x.shape == y.shape == (4, 128)


@pytest.mark.slow
def test_both_arms_learn_the_same(tmp_path):
    found = {}
    for arm, *words in (("plain",), ("streamed", "--method", "auto", "--limit", "3GB", "--folder", tmp_path)):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.streamed_arm", arm, "--network", "R", "--batch", "4", "--updates", "4",
             *map(str, words)],
            cwd=Path(__file__).parents[2], env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found[arm] = json.loads(done.stdout.splitlines()[-1])
    assert found["plain"]["loss"] == pytest.approx(found["streamed"]["loss"], rel=1e-6)
    assert found["streamed"]["micro_batch"] == 4
