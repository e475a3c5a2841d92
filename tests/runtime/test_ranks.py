"""Several processes of torchrun train one model, with the bits of one process that accumulates their micro-batches."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from seqpart.errors import Interrupted, OptionError
from tests.runtime import rank_runs

STATISTICS = [name for name in rank_runs.CASES if name.startswith("running statistics")]
SCRIPT = Path(__file__).parent / "rank_runs.py"


def torchrun(*arguments, ranks=rank_runs.RANKS, restarts=0, check=True):
    """Runs the script, or a module, in several processes. Standalone: on a port of its own, since tests run beside others."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    done = subprocess.run(
        [sys.executable, *command, *map(str, arguments)], capture_output=True, text=True, timeout=240, check=False
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stderr[-4000:]
    return done


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The folder in which two ranks have left what they found."""
    folder = tmp_path_factory.mktemp("ranks")
    torchrun(SCRIPT, folder, "runs")
    return folder


def plain_loop(epochs, ranks):
    """The weights of a loop that accumulates the gradients of as many micro-batches as there are ranks."""
    model = rank_runs.chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    for _ in range(epochs):
        for x, y in zip(rank_runs.ROWS.split(rank_runs.BATCH), rank_runs.CLASSES.split(rank_runs.BATCH), strict=True):
            for rows, labels in zip(x.split(rank_runs.BATCH // ranks), y.split(rank_runs.BATCH // ranks), strict=True):
                (nn.functional.cross_entropy(model(rows), labels) * (len(rows) / len(x))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@pytest.fixture
def one_thread():
    """As many as torchrun gives to each process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", rank_runs.CASES)
def test_two_ranks_of_a_micro_batch_each_have_the_bits_of_one_process_that_accumulates_two(name, together, tmp_path):
    """The last batch of 8 rows is one micro-batch: the second rank has none of it."""
    result, model = rank_runs.fitted(name, tmp_path / "run")
    alone = model.state_dict()
    for rank in range(rank_runs.RANKS):
        found, (losses, loss, accuracy, weights, proofs, _) = torch.load(together / f"{name}-{rank}.pt")
        parameters = dict(model.named_parameters())
        for key, tensor in found.items():
            assert torch.equal(tensor, alone[key]) or (key not in parameters and name in STATISTICS), key
        assert losses == result.train_losses and proofs == rank_runs.RANKS
        assert (loss, accuracy) == (result.test_loss, result.accuracy) or name in STATISTICS
        assert Path(weights).is_file() and Path(weights).parent == together / name.replace(" ", "-")
    assert sorted(path.name for path in together.glob("rank-*")) == [], "the second rank leaves nothing"


@pytest.mark.parametrize("name", STATISTICS)
def test_running_statistics_are_those_of_the_first_rank_as_in_torch_s_own_data_parallel(name, together):
    """Also those that the first rank's rows left as they were, and another's did not."""
    first, second = (torch.load(together / f"{name}-{rank}.pt")[0] for rank in range(2))
    model = rank_runs.chain(nn.BatchNorm1d(32))
    if "1.most" in first:
        assert first["1.most"] > 0
    else:
        assert first["1.num_batches_tracked"] == 6 and not torch.equal(first["1.running_mean"], model[1].running_mean)
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), key


@pytest.mark.usefixtures("one_thread")
def test_two_ranks_have_the_bits_of_a_plain_loop(together):
    plain = plain_loop(rank_runs.COMMON["epochs"], rank_runs.RANKS)
    for rank in range(rank_runs.RANKS):
        for key, tensor in torch.load(together / f"streamed-{rank}.pt")[0].items():
            assert torch.equal(tensor, plain[key]), key


def test_each_rank_keeps_the_weights_and_the_optimizer_state_of_its_own_partitions_alone(together):
    """And the gradients that wait for their norm. Layers with parameters are blocks 0, 2 and 4, each in another partition."""
    second, first = json.loads((together / "kept-0.json").read_text())
    kinds = [f"block-0000{number}{kind}" for number in (0, 2, 4) for kind in ("", ".gradients", ".optimizer")]
    assert [name in second for name in kinds] == [False] * 3 + [True] * 3 + [False] * 3
    assert [name in first for name in kinds] == [True, False, True] + [False] * 3 + [True] * 3, "the first is updated at once"


