"""The last linear layer of a language model, which a loss over chunks of positions computes itself."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seqpart import Trainer
from seqpart.capture.capture import chain_and_loss, chain_of
from seqpart.errors import ModelError, OptionError

CLASSES, WIDTH, POSITIONS = 23, 8, 5


class LM(nn.Module):
    """A causal model; `scores` makes what it returns of its states."""

    def __init__(self, *, listened=False, kind=nn.Linear):
        super().__init__()
        self.embedding, self.layer, self.norm = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = kind(WIDTH, CLASSES)
        if listened:
            self.head.register_forward_hook(lambda *_: None)

    def states(self, tokens):
        return self.norm(torch.tanh(self.layer(self.embedding(tokens))))

    def scores(self, states):
        return self.head(states)

    def forward(self, tokens):
        return self.scores(self.states(tokens))


def changed(scores):
    """A class of models whose scores are made so."""
    return type("Changed", (LM,), {"scores": scores})


def chain(model):
    return chain_of(model, (POSITIONS,), torch.int64, in_chunks=True)


WAYS = {
    "the layer itself": lambda self, states: self.head(states),
    "a cap": lambda self, states: 30 * torch.tanh(self.head(states) / 30),
    "a scale, in another type": lambda self, states: self.head(states).double().mul(0.25),
    "a function": lambda self, states: F.linear(states, self.head.weight, self.head.bias),
    "other shapes": lambda self, states: self.head(states.reshape(-1, WIDTH)).view(-1, POSITIONS, CLASSES).contiguous(),
}


@pytest.mark.parametrize("way", WAYS)
def test_states_and_head_have_the_scores_of_the_model(way):
    model, tokens = changed(WAYS[way])().eval(), torch.randint(CLASSES, (3, POSITIONS))
    found = chain(model)
    x = tokens
    for block in found:
        (x,) = block.alive.eval()(x)
    assert x.shape[-1] == WIDTH and {*found.head.parameters()} == {model.head.weight, model.head.bias}
    assert torch.equal(found.head.scores(found.head.select(x).flatten(0, -2)), model(tokens).flatten(0, -2))
    own = {found[-1].exported(name) for name, _ in found[-1].alive.named_parameters()}
    assert own == {"norm.weight", "norm.bias", "head.weight", "head.bias"}


def test_positions_that_a_model_leaves_out_of_its_loss_are_left_out_of_the_states():
    class Shifted(LM):
        def forward(self, tokens, labels=None):
            scores = super().forward(tokens)
            if labels is None:
                return {"logits": scores}
            loss = F.cross_entropy(scores.float()[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)
            return {"loss": loss, "logits": scores}

    model, tokens = Shifted(), torch.randint(CLASSES, (3, POSITIONS))
    found, own = chain_and_loss(model, (POSITIONS,), torch.int64, (), tokens, in_chunks=True)
    x = tokens
    for block in found:
        (x,) = block.alive(x)
    loss = own.in_chunks(found.head, 3)
    torch.testing.assert_close(loss(x, tokens), model(tokens, tokens)["loss"])
    assert loss.scores(x, tokens)[1].tolist() == tokens[:, 1:].flatten().tolist()


@pytest.mark.parametrize("all_of_it", [True, False])
def test_a_loss_takes_what_the_model_returns_or_its_logits_alone(all_of_it):
    """The usual `cross_entropy(output.logits.flatten(0, 1), ...)` was refused: it got the logits, which have no `logits`."""

    class Returning(LM):
        def forward(self, tokens):
            return {"logits": super().forward(tokens), "twice": 2 * tokens}

    def loss(output, labels):
        return F.cross_entropy((output["logits"] if all_of_it else output).flatten(0, 1), labels.flatten())

    model, tokens = Returning(), torch.randint(CLASSES, (3, POSITIONS))
    found, own = chain_and_loss(model, (POSITIONS,), torch.int64, (), tokens, in_chunks=True, loss=loss)
    x = tokens
    for block in found:
        (x,) = block.alive(x)
    returned = model(tokens)
    expected = loss(returned if all_of_it else returned["logits"], tokens)
    torch.testing.assert_close(own.in_chunks(found.head, 3)(x, tokens), expected)


class Quantized(nn.Linear):
    pass


def with_hook(model):
    model.head.weight.register_hook(lambda gradient: gradient / 2)
    return model


REFUSED = {
    "a softmax over all classes": (changed(lambda self, states: self.head(states).log_softmax(-1)), "log_softmax"),
    "a sum of positions": (changed(lambda self, states: self.head(states).cumsum(1)), "cumsum"),
    "two layers": (changed(lambda self, states: self.head(states) + self.head(states)), "come from add"),
    "no layer": (changed(lambda self, states: F.pad(states, (0, CLASSES - WIDTH))), "pad"),
    "chosen classes": (changed(lambda self, states: self.head(states)[..., :9]), "getitem"),
    "a subclass": (lambda: LM(kind=Quantized), "a Quantized"),
    "hooks": (lambda: LM(listened=True), "with hooks"),
    "a hook on its weight": (lambda: with_hook(LM()), "head has hooks on gradients"),
    "a hook on a function's weight": (lambda: with_hook(changed(WAYS["a function"])()), "head.weight has hooks on gradients"),
    "a list": (lambda: [LM()], "a list of blocks"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_a_model_that_does_not_end_in_a_linear_layer_is_refused_with_what_it_ends_in(way):
    made, said = REFUSED[way]
    with pytest.raises(ModelError, match=rf"loss.chunks.*{said}"):
        chain(made())


def rows(shape=(POSITIONS,), labels=None):
    return torch.randint(CLASSES, (4, *shape)), torch.randint(CLASSES, (4, *shape)) if labels is None else labels


criterion = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=0)


LOSSES = {
    "torch's function": lambda output, labels: F.cross_entropy(output.flatten(0, 1), labels.flatten()),
    "torch's module": lambda output, labels: criterion(output.view(-1, CLASSES), labels.view(-1)),
    "of most positions": lambda output, labels: F.cross_entropy(output[:, 1:].flatten(0, 1).float(), labels[:, 1:].flatten()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_function_that_is_the_cross_entropy_of_positions_is_computed_over_chunks(name):
    model, (x, labels) = LM(), rows()
    found, own = chain_and_loss(model, (POSITIONS,), torch.int64, (), labels, in_chunks=True, loss=LOSSES[name])
    states = x
    for block in found:
        (states,) = block.alive(states)
    loss = own.in_chunks(found.head, 3)
    torch.testing.assert_close(loss(states, labels), LOSSES[name](model(x), labels))
    assert own.called == own_name(LOSSES[name])


def own_name(loss):
    return loss.__qualname__


def unequal(output, labels):
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), weight=torch.ones(CLASSES))


def hardest(output, labels):
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none").topk(3).values.mean()


def failing(output, labels):
    return output @ labels


@pytest.mark.parametrize(
    ("options", "data", "said"),
    [
        ({"loss": unequal}, rows(), "a mean without weights of classes"),
        ({"loss": hardest}, rows(), "not torch's cross_entropy"),
        ({"loss": failing}, rows(), "failing could not be looked into"),
        ({"loss": "psl"}, rows(), "found --loss psl|found loss"),
        ({"method": "sil"}, rows(), "found sil"),
        ({}, rows(labels=torch.randint(3, (4,))), "classes of positions"),
        ({}, rows(labels=torch.randn(4, POSITIONS)), "classes of positions"),
    ],
    ids=["weights", "hard positions", "an error", "another loss", "another method", "a label a row", "floats"],
)
def test_what_cannot_be_computed_over_chunks_is_refused_in_words(options, data, said, tmp_path):
    options = {"mem_limit": "2GB", "method": "full", "loss_chunks": 2, "batch_size": 4, "quiet": True, **options}
    with pytest.raises(ModelError, match=said):
        Trainer(LM(), options.pop("loss", None), output_dir=tmp_path / "run", **options).plan(data)


def test_metrics_of_all_logits_go_with_one_chunk_alone(tmp_path):
    trainer = Trainer(
        LM(), mem_limit="2GB", method="full", loss_chunks=2, batch_size=4, quiet=True, output_dir=tmp_path / "run"
    )
    with pytest.raises(OptionError, match="compute_metrics takes all logits"):
        trainer.fit(rows(), rows(), compute_metrics=lambda outputs, labels: {})
    with pytest.raises(OptionError, match="compute_metrics takes all logits"):
        trainer.evaluate(rows(), compute_metrics=lambda outputs, labels: {})


@pytest.mark.parametrize("asked", [0, -1, "few"])
def test_a_number_of_chunks_that_is_none_is_refused(asked):
    with pytest.raises(OptionError, match="loss_chunks: expected auto or a number from 1 up; found"):
        Trainer(LM(), mem_limit="2GB", method="full", loss_chunks=asked)
