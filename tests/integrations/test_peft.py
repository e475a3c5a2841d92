"""peft's adapters on a base that never exists whole: in memory, as peft itself initializes them."""

import pytest
import torch

from seqpart import Trainer, parameters_on_meta
from seqpart.errors import ModelError

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from seqpart.integrations.peft import get_peft_model  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("known_machine"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

CONFIG = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
ADAPTERS = {
    "lora of all linear layers": lambda: peft.LoraConfig(target_modules="all-linear"),
    "lora, gaussian": lambda: peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="gaussian"),
    "lora of embeddings": lambda: peft.LoraConfig(target_modules=["q_proj", "embed_tokens"]),
    "ia3": lambda: peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": lambda: peft.LoHaConfig(target_modules=["q_proj"]),
    "oft": lambda: peft.OFTConfig(target_modules=["q_proj"], oft_block_size=8),
    "vera": lambda: peft.VeraConfig(target_modules=["q_proj"]),
    "prompts": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


def llama(dtype=torch.float32):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).to(dtype)


def on_meta(dtype=torch.float32):
    with parameters_on_meta():
        return llama(dtype)


def learning(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_on_a_base_without_values_is_what_peft_makes_on_one_with_values(name, dtype):
    """peft moved it to the meta device, and four lines of its inside, for LoRA alone, had to make it anew."""
    found = []
    for make, base in ((get_peft_model, on_meta(dtype)), (peft.get_peft_model, llama(dtype))):
        torch.manual_seed(1)
        found.append(learning(make(base, ADAPTERS[name]())))
    ours, theirs = found
    assert ours.keys() == theirs.keys() and ours
    assert all(not ours[key].is_meta and ours[key].dtype == theirs[key].dtype for key in ours)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("saved", [None, ["lm_head"]], ids=["the adapter alone", "with a layer of the base"])
@pytest.mark.few(1)
def test_it_learns_to_the_same_bits_and_the_base_stays_without_memory(saved, tmp_path):
    llama().save_pretrained(tmp_path / "base")
    text = torch.randint(0, 64, (32, 17), generator=torch.Generator().manual_seed(2))
    weights = []
    for make, base, options in (
        (get_peft_model, on_meta(), {"weights": tmp_path / "base"}), (peft.get_peft_model, llama(), {}),
    ):  # fmt: skip
        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules="all-linear", modules_to_save=saved, task_type="CAUSAL_LM")
        model = make(base, config)
        trainer = Trainer(
            model, mem_limit="2GB", method="full", epochs=1, quiet=True, output_dir=tmp_path / make.__module__, **options
        )
        weights.append(trainer.fit((text[:, :-1], text[:, 1:])).state_dict())
        assert options == {} or base.get_input_embeddings().weight.is_meta
    ours, theirs = weights
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"init_lora_weights": "pissa"}], ids=str)
def test_an_adapter_that_is_made_of_the_base_is_refused_where_the_base_has_no_values(options):
    with pytest.raises(ModelError, match=r"for a base without values: .* or a base that is in memory\."):
        get_peft_model(on_meta(), peft.LoraConfig(target_modules=["q_proj"], **options))
    assert learning(get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], **options)))


def test_a_mistake_that_has_nothing_to_do_with_the_base_is_pefts_own():
    with pytest.raises(ValueError, match="nowhere"):
        get_peft_model(on_meta(), peft.LoraConfig(target_modules=["nowhere"]))


def test_a_model_of_peft_without_a_task_has_the_loss_of_its_base(tmp_path):
    """Its forward takes anything, (*args, **kwargs): it was refused as one that takes no `labels`."""
    model = get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    tokens = torch.randint(0, 64, (8, 6))
    before = {name: one.detach().clone() for name, one in learning(model).items()}
    trainer = Trainer(
        model, "model", lambda found: torch.optim.SGD(found, lr=0.1), mem_limit="2GB", method="full", batch_size=4, epochs=1,
        output_dir=tmp_path / "run", quiet=True, shuffle=False,
    )  # fmt: skip
    trainer.fit((tokens, tokens))
    plain = get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    plain.load_state_dict(before, strict=False)
    optimizer = torch.optim.SGD(learning(plain).values(), lr=0.1)
    for rows in tokens.split(4):
        plain(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(one, learning(model)[name]) for name, one in learning(plain).items())
