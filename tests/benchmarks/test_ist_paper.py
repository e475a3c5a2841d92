"""The IST paper's tables: its arms against each other, its formulas against what is counted, and what is made of results."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from benchmarks import ist_arm, ist_costs, ist_figures, ist_paper
from benchmarks.ist_networks import CLASSES, INPUTS, Job

SMALL = replace(ist_paper.QUICK, rows=256, held=64, width=16, batch=16, local=3, lr=6e-3, every=1)
DRAWN = replace(SMALL, local=20)


def rows(count, seed, data="emnist"):
    """Each class a picture of its own, with noise."""
    pictures = torch.rand(CLASSES[data], INPUTS[data], generator=torch.Generator().manual_seed(0))
    chance = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (count,), generator=chance)
    return pictures[labels] + 0.5 * torch.randn(count, INPUTS[data], generator=chance), labels


def found_by(job, tmp_path):
    return ist_arm.carried_out(job, rows(job.rows, 1, job.data), rows(200, 2, job.data), tmp_path)


def test_every_run_has_a_name_of_its_own_and_a_rate_that_was_tried():
    for small, base, cells in ((True, ist_paper.QUICK, 5), (False, ist_paper.FULL, 13 + 5)):
        tuning = [ist_paper.name_of(job) for job in ist_paper.tuned(base, small)]
        wanted = list(ist_paper.wanted(base, small))
        assert len(set(tuning)) == len(tuning) == cells * 3
        assert len({(group, ist_paper.name_of(job)) for group, job in wanted}) == len(wanted)
        accuracies = {name: {"curve": [0.1, 0.5 if "0.006" in name else 0.4]} for name in tuning}
        assert {ist_paper.best_rate(accuracies, job) for _, job in wanted} == {6e-3}


@hypothesis(deadline=None, max_examples=30)
@given(
    arm=st.sampled_from(ist_arm.ARMS), layers=st.integers(1, 4), subnets=st.sampled_from([1, 2, 4, 8]),
    units=st.integers(1, 4), local=st.integers(1, 9), data=st.sampled_from(["emnist", "cifar"]),
)  # fmt: skip
def test_what_is_counted_is_the_formulas_where_they_apply(arm, layers, subnets, units, local, data):
    job = replace(SMALL, arm=arm, layers=layers, subnets=subnets, width=8 * units, local=local, data=data)
    apart = 1 if arm == "full" else local
    assert ist_costs.matrices(job) == pytest.approx(ist_costs.paper_moved(job) * apart, rel=1e-12)
    assert ist_costs.flops(job) == ist_costs.paper_flops(job) + ist_costs.flops_of_inputs(job)


@pytest.mark.parametrize("arm", ["ist zero", "ist keep"])
@pytest.mark.few(1)
def test_a_run_moves_what_is_counted(arm, tmp_path):
    job = replace(SMALL, arm=arm, subnets=4)
    assert ist_costs.exchanges(job) == 2 * 2  # epochs of 4 updates
    read, written = found_by(job, tmp_path)["moved"]["split"]
    assert ist_costs.moved(job) <= read
    assert 0 <= written - ist_costs.moved(job) < 0.2 * written, "but for what lies between tensors, which are aligned"


@pytest.mark.slow
def test_an_ensemble_is_ist_in_one_round(tmp_path):
    job = replace(SMALL, subnets=4, local=99, epochs=1, rows=1024)
    curves = [found_by(replace(job, arm=arm), tmp_path)["curve"] for arm in ("ensemble", "ist keep", "ist zero")]
    assert curves[0] == pytest.approx(curves[1]) and curves[1] == curves[2]
    assert curves[0][-1] > 0.3  # of five classes
    apart = found_by(replace(job, arm="ist keep", local=4), tmp_path)["curve"]
    assert apart != pytest.approx(curves[0])


def test_local_sgd_of_one_site_is_full_training_and_all_arms_learn(tmp_path):
    curves = {arm: found_by(replace(SMALL, arm=arm, subnets=1), tmp_path)["curve"] for arm in ist_arm.ARMS}
    assert curves["full"] == curves["local"] == curves["ensemble"]
    assert all(len(curve) == 2 and curve[-1] > 0.8 for curve in curves.values())


def record(base: Job):
    """What a run of everything leaves: IST ends 2 points below the others, and one more where its moments are zero."""
    ends = {"ist keep": 0.48, "ist zero": 0.47}
    runs = {
        ist_paper.name_of(job): {"curve": [0.2, ends.get(job.arm, 0.5) + 0.01 * job.seed], "voted": 0.6}
        for group, job in ist_paper.wanted(base, small=False) if group == "runs"
    }  # fmt: skip
    tuning = {ist_paper.name_of(job): {"curve": [job.lr]} for job in ist_paper.tuned(base, small=False)}
    return {"runs": runs, "tuning": tuning}


def test_the_claims_are_judged_by_the_differences_over_seeds():
    found = {(claim[:12], where): text for claim, where, text in ist_figures.claims(record(DRAWN)["runs"], DRAWN)}
    assert found["IST is no wo", "EMNIST47, 2 hidden layers, N = 8"] == "worse (-2.00 ± 0.00 points)"
    assert found["Moments kept", "CIFAR-10, 3 hidden layers, N = 2"] == "better (+1.00 ± 0.00 points)"


@pytest.mark.slow
def test_tables_and_pictures_are_put_between_the_marks_of_the_document(tmp_path: Path):
    path = tmp_path / "found.md"
    path.write_text(f"before\n{ist_figures.BEGIN}\nold\n{ist_figures.END}\nbehind\n")
    for _ in range(2):
        written = ist_figures.document(record(DRAWN), DRAWN, path)
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("\nbehind\n") and "old" not in text
    assert "| EMNIST47 | 2 | 4 | 52.0 ± 1.6 | 52.0 ± 1.6 | 52.0 ± 1.6 | 60.0 ± 0.0 | 49.0 ± 1.6 | 50.0 ± 1.6 | 5 |" in text
    assert "0.02 (edge)" in text
    assert [one.name for one in written] == ["found.md", "bytes.png", "flops.png"]
    assert all(one.read_bytes().startswith(b"\x89PNG") and one.stat().st_size > 5000 for one in written[1:])
