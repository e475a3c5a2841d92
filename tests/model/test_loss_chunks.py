"""Cross-entropy over chunks of positions has the bits of the plain loop over the same chunks, and never the logits of two."""

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqpart.model.loss_chunks import Head, LossInChunks
from seqpart.model.reductions import BY_ROWS, Kind, Reduction, loss_value
from seqpart.schedule.phase import Span

INPUTS, CLASSES = 5, 37


def head_of(layer, scores=None):
    return Head("head", (layer.in_features, layer.out_features), lambda: [*layer.parameters()], torch.positive, scores or layer)


def plain(layer, states, labels, chunks, smoothing=0.0):
    """The loop that the module's docstring and docs/limits_and_plans.md state."""
    states, targets = states.flatten(0, -2), labels.flatten()
    parts = zip(states.chunk(chunks), targets.chunk(chunks), strict=True)
    sums = [F.cross_entropy(layer(one), own, reduction="sum", label_smoothing=smoothing) for one, own in parts]
    return sum(sums) / (targets != -100).sum()


def learned(loss, states, layer, factor):
    """What `factor` times a loss comes to, and all gradients."""
    for one in (states, *layer.parameters()):
        one.grad = None
    found = loss(states)
    (found if factor == 1.0 else found * factor).backward()
    return [found.detach(), states.grad, *(one.grad for one in layer.parameters())]


@given(
    rows=st.integers(1, 4), positions=st.integers(1, 9), chunks=st.integers(1, 40), ignored=st.sets(st.integers(0, 35)),
    bias=st.booleans(), smoothing=st.sampled_from([0.0, 0.1]), factor=st.sampled_from([1.0, 2 / 6, 0.3]),
    narrow=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@example(rows=2, positions=6, chunks=4, ignored={0, 1, 2, 3}, bias=True, smoothing=0.0, factor=0.3, narrow=False, seed=0)
def test_chunks_have_the_bits_of_the_plain_loop_over_them(
    rows, positions, chunks, ignored, bias, smoothing, factor, narrow, seed
):  # fmt: skip
    torch.manual_seed(seed)
    layer, states = nn.Linear(INPUTS, CLASSES, bias=bias), torch.randn(rows, positions, INPUTS, requires_grad=True)
    labels = torch.randint(CLASSES, (rows, positions))
    labels.view(-1)[[place for place in ignored if place < labels.numel() - 1]] = -100  # one counts: the loop's is a number
    loss = LossInChunks(head_of(layer), torch.flatten, chunks, smoothing=smoothing)
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow, cache_enabled=False):
        expected = learned(lambda x: plain(layer, x, labels, chunks, smoothing), states, layer, factor)
        found = learned(lambda x: loss(x, labels, factor), states, layer, factor)
    assert all(map(torch.equal, found, expected))


def test_one_chunk_too_has_the_gradients_of_the_whole_within_rounding():
    layer, states, labels = nn.Linear(INPUTS, CLASSES), torch.randn(2, 6, INPUTS, requires_grad=True), torch.arange(12)
    labels[:7] = -100
    whole = learned(lambda x: F.cross_entropy(layer(x).flatten(0, 1), labels), states, layer, 1.0)
    for chunks in (1, 5):
        found = learned(lambda x, n=chunks: LossInChunks(head_of(layer), torch.flatten, n)(x, labels), states, layer, 1.0)
        torch.testing.assert_close(found, whole)


def test_labels_of_which_none_counts_have_a_loss_and_gradients_of_zero():
    layer, states = nn.Linear(INPUTS, CLASSES), torch.randn(2, 3, INPUTS, requires_grad=True)
    labels = torch.full((2, 3), -100)
    loss = LossInChunks(head_of(layer), torch.flatten, 2)
    counted = Reduction(Kind.COUNTED, lambda labels: labels.ne(-100).sum(), -100)
    found = learned(lambda x: loss_value(loss, counted, x, labels, Span(0, 2, 4, False)).loss, states, layer, 1.0)
    assert all(torch.equal(one, torch.zeros_like(one)) for one in found), "and not None: a decay acts on the weight"


def test_gradients_are_computed_with_the_share_of_the_micro_batch():
    layer, states, labels = (
        nn.Linear(INPUTS, CLASSES),
        torch.randn(2, 3, INPUTS, requires_grad=True),
        torch.arange(6).view(2, 3),
    )
    loss = LossInChunks(head_of(layer), torch.flatten, 4)
    found = learned(lambda x: loss_value(loss, BY_ROWS, x, labels, Span(0, 2, 6, False)).loss, states, layer, 2 / 6)
    assert all(map(torch.equal, found, learned(lambda x: plain(layer, x, labels, 4), states, layer, 2 / 6)))


@pytest.mark.parametrize("frozen", ["body", "head", "both"])
def test_what_does_not_learn_has_no_gradient(frozen):
    layer = nn.Linear(INPUTS, CLASSES).requires_grad_(frozen == "body")
    states, labels = torch.randn(2, 3, INPUTS, requires_grad=frozen == "head"), torch.arange(6).view(2, 3)
    loss = LossInChunks(head_of(layer), torch.flatten, 4)(states, labels)
    assert loss.requires_grad is (frozen != "both")
    if frozen != "both":
        loss.backward()
    assert (states.grad is None) is (frozen != "head")
    assert [one.grad is None for one in layer.parameters()] == [frozen != "body"] * 2


def test_the_likeliest_classes_come_with_the_loss():
    layer, states, labels = nn.Linear(INPUTS, CLASSES), torch.randn(2, 5, INPUTS), torch.arange(10).view(2, 5)
    labels[0, 3] = -100
    loss = LossInChunks(head_of(layer), torch.flatten, 3)
    with torch.no_grad():
        loss(states, labels)
    best, known = loss.scores(states, labels)
    assert torch.equal(best, layer(states).argmax(-1).flatten())
    assert known.tolist() == [0, 1, 2, -1, *range(4, 10)]


class Largest(TorchDispatchMode):
    """Notes the most numbers of any tensor that is made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.most = max([self.most, *(leaf.numel() for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor))])
        return found


@pytest.mark.parametrize("learns", [True, False])
def test_no_tensor_has_the_logits_of_more_than_a_chunk(learns):
    layer, states, labels = nn.Linear(INPUTS, 400), torch.randn(4, 30, INPUTS, requires_grad=learns), torch.zeros(4, 30).long()
    scores = functools.partial(lambda x: torch.tanh(layer(x) / 30) * 30)
    with Largest() as seen, torch.set_grad_enabled(learns):
        loss = LossInChunks(head_of(layer, scores), torch.flatten, 7)(states, labels)
        if learns:
            loss.backward()
    assert seen.most == -(-120 // 7) * 400


def test_large_chunks_too_have_the_bits_of_the_plain_loop():
    """Their log-probabilities are computed again in backward, by a piece at a time."""
    layer, states = nn.Linear(4, 60_000), torch.randn(1, 160, 4, requires_grad=True)
    labels = torch.randint(60_000, (1, 160))
    labels[0, 70:90] = -100
    expected = learned(lambda x: plain(layer, x, labels, 2), states, layer, 0.3)
    found = learned(lambda x: LossInChunks(head_of(layer), torch.flatten, 2)(x, labels, 0.3), states, layer, 0.3)
    assert all(map(torch.equal, found, expected))
