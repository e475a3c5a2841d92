"""Blocks of a traced model, run one after the other, against the model."""

import torch

from seqpart.capture.capture import chain_of

ROWS = 3


def replayed(chain, rows, *, training):
    """The output of the blocks one after the other, and the most values that are there between two of them."""
    values, last = {0: rows}, {n: block.number for block in chain for n in block.takes}
    widest = 0
    for block in chain:
        block.alive.train(training)
        given = block.alive(*(values[number] for number in block.takes))
        assert isinstance(given, tuple)
        values.update(zip(block.gives, given, strict=True))
        widest = max(widest, sum(last.get(number, len(chain)) > block.number for number in values))
    (output,) = chain[-1].gives
    return values[output], widest


def output_of(model, rows):
    name = getattr(model, "main_input_name", None)
    found = model(**{name: rows}) if name else model(rows)
    if isinstance(found, torch.Tensor):
        return found
    return next(found[key] for key in ("logits", "out", "last_hidden_state") if key in found)


def run(model, forward):
    """(output, gradients by name) from one seed; running statistics are what they were."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.zero_grad()
    torch.manual_seed(1)
    output = forward()
    if output.requires_grad:
        output.float().pow(2).sum().backward()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.load_state_dict(before)
    return output.detach(), gradients


def assert_same_as_whole(model, rows, blocks=None, widest=None):
    modes = [module.training for module in model.modules()]
    chain = chain_of(model, tuple(rows.shape[1:]), rows.dtype)
    assert [module.training for module in model.modules()] == modes
    for training in (True, False):
        model.train(training)
        with torch.set_grad_enabled(training):
            expected, gradients = run(model, lambda: output_of(model, rows))
            found, theirs = run(model, lambda training=training: replayed(chain, rows, training=training)[0])
        assert torch.equal(found, expected)
        for name in gradients if training else ():
            assert (gradients[name] is None) == (theirs[name] is None), name
            # Kernels round otherwise where memory lies otherwise: the bits are those of runs under a limit, see test_packs.
            assert gradients[name] is None or torch.allclose(theirs[name], gradients[name], rtol=1e-4, atol=1e-6), name
    named = {block.exported(name) for block in chain for name in block.alive.state_dict()} | set(chain.aliases)
    assert named == set(model.state_dict())
    assert blocks is None or len(chain) == blocks
    assert widest is None or replayed(chain, rows, training=False)[1] == widest


def images(size=32, channels=3):
    return torch.randn(ROWS, channels, size, size, generator=torch.Generator().manual_seed(2))


def tokens(length=12, words=11):
    return torch.randint(0, words, (ROWS, length), generator=torch.Generator().manual_seed(2))


def quantities(width=4):
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(2))
