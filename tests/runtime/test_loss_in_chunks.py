"""Language models whose head and loss go over chunks of positions have the bits of a plain loop over the same chunks."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seqpart import Trainer
from seqpart.device.device import Device
from seqpart.device.limit import measure_runtime
from seqpart.errors import DoesNotFit, OptionError
from seqpart.plan.plan import Plan
from seqpart.verify.verification import verify
from tests.exactly import FULL, HOWS, Trained, first_difference, tokens
from tests.resuming import Killed, Stopping, kill

CHUNKS, VOCABULARY, POSITIONS, ROWS = 3, 61, 7, 10


class LM(nn.Module):
    """A small language model whose output may share its embedding's weight."""

    def __init__(self, *, tied=False, vocabulary=VOCABULARY, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def states(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.norm(hidden)

    def forward(self, tokens):
        return self.head(self.states(tokens))


class ByFunction(LM):
    """Multiplies by the embedding's weight in a call that is no module's."""

    def __init__(self):
        super().__init__()
        self.head = nn.Identity()

    def forward(self, tokens):
        return F.linear(self.states(tokens), self.embedding.weight)


def own_by_function():
    torch.manual_seed(1)
    return ByFunction()


def own(**options):
    torch.manual_seed(1)
    return LM(**options)


def of_transformers(kind, **options):
    import transformers

    torch.manual_seed(1)
    small = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, **options}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "attn_implementation": "eager"}
    if kind == "GPT2":
        small |= {"n_positions": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**small)
    )


def body_of(model, x):
    """The states before the head, by the model's own parts."""
    if isinstance(model, LM):
        return model.states(x)
    return model.base_model(x, use_cache=False)[0]


def capped(model, scores):
    if (most := getattr(getattr(model, "config", None), "final_logit_softcapping", None)) is not None:
        scores = torch.tanh(scores / most) * most
    return scores.float()


def plain(model, x, y, *, epochs=2, batch=4, micro_batch=2, narrow=False):
    """The loop of docs/limits_and_plans.md, by accumulated gradients."""
    model.train()
    shifted = not isinstance(model, LM)
    head = model.get_output_embeddings() if shifted else model.head
    head = (lambda x: F.linear(x, model.embedding.weight)) if isinstance(model, ByFunction) else head
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        for rows, labels in zip(x.split(batch), y.split(batch), strict=True):
            optimizer.zero_grad()
            counted = 0
            for ids, own in zip(rows.split(micro_batch), labels.split(micro_batch), strict=True):
                own = F.pad(own, (0, 1), value=-100)[:, 1:] if shifted else own
                with torch.autocast("cpu", torch.bfloat16, enabled=narrow, cache_enabled=False):
                    states, targets = body_of(model, ids).flatten(0, 1), own.flatten()
                    parts = zip(states.chunk(CHUNKS), targets.chunk(CHUNKS), strict=True)
                    sums = [F.cross_entropy(capped(model, head(one)), own, reduction="sum") for one, own in parts]
                    count = (targets != -100).sum()
                    loss = sum(sums) / count.clamp(min=1)
                (loss if len(rows) == micro_batch else loss * (count.item() / len(rows))).backward()
                counted += count.item()
            for parameter in model.parameters() if len(rows) > micro_batch else ():
                parameter.grad.mul_(len(rows) / counted)
            optimizer.step()
    return model


def rows():
    """Tokens and their labels, of which many do not count: in rows 4 and 5 none, so that a micro-batch has none."""
    torch.manual_seed(2)
    x, y = (torch.randint(VOCABULARY, (ROWS, POSITIONS)) for _ in range(2))
    y[1, 2:], y[4], y[5], y[8, ::2] = -100, -100, -100, -100
    return x, y


def trainer(folder, model, **options):
    options = {
        "mem_limit": "2GB", "method": "streamed", "partitions": 3, "epochs": 2, "batch_size": 4, "micro_batch_size": 2,
        "optimizer": "sgd", "lr": 1e-2, "shuffle": False, "loss_chunks": CHUNKS, **options,
    }  # fmt: skip
    loss = options.pop("loss", None if isinstance(model, LM) else "model")
    return Trainer(model, loss, output_dir=folder / "run", quiet=True, **options)


