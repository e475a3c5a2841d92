"""A frozen network with an adapter that learns: what is frozen has no gradient and no optimizer home, and never goes home."""

import functools
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from seqpart import Trainer
from seqpart.capture.capture import chain_of
from seqpart.errors import ModelError, OptionError
from seqpart.profile.blocks import measure_chain
from seqpart.profile.partition import prefix_costs, state_layouts
from seqpart.report.reporter import Reporter
from seqpart.schedule.steps import StepDone, Verb
from tests.exactly import numbers

BATCH, EPOCHS = 8, 2

pytestmark = [
    pytest.mark.usefixtures("known_machine"),
    pytest.mark.filterwarnings(
        "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
    ),  # peft asks transformers for it
]


class Steps(Reporter):
    """What every step read and wrote."""

    def __init__(self):
        super().__init__(quiet=True)
        self.done = []

    def listen(self, event):
        super().listen(event)
        if isinstance(event, StepDone):
            self.done.append(event)

    def written(self):
        return sum(event.bytes_written for event in self.done if event.step.verb is Verb.DROP)


WIDTH = 64


def layers(frozen):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, 4))
    for number in frozen:
        model[number].requires_grad_(False)
    return model


@settings(max_examples=3)
@given(st.sets(st.integers(0, 5), max_size=5))
def test_frozen_blocks_have_no_state_no_gradient_and_are_never_written_back(tmp_path_factory, frozen):
    steps = Steps()
    model = layers(frozen)
    sizes = [sum(4 * parameter.numel() for parameter in layer.parameters()) for layer in model]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = Trainer(
        model, None, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), mem_limit="2GB", method="streamed",
        partitions=(0, 3), batch_size=BATCH, epochs=EPOCHS, quiet=True, output_dir=tmp_path_factory.mktemp("run") / "a",
    )  # fmt: skip
    visited = []
    result = trainer.fit(*numbers((6,)), reporter=steps, before_update=lambda partition, step: visited.append(partition))
    learn = [number for number in range(6) if number not in frozen]
    assert (result.plan.parameters, result.plan.frozen) == tuple(
        sum(sizes[number] // 4 for number in some) for some in (learn, frozen)
    )
    assert sum(part.state for part in result.plan.partitions) == sum(sizes[number] for number in learn)
    found = load_file(result.weights)
    for number in range(6):
        same = torch.equal(found[f"{number}.weight"], before[f"{number}.weight"])
        assert same == (number in frozen)
    # Each time that a partition goes home its layers that learn go, and their momentum while there is more to learn.
    drops = [event for event in steps.done if event.step.verb is Verb.DROP and event.bytes_written]
    allowed = [2 * sum(sizes[n] for n in learn if n in part) for part in (range(3), range(3, 6))]
    assert all(event.bytes_written <= allowed[event.step.partition] for event in drops)
    assert steps.written() <= (len(drops) or 0) * max(allowed)


def test_what_goes_home_is_what_the_plan_counts(tmp_path):
    """Of a network whose blocks all learn, and of one with a single block that does: 5 blocks of 6 are not written."""
    written = {}
    for frozen in ((), (0, 1, 2, 3, 4)):
        steps = Steps()
        trainer = Trainer(
            layers(frozen), None, "sgd", mem_limit="2GB", method="streamed", partitions=(0, 3), batch_size=BATCH, epochs=EPOCHS,
            quiet=True, output_dir=tmp_path / str(len(frozen)),
        )  # fmt: skip
        trainer.fit(*numbers((6,)), reporter=steps)
        written[len(frozen)] = steps.written()
    last = 4 * (WIDTH * 4 + 4)
    assert written[5] % last == 0 and 0 < written[5] < written[0] / 20


class Layers(nn.Module):
    """The same with a forward of its own, so that it is seen through which values gradients come back."""

    def __init__(self, frozen):
        super().__init__()
        self.layers = nn.ModuleList(layers(frozen))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@settings(max_examples=8)
@given(st.sets(st.integers(0, 5)))
def test_a_kept_graph_holds_what_layers_that_learn_took_at_every_cut(frozen):
    """Beyond its boundaries. What passes between frozen layers in front of all that learns dies, and was taken off all the
    same: less than nothing was left, and what a layer that learns keeps of it was not counted."""
    chain = chain_of(Layers(frozen), (6,), torch.float32)
    costs = measure_chain(chain, (6,), BATCH)
    first_frozen = frozen == set(range(len(frozen)))
    for first in range(6):
        found = list(prefix_costs(costs[first:], state_layouts((), costs[first:], None), lambda _: (0, 0)))
        for last, cost in enumerate(found, first):
            taken = sum(4 * BATCH * WIDTH for number in range(first + 1, last + 1) if number not in frozen)
            assert cost.kept == taken if first_frozen else cost.kept >= taken, (first, last)


# --- peft ------------------------------------------------------------------------------------------------------------

peft = pytest.importorskip("peft", reason="adapters of peft need it: pip install peft")
transformers = pytest.importorskip("transformers")


def llama():
    torch.manual_seed(6)
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def adapted(*, dtype=torch.float32, **options):
    torch.manual_seed(7)
    base, config = llama().to(dtype), {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **options}
    model = peft.get_peft_model(base, peft.LoraConfig(**config))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros, behind which lora_A has no gradient in its first step
            nn.init.normal_(parameter, std=0.02)
    return model


def text(rows=16, context=8):
    found = torch.randint(1, 31, (rows, context + 1), generator=torch.Generator().manual_seed(1))
    return found[:, :-1], found[:, 1:]


def scores(output, labels):
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def plain(model, autocast=None):
    x, y = text()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0, fused=True)
    for _ in range(EPOCHS):
        for start in range(0, len(x), BATCH):
            with torch.autocast("cpu", autocast, enabled=autocast is not None, cache_enabled=False):
                loss = scores(model(input_ids=x[start : start + BATCH], use_cache=False).logits, y[start : start + BATCH])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def trained(folder, model, **options):
    trainer = Trainer(
        model, mem_limit="2GB", batch_size=BATCH, micro_batch_size=BATCH, epochs=EPOCHS, lr=1e-2, shuffle=False,
        output_dir=folder, **{"method": "streamed", "partitions": 3, "quiet": True, **options},
    )  # fmt: skip
    return trainer.fit(text(), text())


