"""A Llama (or any causal model of transformers) from its directory, fine-tuned on a text under a limit: whole, or by LoRA.

    python examples/finetune_llama_from_directory.py [--lora | --nf4]                                  # tiny; a minute
    python examples/finetune_llama_from_directory.py --full --model DIR --data FILE [--lora | --nf4]   # at full size

DIR is what save_pretrained writes or a hub's repository holds: config.json, safetensors, tokenizer.json. FILE is a text, whose
last tenth is the test split. The model never exists whole: its weights go from their files to the disk one by one. It is
trained in float32; with --lora it is frozen in the type of its files, and float32 adapters learn. With --nf4 the base is in 4
bits, and in memory, packed, when the run begins. Needs transformers, and peft, and bitsandbytes for --nf4.
"""

import argparse
import warnings
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from seqpart import Trainer, parameters_on_meta
from seqpart.zoo import tokenized

try:
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
except ImportError:
    raise SystemExit("this example needs transformers: pip install transformers") from None


def make(folder: Path) -> tuple[Path, Path]:
    """(the directory of a Llama that knows nothing, a text of sums), small ones."""
    from tokenizers import ByteLevelBPETokenizer

    text = folder / "sums.txt"
    folder.mkdir(parents=True, exist_ok=True)
    text.write_text("".join(f"{n % 20} and {n * 7 % 20} is {n % 20 + n * 7 % 20}.\n" for n in range(1500)))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(text)], vocab_size=320, show_progress=False)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip
    model.save_pretrained(folder / "tiny-llama")
    tokenizer.save(str(folder / "tiny-llama/tokenizer.json"))
    return folder / "tiny-llama", text


def with_lora(base: nn.Module, rank: int) -> nn.Module:
    """What learns are two matrices beside each linear layer."""
    try:
        from peft import LoraConfig

        from seqpart.integrations.peft import get_peft_model
    except ImportError:
        raise SystemExit("--lora and --nf4 need peft: pip install peft") from None

    warnings.filterwarnings("ignore", category=FutureWarning)  # of what peft asks transformers for
    return get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def in_4_bits(folder: Path) -> nn.Module:
    """The base as QLoRA has it: https://arxiv.org/abs/2305.14314."""
    if find_spec("bitsandbytes") is None:
        raise SystemExit("--nf4 needs bitsandbytes: pip install bitsandbytes")
    bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    found: nn.Module = AutoModelForCausalLM.from_pretrained(folder, quantization_config=bits, device_map="cpu")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="rows of 512 tokens, 16 an update; needs --model and --data")
    parser.add_argument("--model", type=Path, help="the directory of a model; default: a tiny one is made")
    parser.add_argument("--data", type=Path, help="a text; default: one is made")
    adapters = parser.add_mutually_exclusive_group()
    adapters.add_argument("--lora", action="store_true", help="let adapters learn, and write them alone")
    adapters.add_argument("--nf4", action="store_true", help="the same over a base in 4 bits")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--mem-limit", help="default: 700MB, and 4GB with --full")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/llama"))
    arguments = parser.parse_args()
    if arguments.full and not (arguments.model and arguments.data):
        parser.error("--full needs --model DIR and --data FILE")

    made = (None, None) if arguments.model and arguments.data else make(Path("runs/llama-made"))
    folder, text = arguments.model or made[0], arguments.data or made[1]
    train, test = tokenized.load(text, folder, 512 if arguments.full else 16)
    torch.manual_seed(0)
    config, adapted = AutoConfig.from_pretrained(folder), arguments.lora or arguments.nf4
    if arguments.nf4:
        model = in_4_bits(folder)
    else:
        with parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, dtype=config.dtype if adapted else torch.float32)
    if adapted:
        model = with_lora(model, arguments.rank)
    lr = (2e-4 if adapted else 2e-5) if arguments.full else (1e-2 if adapted else 3e-3)
    trainer = Trainer(
        model, mem_limit=arguments.mem_limit or ("4GB" if arguments.full else "700MB"), method="auto",
        weights=None if arguments.nf4 else folder,
        optimizer="adamw", lr=lr, lr_schedule="cosine", warmup_updates=10, clip_grad_norm=1.0,
        dtype="bf16" if arguments.full else "fp32", epochs=arguments.epochs or (1 if arguments.full else 4), batch_size=16,
        output_dir=arguments.output_dir, overwrite=True,
    )  # fmt: skip
    before = trainer.evaluate(test)
    result = trainer.fit(train, test)
    print(f"{result.plan.parameters} parameters learn, {result.plan.frozen} are frozen")
    print(f"test loss {before.loss:.4f} before, {result.test_loss:.4f} afterwards")
    if adapted:
        result.save_adapter(arguments.output_dir / "adapter")
        print(f"the adapter alone, for PeftModel.from_pretrained: {arguments.output_dir / 'adapter'}")
    else:
        result.save_pretrained(arguments.output_dir / "pretrained")
        print(f"weights, configuration and tokenizer, for from_pretrained: {arguments.output_dir / 'pretrained'}")


if __name__ == "__main__":
    main()
