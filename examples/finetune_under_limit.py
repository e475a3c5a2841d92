"""Fine-tune a language model on your text, under a limit that its training state does not fit; then see the same losses
from full training in as much memory as it wants.

    python examples/finetune_under_limit.py README.md                       # any UTF-8 text: some minutes on a CPU
    python examples/finetune_under_limit.py README.md --weights runs/finetune/model.safetensors    # go on from there
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from torch import nn

from seqpart import Trainer
from seqpart.zoo import text
from seqpart.zoo.models import gpt

CONTEXT = 64


def from_file(weights: str, number: int, build: Callable[[], nn.Module]) -> nn.Module:
    """Block `number` with its part of a model.safetensors. A factory like any other: no two blocks are in memory."""
    block = build()
    with safe_open(weights, "pt") as file:
        block.load_state_dict({name: file.get_tensor(f"{number}.{name}") for name in block.state_dict()})
    return block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--weights", help="model.safetensors of a model of this size to begin with")
    parser.add_argument("--mem-limit", default="420MB")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--output-dir", default="runs/finetune")
    arguments = parser.parse_args()

    train, test = text.load(arguments.text, CONTEXT)
    blocks = gpt(len(text.vocabulary(arguments.text)), CONTEXT, width=arguments.width, depth=arguments.depth)
    if arguments.weights:
        blocks = [functools.partial(from_file, arguments.weights, number, build) for number, build in enumerate(blocks)]
    options = {
        "optimizer": "adamw", "lr": 3e-4, "weight_decay": 0.1, "clip_grad_norm": 1.0, "lr_schedule": "cosine",
        "warmup_updates": 4, "epochs": arguments.epochs, "batch_size": 16, "micro_batch_size": 4, "overwrite": True,
    }  # fmt: skip

    under = Trainer(blocks, method="streamed", mem_limit=arguments.mem_limit, output_dir=arguments.output_dir, **options)
    limited = under.fit(train, test)
    free = Trainer(blocks, method="full", mem_limit="auto", output_dir=f"{arguments.output_dir}-full", **options)
    full = free.fit(train, test)

    for epoch, (ours, theirs) in enumerate(zip(limited.train_losses, full.train_losses, strict=True), 1):
        print(f"epoch {epoch}: loss {ours!r} under {arguments.mem_limit}, {theirs!r} with all in memory")
    same = limited.train_losses == full.train_losses and limited.weights.read_bytes() == full.weights.read_bytes()
    peaks = f"{limited.proof.peak / 1e6:.0f} MB instead of {full.proof.peak / 1e6:.0f} MB"
    print(f"peak {peaks}; all losses and weights equal: {same}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