MODELS = {
    "queries and values": {},
    "all linear layers": {"target_modules": "all-linear"},
    "the head is trained whole": {"modules_to_save": ["lm_head"]},
    "a base in bfloat16": {"dtype": torch.bfloat16},
    "rank-stabilized, biases": {"use_rslora": True, "bias": "lora_only"},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(1)
def test_a_lora_has_the_bits_of_a_plain_loop_and_its_base_those_it_had(name, tmp_path):
    build = functools.partial(adapted, **MODELS[name])
    expected, model = plain(build()).state_dict(), build()
    learn = [tensor.numel() for tensor in model.parameters() if tensor.requires_grad]
    result = trained(tmp_path / "run", model)
    assert result.plan.parameters == sum(learn)
    assert result.plan.parameters + result.plan.frozen == sum(parameter.numel() for parameter in build().parameters())
    found = load_file(result.weights)
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    assert sum(part.state for part in result.plan.partitions) <= 2 * 4 * (sum(learn) + len(learn))


@pytest.mark.parametrize("name", ["queries and values", "a base in bfloat16"])
@pytest.mark.few(1)
def test_under_autocast_too(name, tmp_path):
    """peft casts its sum to the type that the base gives, and that was noted without autocast: float32 instead of bfloat16."""
    build = functools.partial(adapted, **MODELS[name])
    expected = plain(build(), torch.bfloat16).state_dict()
    found = load_file(trained(tmp_path / "run", build(), dtype="bf16").weights)
    assert [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)] == []


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(1)
def test_the_adapter_alone_is_what_pefts_own_save_writes_and_loads_onto_the_base(name, tmp_path):
    model = adapted(**MODELS[name])
    result = trained(tmp_path / "run", model)
    result.save_adapter(tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    ours, theirs = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    base = llama().to(MODELS[name].get("dtype", torch.float32))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    x, _ = text()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=x).logits, model.eval()(input_ids=x).logits)


