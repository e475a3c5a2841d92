"""Fine-tuning a part of a network: what is frozen comes and goes by itself, without gradients and state. All frozen blocks in a
row were one partition, so that a head on a base larger than the limit was refused where the whole network trained."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seqpart import Trainer
from seqpart.device.usage import read_process
from seqpart.errors import DoesNotFit, ModelError
from tests.choice import in_pairs

MB = 10**6
WIDTH, DEPTH = 24, 8
PATTERNS = {
    "head alone": {DEPTH},
    "last layer and head": {DEPTH - 1, DEPTH},
    "first layer and head": {0, DEPTH},
    "first layer alone": {0},
    "one in the middle": {3},
    "every other one": set(range(0, DEPTH, 2)),
}


def block(width=WIDTH):
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh())


def network(learning):
    torch.manual_seed(0)
    model = nn.Sequential(*[block() for _ in range(DEPTH)], nn.Linear(WIDTH, 5))
    for number, part in enumerate(model):
        part.requires_grad_(number in learning)
    return model


ROWS = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(1)), torch.arange(48) % 5


def plainly(model, clip):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.0, fused=True)
    for _ in range(2):
        for at in range(0, 48, 16):
            F.cross_entropy(model(ROWS[0][at : at + 16]), ROWS[1][at : at + 16]).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(("method", "name", "clip"), in_pairs(["streamed", "auto", "checkpointed"], [*PATTERNS], [None, 0.1]))
@pytest.mark.few(2)
def test_a_network_of_which_a_part_learns_has_the_bits_of_a_plain_loop(tmp_path, name, method, clip):
    """Blocks by themselves: the first that learns may stand anywhere."""
    learning = PATTERNS[name]
    model = network(learning)
    options = {} if method == "auto" else {"partitions": tuple(range(DEPTH + 1))}
    result = Trainer(
        model, mem_limit="2GB", method=method, lr=0.01, batch_size=16, epochs=2, shuffle=False, quiet=True,
        output_dir=tmp_path / "run", clip_grad_norm=clip, **options,
    ).fit(ROWS)  # fmt: skip
    found, expected = model.state_dict(), plainly(network(learning), clip)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in network(learning).parameters()]
    assert method == "auto" or len(result.plan.partitions) == DEPTH + 1


def wide(learning, depth=6, width=512):
    """Factories: the weights of all blocks never are in memory together."""

    def factory(number):
        return lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU()).requires_grad_(number in learning)

    return [*(factory(number) for number in range(depth)), lambda: nn.Linear(width, 10).requires_grad_(depth in learning)]


def smallest(learning, **options):
    rows = torch.randn(32, 512), torch.arange(32) % 10
    with pytest.raises(DoesNotFit) as error:
        Trainer(wide(learning), mem_limit="60MB", method="streamed", batch_size=16, quiet=True, **options).plan(rows)
    return error.value.smallest


def test_a_part_of_a_network_needs_no_more_than_all_of_it_and_its_head_alone_less(known_machine):
    depth = 6
    everything = smallest(set(range(depth + 1)))
    assert smallest({depth}) < everything - MB
    for learning in ({depth - 1, depth}, {0, depth}, {depth // 2}):
        assert smallest(learning) <= everything


def test_by_name_too_and_what_learns_later_must_fit_before_the_run(known_machine):
    everything = set(range(7))
    assert smallest(everything, freeze="[0-5].*") == smallest({6})
    assert smallest({6}, unfreeze={"[0-5].*": "epoch 2"}) == smallest(everything)


@pytest.mark.own_process
def test_a_head_on_a_base_that_is_larger_than_the_limit_trains_under_it(tmp_path):
    depth, width, limit = 20, 1152, read_process().held + 80 * MB
    rows = torch.randn(32, width), torch.arange(32) % 10
    result = Trainer(
        wide({depth}, depth, width),
        mem_limit=limit,
        method="auto",
        batch_size=16,
        epochs=1,
        quiet=True,
        output_dir=tmp_path / "run",
    ).fit(rows)
    assert result.plan.full_state > 100 * MB
    assert result.proof.violations == 0 and result.proof.peak <= limit and len(result.plan.partitions) > 2


def test_in_sil_a_partition_still_has_something_to_learn(tmp_path):
    """It has a loss of its own."""
    model = network({0, 4, DEPTH})
    plan = Trainer(model, mem_limit="2GB", method="sil", partitions=3, batch_size=16, quiet=True).plan(ROWS)
    assert [part.first for part in plan.partitions] == [0, 4, DEPTH]


class Head(nn.Module):
    """Gives an optimizer its head alone."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.base, self.head, self.way = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5), way

    def forward(self, x):
        return self.head(self.base(x))

    def parameters(self, recurse=True):
        return self.head.parameters() if self.way == "parameters" else super().parameters(recurse)

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        every = super().named_parameters(prefix, recurse, remove_duplicate)
        return (pair for pair in every if self.way == "parameters" or pair[0].startswith("head"))


@pytest.mark.parametrize("way", ["parameters", "named_parameters"])
def test_a_model_whose_own_parameters_leave_some_out_is_refused_unless_these_are_frozen(way):
    """Some of those that it left out were trained, others not, and each method chose other ones."""

    def fit(**options):
        made = Trainer(
            model, None, torch.optim.AdamW, mem_limit="2GB", epochs=2, shuffle=False, batch_size=16, quiet=True, **options
        )  # fmt: skip
        return made.fit(ROWS)

    model, plain = Head(way), Head(way)
    with pytest.raises(ModelError, match=r"leaves out 2 that learn, base.weight, base.bias: .* name them in freeze"):
        fit(method="full")
    plain.base.requires_grad_(False)
    optimizer = torch.optim.AdamW(plain.parameters())
    for _ in range(2):
        for at in range(0, 48, 16):
            optimizer.zero_grad()
            F.cross_entropy(plain(ROWS[0][at : at + 16]), ROWS[1][at : at + 16]).backward()
            optimizer.step()
    fit(method="streamed", partitions=2, freeze="base.*", micro_batch_size=16)
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
