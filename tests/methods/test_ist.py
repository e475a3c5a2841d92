"""Method ist: a run of it is a plain loop over subnets, and with one subnet it is full training, to the bit."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from seqpart.data.reader import windows
from seqpart.methods.ist.narrow import index_sets
from seqpart.plan.prediction import predict
from seqpart.plan.problem import parts_of
from seqpart.plan.simulator import Resources
from seqpart.zoo import models
from tests import forced
from tests.subnets import BATCH, trained

pytestmark = pytest.mark.usefixtures("known_machine")

ROWS = 72


def data(rows=ROWS, seed=1):
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=chance)
    return x, (x @ torch.randn(6, 4, generator=torch.Generator().manual_seed(0))).argmax(1)


def blocks():
    """Two hidden layers, in blocks that are cut where no layer ends."""
    torch.manual_seed(3)
    return [
        nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU()), nn.Linear(16, 24),
        nn.Sequential(nn.BatchNorm1d(24), nn.Tanh()), nn.Linear(24, 4),
    ]  # fmt: skip


def with_dropout():
    return [*blocks()[:2], nn.Dropout(0.3), *blocks()[2:]]


def residual():
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU()), models.ResidualBlock(16), nn.Linear(16, 4)]


def fitted(folder, model, **options):
    return trained(folder, model, data(), data(30, 2), **options)


def order(seed, epoch, rows=ROWS):
    return np.concatenate([window.rows for window in windows(rows, rows, (seed, "order", 0, epoch))])


# --- one subnet --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [blocks, with_dropout, residual])
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adam"},
        {"optimizer": "sgd", "momentum": 0.9, "lr_schedule": "cosine", "warmup_updates": 2, "partitions": 2},
        {"optimizer": "adamw", "weight_decay": 0.1, "clip_grad_norm": 0.5, "micro_batch_size": 3, "dtype": "bf16"},
    ],
    ids=["adam", "sgd, cut", "adamw, clipped, bf16"],
)
@pytest.mark.few(1)
def test_one_subnet_is_full_training_to_the_bit(model, options, tmp_path):
    full = {name: value for name, value in options.items() if name != "partitions"}
    expected = fitted(tmp_path / "full", model(), **{**full, "method": "full"})
    found = fitted(tmp_path / "ist", model(), subnets=1, local_steps=2, **options)
    assert found.weights.read_bytes() == expected.weights.read_bytes()
    assert (found.test_loss, found.accuracy) == (expected.test_loss, expected.accuracy)
    assert ("partitions" in options) == (len(found.plan.partitions) > 2)


# --- a plain loop --------------------------------------------------------------------------------------------------------

NARROW = {"0.0": (0, None), "0.1": (0, None), "1": (1, 0), "2.0": (1, None), "3": (None, 1)}
"""Of each module with tensors, the hidden layers that its rows and its columns are of."""


def reference(subnets, local, *, epochs, seed=5, moments=True, every_row=False, lr=1e-2):
    """What `ist` is to do with `blocks()`, written down as a loop over dicts of tensors."""
    whole, states = nn.Sequential(*blocks()), {}
    x, y = data()
    names = [name for name, _ in whole.named_parameters()]
    shard, round_ = (ROWS if every_row else ROWS // subnets), 0
    for epoch in range(1, epochs + 1):
        rows = order(seed, epoch)
        for first in range(0, shard, local * BATCH):
            round_ += 1
            sets = [index_sets(seed, round_, layer, units, subnets, 64) for layer, units in ((0, 16), (1, 24))]
            parts, learned = [], []
            for part in range(subnets):
                own = [torch.from_numpy(layer[part]) for layer in sets]
                net = narrow(whole, own)
                optimizer = torch.optim.Adam(net.parameters(), lr=lr, fused=True)
                for (name, parameter), whole_name in zip(net.named_parameters(), names, strict=True):
                    assert name == whole_name
                    if whole_name in states and moments:
                        state = {key: cut(name, value, own) for key, value in states[whole_name].items()}
                    else:
                        state = {"step": torch.zeros(()), **{k: torch.zeros_like(parameter) for k in ("exp_avg", "exp_avg_sq")}}
                    optimizer.state[parameter] = {key: value.clone() for key, value in state.items()}
                start = 0 if every_row else part * shard
                mine = rows[start : start + shard][first : first + local * BATCH]
                for at in range(0, len(mine), BATCH):
                    batch = torch.from_numpy(mine[at : at + BATCH])
                    hidden = net[:3](x[batch])
                    F.cross_entropy(F.linear(subnets * hidden, net[3].weight, net[3].bias), y[batch]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                parts.append(own)
                learned.append((dict(net.state_dict()), {name: optimizer.state[p] for name, p in net.named_parameters()}))
            merged(whole, states, names, parts, learned)
    return with_statistics(whole, x[torch.from_numpy(order(seed, 0))])


def cut(name, tensor, own):
    rows, columns = NARROW[name.rpartition(".")[0]]
    if not tensor.ndim:
        return tensor
    tensor = tensor if rows is None else tensor[own[rows]]
    return tensor if columns is None or tensor.ndim < 2 else tensor[:, own[columns]]


def narrow(whole, own):
    first, second = map(len, own)
    net = nn.Sequential(
        nn.Sequential(nn.Linear(6, first), nn.BatchNorm1d(first), nn.ReLU()), nn.Linear(first, second),
        nn.Sequential(nn.BatchNorm1d(second), nn.Tanh()), nn.Linear(second, 4),
    )  # fmt: skip
    net.load_state_dict({name: cut(name, tensor, own) for name, tensor in whole.state_dict().items()})
    return net


def merged(whole, states, names, parts, learned):
    for name, tensor in whole.state_dict().items():
        put_back(name, tensor, parts, [values[name] for values, _ in learned])
    for name in names:
        like = whole.get_parameter(name)
        state = states.setdefault(
            name, {"step": torch.zeros(()), "exp_avg": torch.zeros_like(like), "exp_avg_sq": torch.zeros_like(like)}
        )
        for key, tensor in state.items():
            put_back(name, tensor.detach(), parts, [own[name][key] for _, own in learned])


def put_back(name, tensor, parts, values):
    rows, columns = NARROW[name.rpartition(".")[0]]
    if tensor.ndim and rows is not None:
        for own, value in zip(parts, values, strict=True):
            if tensor.ndim == 2 and columns is not None:
                tensor[own[rows][:, None], own[columns]] = value
            else:
                tensor[own[rows]] = value
    elif tensor.ndim == 2 and columns is not None:
        for own, value in zip(parts, values, strict=True):
            tensor[:, own[columns]] = value
    elif tensor.is_floating_point():
        tensor.copy_(values[0] + sum(value - values[0] for value in values[1:]) / len(values))
    else:
        tensor.copy_(values[0])


def with_statistics(whole, rows):
    norms = [module for module in whole.modules() if isinstance(module, nn.BatchNorm1d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    with torch.no_grad():
        whole.eval()
        for norm in norms:
            norm.train()
        for at in range(0, len(rows), BATCH):
            whole(rows[at : at + BATCH])
    return whole.eval()


@pytest.mark.parametrize("subnets", [2, 3])
@pytest.mark.parametrize("options", [{}, {"subnet_moments": "zero"}, {"subnet_rows": "all"}, {"partitions": 2}], ids=str)
@pytest.mark.few(1)
def test_a_run_is_a_plain_loop_over_subnets_parameter_by_parameter(subnets, options, tmp_path):
    found = fitted(tmp_path / "ist", blocks(), subnets=subnets, local_steps=2, micro_batch_size=BATCH, **options)
    expected = reference(
        subnets, 2, epochs=2, moments="subnet_moments" not in options, every_row="subnet_rows" in options
    ).state_dict()  # fmt: skip
    weights = load_file(found.weights)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), f"{name} differs by {(weights[name] - tensor).abs().max()}"


def test_one_round_is_one_round(tmp_path):
    found = load_file(fitted(tmp_path / "ist", blocks(), subnets=2, local_steps=9, epochs=1, micro_batch_size=BATCH).weights)
    expected = reference(2, 9, epochs=1).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_boundaries_of_subnets_may_wait_on_the_disk(tmp_path, monkeypatch):
    """Close to the smallest limit they do, and the plan ended with an IndexError: it had their places for one subnet alone."""
    options = {"subnets": 2, "local_steps": 2, "partitions": 2}
    expected = fitted(tmp_path / "near", blocks(), **options)

    def on_disk(problem, method, micro_batch):
        return predict(problem, method, micro_batch, parts_of(problem, micro_batch, (0, 2)), Resources(tiers=("disk",) * 2))

    forced.plans(monkeypatch, on_disk)
    found = fitted(tmp_path / "run", blocks(), **options)
    assert [part.boundary_tier for part in found.plan.partitions] == ["device", *["disk"] * 4]
    assert found.weights.read_bytes() == expected.weights.read_bytes()
