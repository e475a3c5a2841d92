"""Which models of libraries work unchanged? Each, whole and small, is cut, streamed and compared with a plain loop.

    python -m benchmarks.models              all of them; writes docs/models.md and benchmarks/results/models-*.json
    python -m benchmarks.models again NAME   these once more, and those that are new; what is known of the others stays
    python -m benchmarks.models one NAME     one of them, as a line of JSON
    python -m benchmarks.models --quick      the first of them, to see that it runs; not kept

Each runs in a process of its own: two epochs of SGD under a limit, one partition of three on the device at a time, and then
the loop that a reader would write, on another copy of the model: are all weights and buffers the same, bit for bit?
Dropout is off, since a plain loop draws its masks in another order.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import children, quick
from benchmarks.record import load, origin, save
from benchmarks.whole_models import EXAMPLES, Example, everything, judged
from seqpart import Trainer
from seqpart.capture.capture import chain_of, without_key_caches
from seqpart.data.splits import as_split
from seqpart.errors import SeqpartError
from seqpart.profile.blocks import measure_chain
from seqpart.profile.partition import passing
from seqpart.runtime.result import Result

BATCH, RATE, EPOCHS, PARTITIONS = 8, 1e-2, 2, (3, 2, 1)
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
CENSUS = "## One model of each kind"
"""Heads the part of the page that benchmarks.census writes, which stays."""

SUMMARY = """\
{yes} of {all} models are cut and trained unchanged, with one line of the user's code. After {epochs} epochs of SGD in
partitions {equal} have the weights and buffers of a plain PyTorch loop, bit for bit; for {within} the predicted peak
is within +5 / -1 % of the measured one. The models are small: this shows that they work, not how fast. *Values*: most
values between two blocks, such as hidden states, masks, rotary tables and skips. If the last bits differ, the column
says by how much, relative to a tensor's largest number, and both are run again with
`torch.use_deterministic_algorithms(True)`: some of torch's kernels add up in another order each time, in two plain
loops as well.