@pytest.mark.usefixtures("one_thread")
def test_weights_that_two_ranks_divide_are_exported_whole(together, tmp_path):
    rank_runs.fitted("dropout", tmp_path / "run")
    ours, theirs = (sorted((place / "exports").glob("*.safetensors")) for place in (tmp_path / "run", together / "dropout"))
    assert [file.name for file in ours] == [file.name for file in theirs] and len(ours) == 2
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(ours, theirs, strict=True))


def test_what_fails_in_the_last_test_leaves_the_weights_whole_that_ranks_divide(together):
    """The first rank wrote weights of other partitions as it had been given them for an earlier evaluation."""
    trained, _ = torch.load(together / "tied weights-0.pt")
    found = [torch.load(together / f"late-{rank}.pt") for rank in range(2)]
    assert "ValueError" in [name for _, name in found]
    written = load_file(together / "late" / "model.safetensors")
    for key, tensor in trained.items():
        assert all(torch.equal(weights[key], tensor) for weights, _ in found), key
        assert key not in written or torch.equal(written[key], tensor), key
    assert len(written) >= len(trained) - 1, "a tied weight may be written once"


def test_the_first_rank_keeps_the_weights_where_a_metric_fails_in_another_one(together):
    """It heard of it between two steps, and what was trained was lost; the other named a file that went with its directory."""
    one, other = (together / name / "model.safetensors" for name in ("late", "later"))
    assert one.read_bytes() == other.read_bytes()


def test_subnets_are_sent_once_in_a_round_as_the_paper_s_formula_has_it(together):
    """Section 2.3: of all matrices between two hidden layers an N-th, of the first and the last all; each to one other rank."""
    (first, hidden), (_, last), (_, classes) = rank_runs.SIZES
    formula = first * hidden + hidden * last // 2 + last * classes
    sent = [torch.load(together / f"subnets of matrices-{rank}.pt")[1][-1] for rank in range(2)]
    rounds = rank_runs.COMMON["epochs"]  # of two updates, which are an epoch of a subnet's 20 rows
    assert sum(sent) == 4 * formula * rounds and sent[0] == sent[1]


def test_partitions_that_are_trained_apart_are_sent_once(together):
    """Nothing else: each rank gives the weights of its own to the other one, when they are trained."""
    sent = [torch.load(together / f"partitions apart-{rank}.pt")[1][-1] for rank in range(2)]
    tensors = [[tensor.nbytes for name, tensor in rank_runs.deep().state_dict().items() if name.startswith(own)]
               for own in (("0.", "1.", "6.", "12."), ("3.", "9."))]  # fmt: skip
    assert sent == [sum(own) for own in tensors]


@pytest.mark.usefixtures("one_thread")
def test_three_ranks_with_partitions_of_their_own_have_the_bits_of_one_process(tmp_path):
    torchrun(SCRIPT, tmp_path, "apart", ranks=3)
    result, model = rank_runs.fitted("partitions apart", tmp_path / "alone", [rank_runs.Stops()])
    for rank in range(3):
        weights, losses, loss = torch.load(tmp_path / f"{rank}.pt")
        assert (losses, loss) == (result.train_losses, result.test_loss) and len(losses) == 8
        for key, tensor in model.state_dict().items():
            assert torch.equal(tensor, weights[key]), key


def test_what_several_processes_cannot_share_is_refused_by_all_of_them(together):
    first, second = (json.loads((together / f"said-{rank}.json").read_text()) for rank in range(2))
    assert first == second and {name: kind for name, (kind, _) in first.items()} == {
        **dict.fromkeys(("subnets", "partitions", "tests", "unfreeze", "micro-batch", "batch"), "OptionError"),
        "limit": "DoesNotFit", "rows": "DataError", "sampler": "DataError", "settings": "OptionError", "session": "OptionError",
        "frozen": "ModelError",
    }  # fmt: skip
    assert "trained by 2 processes, each of which takes at least one" in first["subnets"][1]
    assert "Give partitions=2, or start fewer" in first["partitions"][1]
    assert "eval_every needs the whole network" in first["tests"][1]
    assert "torchrun has started 2" in first["unfreeze"][1] and "DistributedSampler" in first["rows"][1]
    assert "not alike on all ranks" in first["frozen"][1]  # gloo aborted where tensors of other sizes met
    assert "rank 1 was given other settings than rank 0: epochs is" in first["settings"][1]


