"""What plans assume of a device, beside what it is: context, granule, growth, workspaces, links, rates, disk.

    python -m benchmarks.gpu.assumptions                           on a GPU; beside the table of that card, if there is one
    python -m benchmarks.gpu.assumptions --assume h100 --calibrate mine.toml     then: seqpart train --device sim:mine.toml
    python -m benchmarks.gpu.assumptions --device sim --quick      the same measures of the simulated device, by its own clock

A measure that fails says so and keeps no other from being taken. Results: benchmarks/results/gpu-assumptions-DEVICE.json.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import torch

from benchmarks import record
from benchmarks.gpu import refusing_in_words
from benchmarks.gpu.measures import MEASURES, Bench, Measure, Row, rows_of
from seqpart.device.card import Hardware, load, names
from seqpart.device.device import Device
from seqpart.device.opening import open_device
from seqpart.errors import OptionError
from seqpart.store.atomic import write_text
from seqpart.units import format_size

_SCALES = {"B/s": (1e9, "GB/s"), "FLOP/s": (1e12, "TFLOP/s"), "/s": (1e9, "G/s"), "s": (1e-6, "us"), "share": (1.0, "")}
_SIZES = ("memory", "context")


def shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "B":
        return format_size(int(value))
    scale, name = _SCALES[unit]
    return f"{value / scale:.4g} {name}".rstrip()


def line(row: Row) -> str:
    ratio = f"{row.measured / row.assumed:.2f}" if row.measured is not None and row.assumed else "-"
    values = f"{shown(row.assumed, row.unit):>14} {shown(row.measured, row.unit):>14} {ratio:>7}"
    return f"{row.what:38} {values}  {row.note}".rstrip()


def table_for(device: Device, card: str) -> Hardware | None:
    """The card that is assumed: the one named, what is simulated, or the one whose name the device has."""
    if card:
        return load(card)
    if device.hardware is not None:
        return device.hardware
    name = device.name.lower().replace(" ", "")
    return next((load(known) for known in names() if known.partition("-")[0] in name), None)


def calibrated(device: Device, rows: Sequence[Row], assumed: Hardware | None) -> tuple[str, list[str]]:
    """(the text of a hardware table, fields that were taken from `assumed`). Raises OptionError where a field is nowhere."""
    measured = {row.field: row.measured for row in rows if row.field and row.measured}
    wanted = [name for field in fields(Hardware) for name in _keys(field.name)]
    missing = [name for name in wanted if name not in measured]
    if missing and assumed is None:
        raise OptionError(
            f"--calibrate: {', '.join(missing)} could not be measured, and no --assume says what to take instead."
        )
    values = {name: measured.get(name) or _of(assumed, name) for name in wanted}
    origin = f"{time.strftime('%Y-%m-%d')}, benchmarks.gpu.assumptions, torch {torch.__version__}"
    said = {
        name: f"measured: {origin}" if name in measured else f"assumed: {assumed.name if assumed else ''}"
        for name in wanted
    }  # fmt: skip
    return _toml(device.name, values, said), missing


def _keys(field: str) -> list[str]:
    if field == "flops":
        return ["flops.float32", "flops.bfloat16"]
    return [] if field in ("name", "sources") else [field]


def _of(assumed: Hardware | None, name: str) -> float:
    assert assumed is not None
    field, _, dtype = name.partition(".")
    found = getattr(assumed, field)
    return float(found[dtype] if dtype else found)


def _toml(name: str, values: dict[str, float], said: dict[str, str]) -> str:
    """JSON's texts and numbers are TOML's."""
    lines = [f"name = {json.dumps(name, ensure_ascii=False)}"]
    lines += [f"{key} = {int(value) if key in _SIZES else float(value)!r}" for key, value in values.items() if "." not in key]
    lines += ["", "[flops]", *(f"{key.partition('.')[2]} = {float(value)!r}" for key, value in values.items() if "." in key)]
    sources = {key.partition(".")[0]: text for key, text in said.items()}
    lines += ["", "[sources]", *(f"{key} = {json.dumps(text, ensure_ascii=False)}" for key, text in sources.items())]
    return "\n".join(lines) + "\n"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, sim or sim:CARD")
    parser.add_argument("--assume", default="", help="the hardware table to compare with (default: that of the card, if any)")
    parser.add_argument("--calibrate", type=Path, help="write a hardware table of what was measured to this .toml file")
    parser.add_argument("--folder", type=Path, default=Path(), help="whose disk is measured (default: here)")
    parser.add_argument("--quick", action="store_true", help="sizes that a processor can do, for the simulated device")
    options = parser.parse_args(words)
    if options.calibrate and options.calibrate.suffix != ".toml":
        parser.error(f"--calibrate: expected the path of a .toml file; found {options.calibrate}")
    if options.device.partition(":")[0] not in ("cuda", "sim"):
        parser.error("--device: only an accelerator is measured: cuda, cuda:N, sim or sim:CARD")
    return options


@refusing_in_words
def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    device = open_device(options.device)
    assumed = table_for(device, options.assume)
    rows = kept("gpu-assumptions", Bench(device=device, assumed=assumed, folder=options.folder, quick=options.quick), MEASURES)
    failed = any(row.note.startswith("failed") for row in rows)
    if options.calibrate is not None:
        _calibrate(options.calibrate, device, rows, assumed)
    return int(failed)


def kept(name: str, bench: Bench, measures: Iterable[Measure]) -> list[Row]:
    """Prints and saves one row after the other, and returns all."""
    device, assumed, rows = bench.device, bench.assumed, list[Row]()
    of = assumed.name if assumed else "nothing: no table is of this card, and no --assume names one"
    print(f"{device.name}, beside what is assumed of {of}\n{'':38} {'assumed':>14} {'measured':>14} {'ratio':>7}")
    with device.at_work():
        for row in rows_of(bench, measures):
            rows.append(row)
            print(line(row), flush=True)
            result = {"device": device.name, "assumed": of, "rows": [asdict(row) for row in rows]}
            path = record.save(name, result, device.kind)
    print(f"saved: {path}")
    return rows


def _calibrate(path: Path, device: Device, rows: Sequence[Row], assumed: Hardware | None) -> None:
    text, missing = calibrated(device, rows, assumed)
    write_text(path, text)
    print(f"{path}: {load(str(path)).name}" + (f"; assumed, not measured: {', '.join(missing)}" if missing else ""))


if __name__ == "__main__":
    sys.exit(main())