def assert_equal(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


MODELS = {
    "own": own,
    "own, tied": lambda: own(tied=True),
    "own, by a function": own_by_function,
    "GPT-2, tied": lambda: of_transformers("GPT2"),
    "Llama": lambda: of_transformers("Llama"),
    "Qwen3, tied": lambda: of_transformers("Qwen3", tie_word_embeddings=True),
    "Gemma 2, capped": lambda: of_transformers("Gemma2"),
}


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(6)
def test_a_language_model_has_the_bits_of_a_plain_loop_over_the_same_chunks(name, dtype, tmp_path):
    model = MODELS[name]()
    expected = plain(copy.deepcopy(model), *rows(), narrow=dtype == "bf16")
    result = trainer(tmp_path, model, dtype=dtype).fit(rows(), rows())
    assert len(result.plan.partitions) == 3 and result.plan.loss_chunks == CHUNKS
    assert_equal(model, expected)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return arms(patch, tmp_path_factory.mktemp("whole")).run(FULL)


def arms(patch, folder):
    return Trained(
        patch, folder, lambda: own(tied=True), tokens(vocabulary=VOCABULARY), loss_chunks=CHUNKS, partitions=(0, 1, 3)
    )


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.few(4)
def test_every_way_gives_the_bits_of_whole_training_over_the_same_chunks(how, whole, monkeypatch, tmp_path):
    assert first_difference(arms(monkeypatch, tmp_path).run(how), whole) is None


@pytest.mark.usefixtures("known_machine")
def test_accuracy_and_loss_are_those_of_all_logits(tmp_path):
    model, (x, y) = own(), rows()
    result = trainer(tmp_path, model).fit((x, y), (x, y))
    with torch.no_grad():
        scores = model(x).flatten(0, 1)
    counts = y.flatten() != -100
    assert result.accuracy == ((scores.argmax(1) == y.flatten()) & counts).sum().item() / counts.sum().item()
    assert result.test_loss == pytest.approx(F.cross_entropy(scores, y.flatten()).item(), rel=1e-5)
    found = trainer(tmp_path, model).evaluate((x, y))
    assert (found.accuracy, found.loss) == (result.accuracy, pytest.approx(result.test_loss, rel=1e-6))


@pytest.mark.usefixtures("known_machine")
def test_one_chunk_is_the_training_without_any(tmp_path):
    found = []
    for number, options in enumerate(({"loss_chunks": 1}, {"loss_chunks": "auto"})):
        model = own()
        result = trainer(tmp_path / str(number), model, **options).fit(rows(), rows())
        assert result.plan.loss_chunks == 1 and len(result.plan.partitions) == 3
        found.append(model)
    assert_equal(*found)


@pytest.mark.usefixtures("known_machine")
def test_a_killed_run_goes_on_with_the_chunks_that_it_had(tmp_path):
    model = own(tied=True)
    with pytest.raises(Killed):
        trainer(tmp_path, model, save_every=1).fit(rows(), rows(), reporter=Stopping(25, kill))
    with pytest.raises(OptionError, match="loss_chunks was 3, not 2"):
        trainer(tmp_path, own(tied=True), save_every=1, loss_chunks=2).fit(rows(), rows(), resume=tmp_path / "run")
    again = own(tied=True)
    trainer(tmp_path, again, save_every=1).fit(rows(), rows(), resume=tmp_path / "run")
    assert_equal(again, plain(own(tied=True), *rows()))


@pytest.mark.usefixtures("known_machine")
def test_a_plan_that_was_saved_brings_its_chunks(tmp_path):
    plan = trainer(tmp_path, own()).plan(rows())
    saved = Plan.from_json(plan.to_json(), "a file")
    assert saved == plan and saved.loss_chunks == CHUNKS
    assert any("head and the loss go over 3 chunks" in reason for reason in plan.reasons)
    with pytest.raises(OptionError, match="a loss over 3 chunk"):
        trainer(tmp_path, own(), loss_chunks=1).plan(rows(), reuse=saved)
    assert trainer(tmp_path, own(), loss_chunks="auto").plan(rows(), reuse=saved).loss_chunks == CHUNKS


@pytest.mark.usefixtures("known_machine")
def test_a_step_of_a_session_has_the_bits_of_the_plain_loop(tmp_path):
    model, (x, y) = own(), rows()
    expected = plain(copy.deepcopy(model), x, y, epochs=1)
    options = {"epochs": 3, "shuffle": "auto"}
    with trainer(tmp_path, model, **options).session((x, y)) as session:
        for ids, labels in zip(x.split(4), y.split(4), strict=True):
            session.step((ids, labels))
    assert_equal(model, expected)


@pytest.mark.slow
def test_training_over_chunks_is_verified(tmp_path):
    options = {"batch_size": 4, "partitions": 3, "loss_chunks": CHUNKS, "offload_dir": tmp_path / "scratch"}
    found = verify(own(tied=True), rows(), mem_limit="3GB", **options)
    assert found.plan.loss_chunks == CHUNKS and found.unlike == "the loss is computed over chunks of positions"


# --- when nothing fits otherwise --------------------------------------------------------------------------------------

LARGE, LONG = 128_256, 2048


@pytest.mark.slow
@pytest.mark.own_process
def test_a_vocabulary_of_128_k_trains_under_a_limit_that_its_logits_would_pass(tmp_path):
    gc.collect()
    limit = measure_runtime(Device()) + (300 << 20)
    model = of_transformers("Llama", vocab_size=LARGE, hidden_size=32, max_position_embeddings=LONG)
    x = torch.randint(LARGE, (1, LONG))
    options = {
        "mem_limit": limit,
        "method": "auto",
        "partitions": "auto",
        "epochs": 1,
        "batch_size": 1,
        "micro_batch_size": None,
    }
    assert limit < LARGE * LONG * 4, "bytes of a row's logits"
    with pytest.raises(DoesNotFit):
        trainer(tmp_path / "1", model, loss_chunks=1, tile="never", **options).plan((x, x))
    result = trainer(tmp_path / "2", model, loss_chunks="auto", **options).fit((x, x))
    assert result.proof.violations == 0 and result.plan.loss_chunks > 1
    assert 0.95 * result.plan.peak <= result.proof.peak <= 1.01 * result.plan.peak