def test_an_error_in_one_rank_ends_the_run_of_the_other_and_a_script_may_go_on_with_both(together):
    assert [(together / f"failed-{rank}").read_text() for rank in range(2)] == ["OtherRank", "ValueError"]
    again, before = (together / name / "model.safetensors" for name in ("again", "channels-last"))
    assert again.read_bytes() == before.read_bytes()


@pytest.mark.slow
def test_gradients_of_any_size_and_order_are_added_up_in_the_order_of_three_ranks(tmp_path):
    torchrun(SCRIPT, tmp_path, "sums", ranks=3)


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "method"), [(0, "streamed"), (1, "ist"), (1, "sil")])
def test_a_rank_that_is_killed_starts_again_with_the_others_from_the_newest_checkpoint(killed, method, tmp_path, one_thread):
    """The other one hears of it where they exchange, or torchrun ends it before."""
    assert "exitcode: -9" in torchrun(SCRIPT, tmp_path, "SIGKILL", killed, method, restarts=1).stderr
    for key, tensor in rank_runs.uninterrupted(tmp_path / "alone", method=method).items():
        for rank in range(2):
            assert torch.equal(torch.load(tmp_path / f"{rank}.pt")[key], tensor), key


@pytest.mark.slow
@pytest.mark.parametrize("method", ["streamed", "ist"])
def test_a_signal_to_one_rank_saves_the_run_and_one_process_may_go_on_with_it(method, tmp_path, one_thread):
    done = torchrun(SCRIPT, tmp_path, "SIGTERM", 1, method, check=False)
    assert done.returncode and done.stderr.count("Interrupted: the run is saved") == 2, done.stderr
    found = rank_runs.uninterrupted(tmp_path / "alone", method=method)
    for key, tensor in rank_runs.uninterrupted(tmp_path / "run", method=method, resume=tmp_path / "run").items():
        assert torch.equal(tensor, found[key]), key


@pytest.mark.slow
def test_three_ranks_go_on_with_partitions_that_two_have_left_and_one_process_does_not(tmp_path, one_thread):
    done = torchrun(SCRIPT, tmp_path, "SIGTERM", 1, "sil", check=False)
    assert done.returncode and done.stderr.count("Interrupted: the run is saved") == 2, done.stderr
    with pytest.raises(OptionError, match=r"was trained by several processes, .* Start two or more\."):
        rank_runs.uninterrupted(tmp_path / "run", method="sil", resume=tmp_path / "run")
    torchrun(SCRIPT, tmp_path, "resume", "sil", ranks=3)
    for key, tensor in rank_runs.uninterrupted(tmp_path / "alone", method="sil").items():
        for rank in range(3):
            assert torch.equal(torch.load(tmp_path / f"{rank}.pt")[key], tensor), key


@pytest.mark.slow
def test_two_ranks_go_on_with_a_run_that_one_process_has_left_in_the_middle_of_a_round(tmp_path, one_thread):
    ends = rank_runs.Signal(-1, 3, signal.SIGTERM, 2)  # of the last subnet
    with pytest.raises(Interrupted):
        rank_runs.uninterrupted(tmp_path / "run", [ends], method="ist")
    torchrun(SCRIPT, tmp_path, "resume", "ist")
    for key, tensor in rank_runs.uninterrupted(tmp_path / "alone", method="ist").items():
        for rank in range(2):
            assert torch.equal(torch.load(tmp_path / f"{rank}.pt")[key], tensor), key


@pytest.mark.slow
def test_a_refusal_is_printed_once(tmp_path):
    command = ["--mem-limit", "1MB", "--method", "full", "--depth", "2", "--width", "16", "--output-dir", tmp_path / "run"]
    done = torchrun("-m", "seqpart.train", *command, check=False)
    assert done.stderr.count("DoesNotFit:") == 1 and done.returncode == 1


@pytest.mark.slow
def test_a_place_that_the_first_rank_refuses_is_refused_to_all(tmp_path):
    """The others waited for it to connect, until torchrun killed them, and their directories stayed."""
    size = ["--depth", "2", "--width", "16", "--epochs", "1"]
    command = ["-m", "seqpart.train", "--mem-limit", "600MB", "--method", "full", *size, "--output-dir", tmp_path / "run"]
    torchrun(*command)
    done = torchrun(*command, check=False)
    assert done.stderr.count("holds a finished run") == 1 and "forcefully exiting" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
