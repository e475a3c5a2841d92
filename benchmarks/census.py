"""Which models of the libraries come in? One of each kind, small and whole, streamed and compared with a plain loop.

    python -m benchmarks.census models --library timm              those not yet tried
    python -m benchmarks.census models --library timm --only NAME  this one once more
    python -m benchmarks.census page                               the table in docs/models.md
    python -m benchmarks.census page --quick                       of a model of torchvision, to see that it runs; not kept

Every outcome is a line of benchmarks/results/census-models.jsonl; the last of a name counts. Each model has a process of its
own with a limit of time and memory: two updates of SGD in a loop that anyone would write, then the same in three partitions.
Of timm and torchvision it is the smallest model of each module, of transformers each kind of configuration with its first
head, made small by rule. Dropout is off. benchmarks.models tries fewer models, and more of each.
"""

import argparse
import collections
import contextlib
import copy
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import re
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import children, quick, record
from benchmarks.models import CENSUS, PAGE, Rows, made, output_of, plain, streamed
from benchmarks.record import origin
from benchmarks.whole_models import CLASSES, LENGTH, WORDS, Example, judged
from seqpart.capture.capture import chain_of
from seqpart.data.splits import as_split
from seqpart.errors import SeqpartError

BATCH, ROWS, SECONDS, MEMORY, LARGEST = 2, 4, 60, 8 << 30, 150_000_000
KNOWN = "census-models.jsonl"
LIBRARIES = ("timm", "transformers", "torchvision")
IMPORTED = ("torch._dynamo", "torchao.optim", "torchvision.datasets", "transformers.modeling_utils", "scipy.optimize")
"""What each process would import for itself, for seconds, where it is installed."""
HEADS = (
    "CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "MASKED_LM", "TOKEN_CLASSIFICATION",
    "SEQ_TO_SEQ_CAUSAL_LM", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEMANTIC_SEGMENTATION",
)  # fmt: skip
SMALL: tuple[tuple[str, Any], ...] = (
    (r".*(token_id|token_index)", lambda value: value if isinstance(value, list) or value < WORDS else 1),
    (r"(unpadded_)?vocab_size.*", 99),
    (r"hidden_size|d_model|n_embd|dim|emb_dim|embedding_size|embedding_dim|decoder_hidden_size", 32),
    (r"(shared_|.*moe_|.*experts?_)?intermediate_size(_mlp)?|(.*_)?ffn_dim|d_ff|dff|dim_ff|ffn_hidden_size|d_inner", 64),
    (r"((num_)?(hidden_|encoder_|decoder_)?|n_)layers?|num_blocks", 2),
    (r"(num_|encoder_|decoder_)attention_heads|n_heads?|num_heads", 4),
    (r"num_key_value_heads|num_kv_heads", 2),
    (r"mamba_n_heads|mamba_d_head", 8),
    (r"head_dim|v_head_dim|d_kv|d_head|dim_head|(linear|swa)_.*head_dim", 8),
    (r"qk_(rope|nope)_head_dim|rotary_dim", 8),
    (r"q_lora_rank|kv_lora_rank|.*state_size|mamba_d_state", 8),
    (r"(n|num)_(local_|routed_)?experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k", 2),
    (r"n_group|topk_group|num_expert_group|num_dense_layers|first_k_dense_replace", 1),
    (r"max_.*positions?(_embeddings)?|n_positions|n_ctx|max_seq_len", 64),
    (r"sliding_window|.*chunk_size", 8),
    (r"image_size", 64),
    (r"patch_size", lambda value: min(value, 8)),
    (r"depths|layer_depths", lambda value: [1] * len(value)),
)
"""What a configuration's numbers become, by their names."""
SET = ("head_dim", "vocab_size", "num_key_value_heads", "num_experts_per_tok")
"""Numbers that a configuration may leave open and its model then needs."""
OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"is_decoder": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "xmod": {"default_language": "en_XX"},
}
"""What a kind of configuration asks for beside its numbers' names."""


ABOUT = """\
Two updates of SGD in three partitions against a plain loop on another copy, dropout off, one thread: are all weights and
buffers the same, bit for bit? Of timm and torchvision the smallest model of each module, of transformers each kind
of configuration with its first head, made small by a rule for the names of its numbers ({versions}).
*refused*: seqpart says why, below. *no plain*: a plain loop does not train it either. *skipped*: the rule made no model of
it that runs, or none that is small."""
Choice = tuple[Callable[[], nn.Module], Rows]
"""A way to make a model, and rows that it may take."""


def shrunk(kind: Any, **more: Any) -> Any:
    """A configuration of that class, small, without dropout or random masks."""
    return kind(**{**_smaller(kind().to_dict()), "pad_token_id": 0, "num_labels": CLASSES, **more})