*`sil`*: {sil} of them are cut in two by `sil`, if its objective can use a value, and trained one partition after the other. The
test rows of the second come from the boundary cache, with all values that pass there; the loss of {same} is that of the whole
model on the same rows, to the last digit. The predicted peak of {kept} is within +5 / -1 %."""


def made(example: Example) -> nn.Module:
    torch.manual_seed(0)
    model = example.make()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in ("drop_prob", "p") if type(module).__name__ in ("DropPath", "StochasticDepth") else ():
            if hasattr(module, name):
                setattr(module, name, 0.0)
    return model


Rows = torch.Tensor | dict[str, torch.Tensor]


def some(x: Rows, rows: slice) -> Rows:
    return {name: part[rows] for name, part in x.items()} if isinstance(x, dict) else x[rows]


def plain(example: Example, x: Rows, y: torch.Tensor, batch: int = BATCH, epochs: int = EPOCHS) -> dict[str, torch.Tensor]:
    """What anyone would write."""
    model = made(example).train()
    loss, optimizer = judged(example.labels), torch.optim.SGD(model.parameters(), lr=RATE, fused=True)
    for _ in range(epochs):
        for start in range(0, len(y), batch):
            loss(output_of(model, some(x, slice(start, start + batch))), y[start : start + batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def output_of(model: nn.Module, rows: Rows) -> torch.Tensor:
    found = returned(model, rows)
    return everything(found) if (tensor := the_one(found)) is None else tensor


def returned(model: nn.Module, rows: Rows) -> Any:
    """What the model returns without a cache of keys, as in training here: with one some kernels get them in other layouts."""
    name = getattr(model, "main_input_name", None)
    with without_key_caches(model):
        return model(**rows) if isinstance(rows, dict) else model(**{name: rows}) if name else model(rows)


def the_one(found: Any) -> torch.Tensor | None:
    """Which tensor a loss of one tensor is given; None: it is to take all that the model returns."""
    if isinstance(found, torch.Tensor):
        return found
    found = found._asdict() if hasattr(found, "_asdict") else found
    named = found if isinstance(found, dict) else {}
    return next(
        (named[key] for key in ("logits", "out", "last_hidden_state") if isinstance(named.get(key), torch.Tensor)), None
    )


def one(name: str) -> dict[str, Any]:
    """What is found of one model; `reason` where it is refused."""
    example = EXAMPLES[name]
    x, y = example.rows(1)
    model = made(example)
    try:
        split = as_split((x, y), "training")
        chain = chain_of(model, split.shape, split.dtype, split.form)
        costs = measure_chain(chain, split.shape, BATCH, dtype=split.dtype)
        found: dict[str, Any] = {
            "blocks": len(chain),
            "widest": max(len(passing(costs, n)) for n in range(len(chain))),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
        found |= streamed(example, model, x, y)
        found["off"] = _off(model.state_dict(), plain(example, x, y))
        if found["off"]:  # kernels add up in another order each time, where torch is not asked for one
            torch.use_deterministic_algorithms(True)
            again = made(example)
            streamed(example, again, x, y)
            found["off"], found["asked"] = _off(again.state_dict(), plain(example, x, y)), found["off"]
            torch.use_deterministic_algorithms(False)
    except SeqpartError as error:
        return {"reason": re.sub(r"/\S*/site-packages/", "", error.with_flags.splitlines()[0])}
    try:
        found["sil"] = _sil(example, x, y)
    except SeqpartError as error:
        found["sil"] = {"reason": error.with_flags.splitlines()[0]}
    return found


def _sil(example: Example, x: Rows, y: torch.Tensor) -> dict[str, Any]:
    """Two partitions one after the other: its test rows have gone through the boundary cache, those of `whole` have not."""
    model, test = made(example), (some(x, slice(BATCH)), y[:BATCH])
    with tempfile.TemporaryDirectory() as folder:
        result = Trainer(
            model, judged(example.labels), "sgd", mem_limit="3GB", method="sil", partitions=2, batch_size=BATCH,
            micro_batch_size=BATCH, epochs=1, lr=RATE, quiet=True, output_dir=Path(folder) / "run", save_every="never",
        ).fit((x, y), test)  # fmt: skip
    with torch.no_grad():
        whole = float(judged(example.labels)(output_of(model.eval(), test[0]), test[1]))
    proof = result.proof
    return {
        "loss": result.test_loss, "whole": whole, "row": result.plan.partitions[0].boundary_row, "peak": proof.peak,
        "predicted": proof.predicted, "violations": proof.violations,
    }  # fmt: skip


def streamed(
    example: Example, model: nn.Module, x: Rows, y: torch.Tensor, batch: int = BATCH, epochs: int = EPOCHS
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        refusal: SeqpartError | None = None
        for partitions in PARTITIONS:
            try:
                result = trained(example, model, x, y, batch, epochs, partitions, Path(folder) / f"run-{partitions}")
                proof = result.proof
                return {
                    "partitions": len(result.plan.partitions), "blocks": result.plan.partitions[-1].last,
                    "peak": proof.peak, "predicted": proof.predicted, "violations": proof.violations,
                    "seconds": result.seconds, "test_loss": result.test_loss,
                }  # fmt: skip
            except SeqpartError as error:
                refusal = error
        assert refusal is not None
        raise refusal


def trained(
    example: Example, model: nn.Module, x: Rows, y: torch.Tensor, batch: int, epochs: int, partitions: int, folder: Path,
    save_every: int | str = "never", callbacks: Sequence[object] = (),
) -> Result:  # fmt: skip
    """Trains in a folder, or goes on with the run that is there."""
    trainer = Trainer(
        model, judged(example.labels), "sgd", mem_limit="3GB", method="streamed", partitions=partitions, batch_size=batch,
        micro_batch_size=batch, epochs=epochs, lr=RATE, shuffle=False, quiet=True, output_dir=folder, save_every=save_every,
    )  # fmt: skip
    return trainer.fit((x, y), (some(x, slice(4)), y[:4]), callbacks=callbacks, resume=folder if folder.exists() else None)


def _off(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to its tensor's largest number; 0: they are equal, bit for bit."""
    different = [(ours[key].double(), tensor.double()) for key, tensor in theirs.items() if not torch.equal(ours[key], tensor)]
    return max((float((one - other).abs().max() / (other.abs().max() or 1.0)) for one, other in different), default=0.0)


