"""What a campaign found: one line a case, JSON with machine, versions and date, and a table with a row for each fault."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import record as records_on_disk
from benchmarks.campaign.cases import Record
from benchmarks.campaign.faults import KINDS
from benchmarks.campaign.jobs import TRAITS

COMPARED = ("plain loop", "undisturbed run", "undisturbed run of the same plan")
"""What bits were compared with."""


def line(record: Record) -> str:
    seconds = sum(start["seconds"] for start in record.starts)
    job = " ".join(word for word in record.arguments if not word.startswith("/"))
    verdict = "".join(f"\n      VIOLATION {text}" for text in record.violations)
    struck = "" if record.struck else ", did not strike"
    return (
        f"{record.case:>5}  {record.fault:<17} {record.outcome}{struck}; {len(record.starts)} start(s), {seconds:.1f} s; "
        f"bits: {record.bits or '-'}{verdict}{chr(10) + '      ' + job if record.violations else ''}"
    )


def load(name: str, seed: int) -> tuple[list[Record], list[str], float, list[dict[str, Any]]]:
    """The cases of earlier sittings, what they lost, their seconds, and what was violated before it was mended.

    Raises SystemExit where their seed was another.
    """
    result = records_on_disk.load(name)
    if not result:
        return [], [], 0.0, []
    if result["seed"] != seed:
        raise SystemExit(f"--add: the results of {name} are those of seed {result['seed']}, not of {seed}.")
    lines = _cases_of(name).read_text().splitlines()
    return [Record(**json.loads(line)) for line in lines], result["lost"], result["seconds"], result.get("mended", [])


def _cases_of(name: str) -> Path:
    return records_on_disk.FOLDER / f"{name}-cases.jsonl"


def save(name: str, found: list[Record], lost: list[str], about: dict[str, Any]) -> Path:
    """The summary, and beside it the cases, one a line."""
    ordered = sorted(found, key=lambda record: record.case)
    violated = [
        {"case": record.case, "fault": record.fault, "arguments": record.arguments, "violations": record.violations}
        for record in ordered
        if record.violations
    ]
    result = {**about, "cases": len(found), "lost": lost, "faults": counted(ordered), "traits": by_trait(ordered)}
    result["violated"] = violated
    path = records_on_disk.save(name, result)
    lines = [json.dumps(dataclasses.asdict(record)) for record in ordered]
    _cases_of(name).write_text("\n".join(lines) + "\n")
    return path


def counted(found: list[Record]) -> dict[str, dict[str, Any]]:
    """Per fault: cases, those that it struck, how they ended, starts of the command, and what was violated."""
    table: dict[str, dict[str, Any]] = {}
    for name in KINDS:
        of_kind = [record for record in found if record.fault == name]
        if of_kind:
            violations = [text.partition(":")[0] for record in of_kind for text in record.violations]
            table[name] = {
                "cases": len(of_kind),
                "struck": sum(record.struck for record in of_kind),
                "starts": sum(len(record.starts) for record in of_kind),
                "outcomes": dict(Counter(record.outcome for record in of_kind).most_common()),
                "bits": sum(record.bits in COMPARED for record in of_kind),
                "cases violated": sum(bool(record.violations) for record in of_kind),
                "violations": dict(Counter(violations).most_common()),
            }
    return table


def by_trait(found: list[Record]) -> dict[str, dict[str, int]]:
    """Per trait of jobs: cases of jobs that have it, those whose bits were compared, and those that were violated."""
    table = {}
    for trait in TRAITS:
        having = [record for record in found if trait in record.traits]
        table[trait] = {
            "cases": len(having),
            "bits": sum(record.bits in COMPARED for record in having),
            "cases violated": sum(bool(record.violations) for record in having),
        }
    return table


def summary(found: list[Record], lost: list[str]) -> str:
    rows = [["fault", "cases", "struck", "starts", "outcomes", "bits compared", "violated"]]
    for name, row in counted(found).items():
        outcomes = ", ".join(f"{outcome} {count}" for outcome, count in row["outcomes"].items())
        violations = ", ".join(f"{kind} {count}" for kind, count in row["violations"].items())
        rows.append([
            name, str(row["cases"]), str(row["struck"]), str(row["starts"]), outcomes, str(row["bits"]),
            f"{row['cases violated']}" + (f" ({violations})" if violations else ""),
        ])  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    bad = sum(bool(record.violations) for record in found)
    for trait, row in by_trait(found).items():
        lines.append(f"{trait}: {', '.join(f'{name} {count}' for name, count in row.items())}")
    return "\n".join([*lines, *lost, f"{len(found)} cases, {bad} with violations"])
