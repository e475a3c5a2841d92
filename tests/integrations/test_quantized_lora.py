"""A Llama of transformers in 4 or 8 bits by bitsandbytes, and a LoRA of peft over it, under the limit."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from seqpart import Trainer
from seqpart.errors import ModelError
from seqpart.model.quantized import plain_tensors
from seqpart.verify import verify
from tests.choice import only_quick
from tests.methods.test_adapters import BATCH, EPOCHS, plain, scores, text, trained
from tests.model.test_quantized import load_state, other_bits

bnb = pytest.importorskip("bitsandbytes", reason="quantized weights need it: pip install bitsandbytes")
peft = pytest.importorskip("peft", reason="adapters of peft need it: pip install peft")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.usefixtures("known_machine"),
    pytest.mark.filterwarnings(
        "ignore:`(is_gradient_checkpointing|gradient_checkpointing_enable)` is deprecated:FutureWarning"
    ),
    pytest.mark.filterwarnings("ignore:torch.utils.checkpoint. the use_reentrant parameter:UserWarning"),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(6)
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def base(directory, *, dtype=torch.float32, **options):
    options = options or {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    if "load_in_4bit" in options:
        options["bnb_4bit_compute_dtype"] = dtype
    config = transformers.BitsAndBytesConfig(**options)
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=config, dtype=dtype, device_map="cpu"
    )


def adapted(directory, *, prepared=None, lora=None, **options):
    model = base(directory, **options)
    if prepared is not None:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=prepared)
    torch.manual_seed(7)
    config = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **(lora or {})}
    model = peft.get_peft_model(model, peft.LoraConfig(**config))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model.train()


MODELS = {
    "nf4": {},
    "nf4 in bfloat16, queries and values": {"dtype": torch.bfloat16, "lora": {"target_modules": ["q_proj", "v_proj"]}},
    "nf4, prepared by peft with checkpoints": {"prepared": True},
    "8 bits": {"load_in_8bit": True},
}


@pytest.mark.parametrize("name", only_quick(MODELS, ["nf4, prepared by peft with checkpoints"]))
@pytest.mark.few(1)
def test_a_lora_over_a_quantized_base_has_the_bits_of_a_plain_loop(name, directory, tmp_path):
    expected = plain(adapted(directory, **MODELS[name])).state_dict()
    for method in ("streamed", "checkpointed", "full"):
        options = {"method": method} | ({} if method == "streamed" else {"partitions": "auto"})
        result = trained(tmp_path / method, adapted(directory, **MODELS[name]), **options)
        assert not other_bits(load_file(result.weights), expected), method


@pytest.mark.slow
def test_the_adapter_alone_is_written_and_gives_the_same_over_the_same_base(directory, tmp_path):
    model = adapted(directory)
    trained(tmp_path / "run", model).save_adapter(tmp_path / "adapter")
    assert all("lora_" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    loaded, x = peft.PeftModel.from_pretrained(base(directory), tmp_path / "adapter").train(), text()[0]
    looped = plain(adapted(directory))
    with torch.no_grad():
        found, expected = loaded(input_ids=x).logits, looped(input_ids=x).logits
        assert torch.equal(found, expected) and torch.equal(model(input_ids=x).logits, expected)
    with pytest.warns(UserWarning, match="due to rounding errors"):  # it merges as one that was trained elsewhere
        ours, theirs = model.merge_and_unload().state_dict(), looped.merge_and_unload().state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("name", ["nf4", "8 bits"])
@pytest.mark.few(1)
def test_what_save_pretrained_writes_loads_as_a_quantized_model(name, directory, tmp_path):
    model = normed(directory, **MODELS[name])
    before = load_state(model)
    trained(tmp_path / "run", model).save_pretrained(tmp_path / "saved")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", device_map="cpu").train()
    x = text()[0]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=x).logits, model.train()(input_ids=x).logits)
    after = load_state(loaded)
    changed = {own for own in before if not torch.equal(before[own], after[own])}
    assert changed == {own for own in before if "norm" in own}


@pytest.mark.slow
def test_averages_and_plans_are_as_with_any_adapter(directory, tmp_path):
    """EMA, a plan that is carried out again, evaluation before and after, a loop of one's own."""
    model = adapted(directory)
    result = trained(tmp_path / "first", model, ema=0.5)
    result.save_adapter(tmp_path / "average", average=True)
    assert all("lora_" in name for name in load_file(tmp_path / "average" / "adapter_model.safetensors"))
    options = {"method": "streamed", "partitions": 3, "mem_limit": "2GB", "batch_size": BATCH, "micro_batch_size": BATCH}
    options |= {"lr": 1e-2, "shuffle": False, "quiet": True}
    trainer = Trainer(adapted(directory), epochs=EPOCHS, output_dir=tmp_path / "again", **options)
    plan = trainer.plan(text(), text())
    before = trainer.evaluate(text())
    again = trainer.fit(text(), text(), reuse=plan)
    assert torch.equal(load_file(again.weights)["base_model.model.model.norm.weight"], torch.ones(64))
    assert not other_bits(load_file(again.weights), load_file(result.weights))
    assert trainer.evaluate(text()).loss == again.test_loss != before.loss
    model, (x, y) = adapted(directory), text()
    with Trainer(model, max_steps=EPOCHS * 2, **options).session(text()) as session:
        for start in [0, BATCH] * EPOCHS:
            session.step((x[start : start + BATCH], y[start : start + BATCH]))
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in plain(adapted(directory)).state_dict().items())


@pytest.mark.slow
def test_verify_compares_every_tensor_of_a_quantized_model(directory, tmp_path):
    model = adapted(directory, lora={"target_modules": ["q_proj", "down_proj"]})
    options = {"mem_limit": "2GB", "method": "streamed", "partitions": 3, "batch_size": BATCH, "micro_batch_size": 4}
    found = verify(model, text(), scores, steps=1, epochs=EPOCHS, offload_dir=tmp_path, **options)
    assert "equals full, bit for bit" in str(found) and found.caught
    first = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    assert isinstance(first, bnb.nn.Linear4bit) and first.weight.quant_state.absmax.numel() == 64


def normed(directory, **options):
    """A base of which the norms learn."""
    model = base(directory, **options)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return model.train()


@pytest.mark.slow
def test_autocast_is_that_of_a_plain_loop(directory, tmp_path):
    model, (x, y) = normed(directory), text()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0, fused=True)
    for start in [0, BATCH] * EPOCHS:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            loss = scores(model(input_ids=x[start : start + BATCH], use_cache=False).logits, y[start : start + BATCH])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    result = trained(tmp_path / "run", normed(directory), dtype="bf16")
    assert not other_bits(load_file(result.weights), model.state_dict())


def test_an_adapter_that_needs_the_norms_of_whole_weights_is_refused(directory):
    with pytest.raises(ModelError, match=r"q_proj\.base_layer is quantized, and its adapter \(use_dora=True\)"):
        plain_tensors(adapted(directory, lora={"use_dora": True}), "cpu").__enter__()