def line(name: str, found: dict[str, Any]) -> str:
    if "reason" in found:
        return f"| {name} | no | | | | | | | {found['reason'].replace('|', '/')} |"
    error = found["predicted"] / found["peak"] - 1
    bits = f"within {found['off']:.1g}" if found["off"] else "equal"
    bits += f" (within {found['asked']:.1g} if not asked to be deterministic)" if found.get("asked") else ""
    sil = found.get("sil", {"reason": "not tried"})
    alone = (
        "no" if "reason" in sil else "equal" if sil["loss"] == sil["whole"] else f"off by {abs(sil['loss'] - sil['whole']):.1g}"
    )
    return (
        f"| {name} | yes | {found['blocks']} | {found['widest']} | {found['partitions']} | {bits} | {error:+.2%} | {alone} | "
        f"{sil.get('reason', '')} |"
    )


def page(found: dict[str, dict[str, Any]]) -> str:
    yes = [one for one in found.values() if "reason" not in one]
    equal = sum(not one["off"] for one in yes)
    alone = [one["sil"] for one in yes if "loss" in one.get("sil", {})]
    within = sum(-0.01 <= one["predicted"] / one["peak"] - 1 <= 0.05 for one in yes)
    return "\n".join(
        [
            "# Models that were tried, unchanged",
            "",
            f"Written by `python -m benchmarks.models`. {origin()}",
            "",
            SUMMARY.format(
                yes=len(yes),
                all=len(found),
                epochs=EPOCHS,
                equal=equal,
                within=within,
                sil=len(alone),
                same=sum(one["loss"] == one["whole"] for one in alone),
                kept=sum(-0.01 <= one["predicted"] / one["peak"] - 1 <= 0.05 for one in alone),
            ),
            "",
            "| model | works | blocks | values | partitions | against a plain loop | predicted peak | `sil` | why not |",
            "|---|---|---|---|---|---|---|---|---|",
            *(line(name, one) for name, one in found.items()),
            "",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["all", "one", "again"], default="all")
    parser.add_argument("names", nargs="*", metavar="NAME")
    quick.add_to(parser)
    asked = parser.parse_args(argv)
    quick.need("torchvision", "timm", "transformers")
    if unknown := set(asked.names) - set(EXAMPLES):
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    if (asked.what == "one") != (len(asked.names) == 1) and asked.what != "again":
        parser.error(f"{asked.what}: which?")
    if asked.what == "one":
        print(json.dumps(one(asked.names[0])))
        return 0
    known: dict[str, dict[str, Any]] = load("models") if asked.what == "again" else {}
    found: dict[str, dict[str, Any]] = {}
    printed = quick.printed if asked.quick else children.printed
    for name in list(EXAMPLES)[: 1 if asked.quick else None]:
        if name in known and name not in asked.names:
            found[name] = known[name]
            continue
        try:
            found[name] = printed("benchmarks.models", "one", name, name=name)
        except RuntimeError as error:
            found[name] = {"reason": f"it failed: {str(error).splitlines()[-1]}"}
        print(line(name, found[name]), flush=True)
    _, *census = PAGE.read_text().partition(f"\n{CENSUS}\n")
    with quick.places(asked.quick) as docs:
        (docs / PAGE.name).write_text(page(found) + "".join(census))
        print(save("models", found))
    return int(asked.quick and any("reason" in one for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
