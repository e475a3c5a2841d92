"""A Llama whose logits would pass the limit: its head and loss go over chunks of positions.

    python -m benchmarks.long_logits [--positions 8192] [--mem-limit 1.2GB] [--width 64]

128,256 tokens, two layers, one row a batch, random tokens: two updates by whatever method and chunks the plan takes.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from benchmarks import quick
from seqpart import Trainer

VOCABULARY = 128_256


def model(positions: int, width: int) -> torch.nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=positions,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--mem-limit", default="1.2GB")
    parser.add_argument("--width", type=int, default=64)
    quick.add_to(parser)
    asked = parser.parse_args()
    quick.need("transformers")
    if asked.quick:
        asked.positions, asked.mem_limit, asked.width = 256, "650MB", 16
    torch.manual_seed(0)
    rows = torch.randint(VOCABULARY, (2, asked.positions))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model(asked.positions, asked.width), "model", mem_limit=asked.mem_limit, method="auto", batch_size=1, epochs=1,
            save_every="never", output_dir=Path(folder) / "run",
        )  # fmt: skip
        result = trainer.fit((rows, rows))
    logits = 4 * VOCABULARY * asked.positions / 1e9
    print(f"{logits:.2f} GB of logits in {result.plan.loss_chunks} chunks by {result.plan.method}; {result.proof}")


if __name__ == "__main__":
    main()
