"""Models at full size from their checkpoints, on the CPU and the disk: 20 updates each, in less than their training state.

    python -m benchmarks.full_size --folder DIR                 all, 25 minutes; DIR takes the checkpoints (2.7 GB) and the runs
    python -m benchmarks.full_size --folder DIR --only gpt2     one model
    python -m benchmarks.full_size --folder DIR --deepspeed PYTHON     DeepSpeed alone; what is known of the others stays
    python -m benchmarks.full_size --quick                      a small GPT-2, to see that it runs; not kept

gpt2    GPT-2 small, 124 million float32 weights, the embedding tied to the output
llama   a Llama of 1.1 billion bfloat16 weights in five shards

Each is made once from its config with random weights and saved with `save_pretrained`. An arm is `python -m seqpart.train`
as a user types it; the plain arm is transformers' own model, loaded whole, in a loop with the same optimizer and batches.
Medians of updates, one arm after the other. A limit that is refused is noted in the words of the refusal. PYTHON is that of
DeepSpeed's environment (benchmarks/peers/environment.sh) with transformers installed; it has no limit, only a least memory.
"""

import argparse
import itertools
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import quick
from benchmarks.children import answer, command, output, printed
from benchmarks.record import load, save

MODELS = {"gpt2": ("700MB", "1GB", "2GB"), "llama": ("1GB", "2GB")}
"""And the limits of each."""
QUICK = {"small gpt2": ("1GB",)}
SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
BATCH, CONTEXT, UPDATES = 4, 64, 20
LETTERS = "abcdefghijklmnopqrstuvwxyz .,\n"


def made(model: str, folder: Path) -> int:
    """Write its checkpoint. The number of its weights."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    if model in ("gpt2", *QUICK):
        gpt2 = GPT2LMHeadModel(GPT2Config(bos_token_id=1, eos_token_id=2, **(SMALL if model in QUICK else {})))
        gpt2.save_pretrained(folder)
        return gpt2.num_parameters()
    torch.set_default_dtype(torch.bfloat16)
    llama = LlamaForCausalLM(LlamaConfig(
        hidden_size=2048, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4, intermediate_size=5632,
        vocab_size=32000, tie_word_embeddings=False, dtype=torch.bfloat16,
    ))  # fmt: skip
    llama.save_pretrained(folder, max_shard_size="500MB")
    return llama.num_parameters()


def plain(folder: Path) -> dict[str, Any]:
    """A loop of plain PyTorch over transformers' model. Seconds of each update, its peak in bytes."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(len(LETTERS), (UPDATES, BATCH, CONTEXT))
    seconds = []
    for ids in tokens:
        begun = time.perf_counter()
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
    return {"seconds": seconds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def streamed(model: Path, limit: str, text: Path, run: Path) -> dict[str, Any]:
    """What seqpart's run says of itself, or its refusal."""
    shutil.rmtree(run, ignore_errors=True)
    words = command(
        "seqpart.train", "--mem-limit", limit, "--model", f"hf:{model}", "--data", f"text:{text}", "--context", CONTEXT,
        "--epochs", 1, "--batch-size", BATCH, "--method", "streamed", "--output-dir", run,
    )  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"exit_status": done.returncode, "said": done.stderr.strip().splitlines()[-3:]}
    result, plan = json.loads((run / "result.json").read_text()), json.loads((run / "plan.json").read_text())
    bound = next(reason for reason in plan["reasons"] if reason.startswith("an update"))
    found = {
        "proof": result["proof"], "run_seconds": result["seconds"], "seconds": updates(run / "events.jsonl"),
        "partitions": len(plan["partitions"]), "tile": plan["tile"], "full_state": plan["full_state"],
        "predicted_seconds": plan["update_seconds"], "bound": bound, "loss": result["train_losses"][-1],
    }  # fmt: skip
    shutil.rmtree(run)
    return found