def _smaller(values: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a configuration that change, and those of its parts."""
    changed: dict[str, Any] = {}
    for key, value in values.items():
        if value is None and key in SET:
            value = 0
        if isinstance(value, dict) and "model_type" in value:
            changed[key] = {"model_type": value["model_type"], **_smaller(value)}
        elif isinstance(value, float) and ("drop" in key or key.startswith("mask_")):
            changed[key] = 0.0
        elif isinstance(value, list) and "drop" in key:
            changed[key] = [0.0] * len(value)
        elif isinstance(value, int | list) and not isinstance(value, bool):
            for pattern, small in SMALL:
                if re.fullmatch(pattern, key) and isinstance(value, list) <= ("depth" in key or "token" in key):
                    changed[key] = small(value) if callable(small) else small
                    break
    if "num_key_value_heads" in values and values["num_key_value_heads"] == values.get("num_attention_heads"):
        changed["num_key_value_heads"] = changed.get("num_attention_heads", 4)
    return changed


def of_transformers(name: str) -> tuple[list[Choice], str]:
    import transformers
    from transformers.models.auto import modeling_auto as heads

    kinds = (getattr(heads, f"MODEL_FOR_{head}_MAPPING_NAMES").get(name) for head in HEADS)
    found = next(kind for kind in kinds if kind)
    config = shrunk(transformers.CONFIG_MAPPING[name], **OWN.get(name, {}))
    if config.is_encoder_decoder:
        config.decoder_start_token_id = 0
    kind = getattr(transformers, found[0] if isinstance(found, tuple) else found)
    words = torch.randint(3, WORDS, (ROWS, LENGTH))
    words[:, -1] = config.eos_token_id if isinstance(getattr(config, "eos_token_id", None), int) else 1
    main = kind.main_input_name
    if main == "pixel_values":
        shape = (config.num_frames,) if "Video" in kind.__name__ else ()
        channels = getattr(config, "num_channels", 3)
        sides = dict.fromkeys(one for one in (getattr(config, "image_size", 64), 64, 224) if isinstance(one, int))
        rows: list[Rows] = [torch.randn(ROWS, *shape, channels, side, side) for side in sides]
    elif main == "input_values":
        rows = [torch.randn(ROWS, 4000), torch.randn(ROWS, 1024, 128)]
    elif main == "input_features":
        rows = [torch.randn(ROWS, config.num_mel_bins, 2 * config.max_source_positions)]
    else:
        rows = [{"input_ids": words, "decoder_input_ids": words.flip(1)}, words] if config.is_encoder_decoder else [words]
    return [(lambda: kind(copy.deepcopy(config)), x) for x in rows], kind.__name__


def of_timm(name: str) -> tuple[list[Choice], str]:
    import timm

    sizes = {}
    for model in timm.list_models(module=name):
        with contextlib.suppress(Exception), torch.device("meta"):
            sizes[model] = sum(one.numel() for one in timm.create_model(model).parameters())
    smallest = min((one for one in sizes if not one.startswith("test_")), key=lambda one: sizes[one])
    channels, side, _ = timm.get_pretrained_cfg(smallest).input_size
    ways: list[tuple[dict[str, int], int]] = [
        ({"img_size": 64, "depth": 4}, 64), ({"img_size": 64}, 64), ({}, 64), ({}, 128), ({}, side),
    ]  # fmt: skip

    def made_by(options: dict[str, int]) -> nn.Module:
        model: nn.Module = timm.create_model(smallest, num_classes=CLASSES, **options)
        for part in model.modules():
            if isinstance(getattr(part, "drop_rate", None), float):
                part.drop_rate = 0.0  # type: ignore[assignment]  # for nn.functional.dropout
        return model

    return [(partial(made_by, options), torch.randn(ROWS, channels, one, one)) for options, one in ways], smallest


def of_torchvision(name: str) -> tuple[list[Choice], str]:
    import torchvision.models as models

    rows: list[Rows] = [torch.randn(ROWS, 3, 64, 64), torch.randn(ROWS, 3, 224, 224)]
    options: dict[str, Any] = {"num_classes": CLASSES}
    if name.startswith("raft"):
        rows, options = [{key: torch.randn(ROWS, 3, 128, 128) for key in ("image1", "image2")}], {}
    if models.get_model_builder(name).__module__.startswith("torchvision.models.video"):
        rows = [torch.randn(ROWS, 3, 8, 64, 64), torch.randn(ROWS, 3, 16, 224, 224)]
    if "segmentation" in models.get_model_builder(name).__module__:
        options["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": True}
        rows = [torch.randn(ROWS, 3, 96, 96)]
    return [(partial(models.get_model, name, weights=None, **options), x) for x in rows], name


def names(library: str) -> list[str]:
    if library == "timm":
        return list(importlib.import_module("timm").list_modules())
    if library == "torchvision":
        models = importlib.import_module("torchvision.models")
        smallest: dict[str, str] = {}
        for name in sorted(models.list_models(), key=lambda name: models.get_model_weights(name).DEFAULT.meta["num_params"]):
            smallest.setdefault(models.get_model_builder(name).__module__, name)
        return [name for module, name in smallest.items() if "detection" not in module and "quantization" not in module]
    heads = importlib.import_module("transformers.models.auto.modeling_auto")
    return list(dict.fromkeys(name for head in HEADS for name in getattr(heads, f"MODEL_FOR_{head}_MAPPING_NAMES")))


def tried(library: str, name: str, stage: Callable[[str], None]) -> dict[str, Any]:
    """What came of it. Of each stage the name is told as it begins."""
    stage("skipped")
    torch.manual_seed(0)
    choices, named = {"timm": of_timm, "transformers": of_transformers, "torchvision": of_torchvision}[library](name)
    make, x, output, size = _fitting(choices)
    if size > LARGEST:
        return {"model": named, "outcome": "skipped", "why": "still large when made small by rule"}
    example, y = _labelled(make, output)
    found: dict[str, Any] = {"model": named, "input": _shape(x), "output": list(output.shape)[1:]}
    stage("no plain")
    before, drawn = plain(example, x, y, BATCH, 1), torch.get_rng_state()
    model = made(example)
    if not torch.equal(drawn, torch.get_rng_state()):
        return found | {"outcome": "skipped", "why": "it draws random numbers as it trains, dropout off"}
    model.load_state_dict(before)
    with torch.no_grad():
        if not judged(example.labels)(output_of(model.eval(), x), y).isfinite():
            return found | {"outcome": "no plain", "why": "its loss on the test rows is not finite after two updates"}
    stage("error")
    model = made(example)
    split = as_split((x, y), "training")
    try:
        found["blocks"] = len(chain_of(model, split.shape, split.dtype, split.form))
        found["partitions"] = streamed(example, model, x, y, BATCH, 1)["partitions"]
        if not (off := _different(model.state_dict(), before)):
            return found | {"outcome": "equal"}
        torch.use_deterministic_algorithms(True, warn_only=True)  # kernels add up in another order each time otherwise
        model, found["asked"] = made(example), off
        streamed(example, model, x, y, BATCH, 1)
        loops = [plain(example, x, y, BATCH, 1) for _ in range(2)]
        if not (off := _different(model.state_dict(), loops[0])):
            return found | {"outcome": "equal"}
        if _different(*loops):
            return found | {"outcome": "skipped", "why": "two plain loops differ"}
        return found | {"outcome": "differs", "why": off}
    except SeqpartError as error:
        return found | {"outcome": "refused", "why": re.sub(r"/\S*/site-packages/", "", error.with_flags.splitlines()[0])}


def _fitting(choices: list[Choice]) -> tuple[Callable[[], nn.Module], Rows, torch.Tensor, int]:
    """The first of the choices that can be made and run, what comes out, and how many parameters it has."""
    for make, x in choices:
        try:
            with torch.device("meta"):
                size = sum(one.numel() for one in make().parameters())
        except Exception:
            size = 0
        try:
            with torch.no_grad():
                return make, x, output_of(made(Example(make)).eval(), x) if size <= LARGEST else torch.empty(0), size
        except Exception:
            if x is choices[-1][1]:
                raise
    raise AssertionError


def _labelled(make: Callable[[], nn.Module], output: torch.Tensor) -> tuple[Example, torch.Tensor]:
    kind = {2: "row", 3: "token", 4: "pixel"}.get(output.dim(), "vector")
    if kind == "vector" or not output.shape[1]:
        return Example(make, labels="vector"), torch.randn(len(output))
    classes = output.shape[2] if kind == "token" else output.shape[1]
    shape = {"row": (), "token": output.shape[1:2], "pixel": output.shape[2:]}[kind]
    y = torch.arange(prod((len(output), *shape))).reshape(len(output), *shape)
    return Example(make, labels=kind), y % classes


def _shape(x: Rows) -> dict[str, list[int]] | list[int]:
    return {name: list(one.shape[1:]) for name, one in x.items()} if isinstance(x, dict) else list(x.shape[1:])


def _different(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> str:
    """How many tensors differ and the first of them; empty: none does."""
    off = [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]
    return f"{len(off)} of {len(theirs)}, first {off[0]}" if off else ""


def child(to: Connection, library: str, name: str) -> None:
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    reached = "skipped"

    def stage(name: str) -> None:
        nonlocal reached
        reached = name
        to.send(name)

    try:
        found = tried(library, name, stage)
    except BaseException as error:
        frames = [f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in traceback.extract_tb(error.__traceback__)]
        found = {"outcome": reached, "why": f"{type(error).__name__}: {error}"[:400], "at": frames[-4:]}
    to.send(found)


def in_process(library: str, name: str, seconds: float) -> dict[str, Any]:
    """The outcome of `tried` in a process of its own."""
    context, began, reached = multiprocessing.get_context("fork"), time.monotonic(), "skipped"
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs, library, name))
    process.start()
    theirs.close()
    found: dict[str, Any] = {}
    try:
        while not found:
            if not ours.poll(max(0.0, began + seconds - time.monotonic())):
                found = {"outcome": "skipped", "why": f"longer than {seconds:.0f} s, at: {reached}"}
            elif isinstance(told := ours.recv(), str):
                reached = told
            else:
                found = told
    except EOFError:
        found = {"outcome": reached, "why": "the process ended"}
    process.kill()
    process.join()
    return {"library": library, "name": name, **found, "seconds": round(time.monotonic() - began, 1)}


def known() -> dict[tuple[str, str], dict[str, Any]]:
    path = record.FOLDER / KNOWN
    lines: Iterator[str] = iter(path.read_text().splitlines() if path.exists() else [])
    return {(one["library"], one["name"]): one for one in map(json.loads, lines)}


def run(asked: argparse.Namespace) -> None:
    importlib.import_module(asked.library)
    for module in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    number, of = map(int, asked.shard.split("/"))
    until = time.monotonic() + 60 * asked.minutes
    before = known()
    wanted = asked.only or [name for name in names(asked.library) if (asked.library, name) not in before][number::of]
    for name in wanted:
        if time.monotonic() > until:
            break
        found = in_process(asked.library, name, asked.seconds)
        with (record.FOLDER / KNOWN).open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(found["outcome"], found.get("model", name), found.get("blocks", ""), found.get("why", ""), flush=True)


COLUMNS = ("equal", "differs", "refused", "error", "no plain", "skipped")


def section() -> str:
    """The part of docs/models.md behind the table of benchmarks.models."""
    found = [one for _, one in sorted(known().items())]
    table = collections.Counter((one["library"], one["outcome"]) for one in found)
    return "\n".join(
        [
            CENSUS,
            "",
            f"Written by `python -m benchmarks.census page`. {origin()}",
            "",
            ABOUT.format(versions=", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)),
            "",
            f"| library | tried | {' | '.join(COLUMNS)} |",
            "|---|---|" + "---|" * len(COLUMNS),
            *(
                f"| {library} | {sum(table[library, one] for one in COLUMNS)} | "
                + " | ".join(str(table[library, one]) for one in COLUMNS)
                + " |"
                for library in LIBRARIES
            ),
            "",
            "| not equal | outcome | why |",
            "|---|---|---|",
            *(
                f"| {one['library']} {one.get('model', one['name'])} | {one['outcome']} | {_told(one['why'])} |"
                for one in found
                if one["outcome"] not in ("equal", "skipped")
            ),
            "",
            "| skipped | models |",
            "|---|---|",
            *(f"| {why} | {len(names)}: {', '.join(names)} |" for why, names in _skipped(found).items()),
            "",
        ]
    )


def _skipped(found: list[dict[str, Any]]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for one in found:
        if one["outcome"] == "skipped":
            why = (
                one["why"]
                if "model" in one or one["why"].startswith(("longer", "still"))
                else "the rule made no model that runs"
            )
            reasons.setdefault(_told(why), []).append(one["name"])
    return reasons


def _told(why: str) -> str:
    return why.splitlines()[-1].strip().replace("|", "/")[:300]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["models", "page"])
    parser.add_argument("--library", choices=LIBRARIES, default="timm")
    parser.add_argument("--shard", default="0/1", metavar="I/N")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each model")
    parser.add_argument("--only", nargs="*", metavar="NAME")
    quick.add_to(parser)
    asked = parser.parse_args(argv)
    quick.need(*LIBRARIES)
    if (asked.what == "models" or asked.quick) and os.environ.get("OMP_NUM_THREADS") != "1":  # read as torch is imported
        os.execve(sys.executable, children.command("benchmarks.census", *(argv or sys.argv[1:])), children.one_thread())
    with quick.places(asked.quick) as docs:
        if asked.quick:
            asked.library, asked.only = "torchvision", ["shufflenet_v2_x0_5"]
        if asked.what == "models" or asked.quick:
            run(asked)
        if asked.what == "page":
            text = PAGE.read_text().partition(f"\n{CENSUS}\n")[0] + "\n" + section()
            (docs / PAGE.name).write_text(text)
        return int(asked.quick and {one["outcome"] for one in known().values()} != {"equal"})


if __name__ == "__main__":
    sys.exit(main())