def on_meta(model):
    """The base as parameters_on_meta makes it, with the adapter's own values."""
    values = {name: tensor for name, tensor in model.named_parameters() if "lora_" in name}
    for name, tensor in list(model.named_parameters()):
        if name not in values:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, nn.Parameter(tensor.detach().to("meta"), tensor.requires_grad))
    return model


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (number not in (0, 2))) for number, name in enumerate(MODELS)]
)
@pytest.mark.few(1)
def test_an_adapter_learns_to_the_same_bits_on_a_base_that_comes_from_its_files_and_never_exists_whole(name, tmp_path, capsys):
    """Names in a peft model are others than in the files of its base: nothing but a base in memory could be adapted."""
    expected, model = adapted(**MODELS[name]), on_meta(adapted(**MODELS[name]))
    llama().to(MODELS[name].get("dtype", torch.float32)).save_pretrained(tmp_path / "base")
    capsys.readouterr()
    result = trained(tmp_path / "run", model, weights=tmp_path / "base", quiet=False)
    assert "as initialized, since they are an adapter's own: base_model.model" in capsys.readouterr().out
    ours, theirs = result.state_dict(), trained(tmp_path / "plain", expected).state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_base_that_lacks_tensors_is_refused_and_the_adapter_is_not_among_them(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    tensors["lm_hat.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"missing: base_model\.model\.lm_head\.weight; not in the model: lm_hat\.weight\. With"
    ):
        trained(tmp_path / "run", on_meta(adapted()), weights=tmp_path / "base")


@pytest.mark.parametrize("micro_batch_size", [64, pytest.param(8, marks=pytest.mark.slow)])
def test_all_linear_layers_are_planned_at_every_cut(micro_batch_size, tmp_path):
    """What a graph holds beyond its boundaries was less than nothing where frozen layers come first, and planning failed."""
    trainer = Trainer(
        adapted(target_modules="all-linear"), mem_limit="2GB", method="auto", batch_size=64, micro_batch_size=micro_batch_size,
        quiet=True, output_dir=tmp_path / "run",
    )  # fmt: skip
    assert trainer.plan(text(64), text(64)).peak < 2e9


@pytest.mark.slow
def test_the_base_is_not_written_back(tmp_path):
    written = {}
    for name, build in (("whole", llama), ("adapted", adapted)):
        steps = Steps()
        trainer = Trainer(
            build(), None, "sgd", mem_limit="2GB", method="streamed", partitions=3, batch_size=BATCH, epochs=EPOCHS, quiet=True,
            output_dir=tmp_path / name,
        )  # fmt: skip
        trainer.fit(text(), text(), reporter=steps)
        written[name] = steps.written()
    share = sum(p.numel() for p in adapted().parameters() if p.requires_grad) / sum(p.numel() for p in llama().parameters())
    assert 0 < written["adapted"] <= 1.5 * share * written["whole"]


@pytest.mark.slow
def test_with_ema_the_averaged_adapter_may_be_written(tmp_path):
    result = trained(tmp_path / "run", adapted(), ema=0.5)
    result.save_adapter(tmp_path / "average", average=True)
    result.save_adapter(tmp_path / "last")
    averaged, last = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("average", "last"))
    assert averaged.keys() == last.keys() and not any(torch.equal(averaged[key], last[key]) for key in last)


def test_a_model_without_an_adapter_has_none_to_write(tmp_path):
    result = Trainer(layers(()), mem_limit="2GB", method="full", epochs=1, quiet=True, output_dir=tmp_path / "run").fit(
        *numbers((6,))
    )
    with pytest.raises(OptionError, match="expected a run of a peft model"):
        result.save_adapter(tmp_path / "adapter")
    with pytest.raises(OptionError, match="the run had no average"):
        result.save_adapter(tmp_path / "adapter", average=True)


def test_an_adapter_that_is_there_for_a_layer_s_call_alone_is_refused_and_not_left_out(tmp_path):
    """Its base was cut out of it and ran alone: nothing learned, and nothing was said."""
    peft = pytest.importorskip("peft")
    base = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=[], target_parameters=["0.weight"]))
    with pytest.raises(ModelError, match="peft's target_parameters"):
        Trainer(model, mem_limit="2GB", method="full", epochs=1, quiet=True, output_dir=tmp_path / "run").fit(*numbers((6,)))


PAGE = (Path(__file__).parents[2] / "docs/adapters.md").read_text()


@pytest.mark.parametrize("number", range(PAGE.count("```python")))
@pytest.mark.few(1)
def test_the_page_about_adapters_runs_as_printed(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    snippet = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[number]
    if quantized := "BitsAndBytesConfig" in snippet:
        pytest.importorskip("bitsandbytes", reason="quantized weights need it: pip install bitsandbytes")
    exec(snippet, {})
    said = capsys.readouterr().out
    assert "parameters that learn, and" in said and ("of the frozen weights in 4 bits (nf4), in 14 layers" in said) is quantized
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {"adapter_model.safetensors", "adapter_config.json"}