def updates(events: Path) -> list[float]:
    """Seconds from one turn of the last partition to the next: an update each."""
    steps = [event for line in events.read_text().splitlines() if (event := json.loads(line))["event"] == "step"]
    first = next(event["step"] for event in steps if event["step"].endswith("+"))
    turns = [event["seconds"] for event in steps if event["step"] == first]
    return [round(later - one, 3) for one, later in itertools.pairwise(turns)]


def of_deepspeed(python: Path, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """ZeRO-3 with weights, gradients' copies and moments on disk; or why not."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment["TORCH_EXTENSIONS_DIR"] = str(python.parents[1] / "extensions")
    environment["PATH"] = f"{python.parent}:{environment['PATH']}"
    words = [str(python), "-m", "benchmarks.peers.deepspeed_language", str(checkpoint), str(folder / "deepspeed")]
    (folder / "deepspeed").mkdir(exist_ok=True)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    shutil.rmtree(folder / "deepspeed")
    if done.returncode:
        return {"exit_status": done.returncode, "said": done.stderr.strip().splitlines()[-3:]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def checkpoint_of(model: str, folder: Path) -> Path:
    checkpoint = folder / model
    if not checkpoint.exists():
        weights = (
            made(model, checkpoint) if model in QUICK else output("benchmarks.full_size", "make", model, checkpoint).strip()
        )
        print(model, weights, "weights", flush=True)
    return checkpoint


def measure(model: str, folder: Path) -> dict[str, Any]:
    checkpoint, text = checkpoint_of(model, folder), folder / "letters.txt"
    letters = random.Random(0)
    text.write_text("".join(letters.choice(LETTERS) for _ in range(CONTEXT * BATCH * UPDATES * 10 // 9 + CONTEXT)))
    found: dict[str, Any] = {}
    for limit in (MODELS | QUICK)[model]:
        found[limit] = streamed(checkpoint, limit, text, folder / f"run-{model}-{limit}")
        show(model, limit, found[limit])
    found["plain"] = plain(checkpoint) if model in QUICK else printed("benchmarks.full_size", "plain", checkpoint)
    show(model, "plain", found["plain"])
    return found


def show(model: str, arm: str, found: dict[str, Any]) -> None:
    if "said" in found:
        print(f"{model:6} {arm:6} refused: {' '.join(found['said'])}", flush=True)
        return
    peak = found["peak"] if "peak" in found else found["proof"]["peak"]
    told = f"{model:6} {arm:6} {statistics.median(found['seconds'][2:]):6.2f} s an update, peak {peak / 1e9:.2f} GB"
    if "proof" in found:
        proof = found["proof"]
        told += f" (predicted {proof['predicted'] / 1e9:.2f}, violations {proof['violations']})"
        told += f", {found['partitions']} partitions"
        told += f"; predicted {found['predicted_seconds']:.2f} s: {found['bound']}"
    print(told, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--deepspeed", type=Path, metavar="PYTHON")
    quick.add_to(parser)
    options = parser.parse_args()
    quick.need("transformers")
    if options.folder is None and not options.quick:
        parser.error("give --folder")
    with quick.places(options.quick) as docs:
        folder = docs if options.quick else options.folder
        folder.mkdir(parents=True, exist_ok=True)
        found = load("full_size")
        for name in list(QUICK) if options.quick else [options.only] if options.only else list(MODELS):
            if options.deepspeed:
                found[name]["deepspeed"] = of_deepspeed(options.deepspeed, checkpoint_of(name, folder), folder)
                show(name, "deepspeed", found[name]["deepspeed"])
            else:
                found[name] = found.get(name, {}) | measure(name, folder)
            print(save("full_size", found))
        if options.quick and any("said" in one for arms in found.values() for one in arms.values()):
            sys.exit(1)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", model, folder]:
            print(made(model, Path(folder)))
        case ["plain", folder]:
            answer(plain(Path(folder)))
        case _:
            main()
