"""The study of objectives: every idea on every network, three seeds, at 2, 4 and 8 partitions, tuned on validation rows alone.

    python -m benchmarks.objectives.study --data-dir DIR                    hours; goes on where it stopped
    python -m benchmarks.objectives.study --data-dir DIR --tasks residual --ideas prototype,mse
    python -m benchmarks.objectives.study --table                           what was found, as docs/objectives.md has it
    python -m benchmarks.objectives.study --quick                           one idea on noise, to see that it runs; not kept

DIR holds EMNIST47, cifar10-subset and tinyshakespeare. Every way, full training too, tries its `candidates` once with a seed
of its own; what is best on the validation rows is then trained with seeds 0, 1 and 2, and the table has their test rows.
"""

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import children, quick, record
from benchmarks.objectives.ideas import IDEAS

NAME = "objectives"
SEEDS, TUNING_SEED = (0, 1, 2), 100
BASE = {
    "paper": ["--optimizer", "sgd", "--constant", "--in-order"],
    "residual": [],
    "resnet": ["--weight-decay", "0.05", "--bfloat16"],
    "gpt": ["--weight-decay", "0.1"],
}
EPOCHS = {"paper": 40, "residual": 8, "resnet": 5, "gpt": 9}
"""Of full training, and of every partition but in the paper's network, where they are uneven as in the paper."""
UNEVEN = {"paper": {2: "20,80", 4: "20,20,20,80"}}
TITLES = {
    "paper": "(a) the paper's network: 784-80-60-60-60-47, EMNIST47, test accuracy in %",
    "residual": "(b) 12 residual blocks of width 256, 30,000 rows of EMNIST47, test accuracy in %",
    "resnet": "(c) a stem and six basic blocks of 16, 32, 64 channels, 10,000 rows of CIFAR-10, test accuracy in %",
    "gpt": "(d) four layers of width 64 on 330,000 characters, test loss",
}
PARTITIONS = {"paper": (2, 4), "residual": (2, 4, 8), "resnet": (2, 4), "gpt": (2, 4)}
RATES = {"paper": ("0.01", "0.03", "0.1"), "residual": ("1e-3", "2e-3"), "resnet": ("1e-3", "2e-3"), "gpt": ("1e-3", "2e-3")}
FULL, LESS, RECOVERY = "full training", "fewer epochs of full training", "recovery behind prototype"
FEWER = {"paper": "30", "residual": "7", "resnet": "4", "gpt": "6"}
"""Epochs of LESS: about the multiply-accumulates of RECOVERY."""
RECOVERED = {"paper": ("5", "20"), "residual": ("1", "6"), "resnet": ("1", "3"), "gpt": ("1", "5")}
"""Epochs of RECOVERY: of each partition, and of the whole network behind."""
TUNED: dict[str, list[dict[str, float]]] = {
    "prototype": [{"scale": 16.0}, {"scale": 4.0, "first_scale": 16.0}],
    "mse": [{"scale": 10.0}, {"scale": 2.0}],
    "orthogonal grid": [{"scale": 16.0}, {"scale": 8.0, "first_scale": 16.0}, {"scale": 4.0, "first_scale": 16.0}],
    "learned head": [{}],
}
"""Ideas with candidates of their own."""
MIXED = "mixup and a longer first partition"
UNLIKE: dict[str, dict[str, tuple[str, dict[int, str]]]] = {
    MIXED: {
        "residual": ("mixup", {2: "10,6", 4: "12,2,2,8", 8: "16,2,2,2,2,2,2,8"}),
        "resnet": ("mixup", {2: "6,4", 4: "8,2,2,5"}),
    },
    "a longer first partition": {"gpt": ("orthogonal", {2: "13,5", 4: "20,3,3,9"})},
}
"""Ways with other epochs for each partition: of each network the idea, and epochs that come to full training's
multiply-accumulates, or to fewer."""
BESIDE = (LESS, RECOVERY, *UNLIKE)
"""Ways that are no single objective: other epochs, or more than one training."""
ONLY_IN: dict[str, tuple[str, ...]] = {
    **{way: tuple(of) for way, of in UNLIKE.items()},
    **dict.fromkeys(("grid", "orthogonal grid", "random convolution"), ("resnet",)),
}
"""Networks of a way that not all have."""


@dataclass(frozen=True)
class Job:
    """One training: of a task, in so many partitions (1: full training), with these words for benchmarks/objectives/run.py."""

    task: str
    partitions: int
    way: str
    words: tuple[str, ...]
    seed: int

    @property
    def name(self) -> str:
        return f"{self.way} | {self.partitions} | {' '.join(self.words)} | seed {self.seed}"

    def command(self, data: Path) -> list[str]:
        epochs = UNEVEN.get(self.task, {}).get(self.partitions, str(EPOCHS[self.task]))
        if self.way in (FULL, LESS):
            way, epochs = ["--way", "full"], str(EPOCHS[self.task]) if self.way == FULL else FEWER[self.task]
        elif self.way == RECOVERY:
            epochs, recovery = RECOVERED[self.task]
            way = ["--idea", "prototype", "--partitions", str(self.partitions), "--recovery", recovery]
        elif self.way in UNLIKE:
            idea, by_count = UNLIKE[self.way][self.task]
            epochs, way = by_count[self.partitions], ["--idea", idea, "--partitions", str(self.partitions)]
        else:
            way = ["--idea", self.way, "--partitions", str(self.partitions)]
        return [
            self.task, *BASE[self.task], *way, "--epochs", epochs, "--full-epochs", str(EPOCHS[self.task]), *self.words,
            "--seed", str(self.seed), "--data-dir", str(data),
        ]  # fmt: skip


def candidates(task: str, way: str, found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """What is tried for a way; nothing where a network has it not. TUNED: rates, decays, and strengths of what each has beside.

    Fewer epochs of full training are trained as full training is, and a change of `prototype` as is best for `prototype`."""
    rates = [("--lr", rate) for rate in RATES[task]]
    decay = [("--weight-decay", "0.2")] if task == "residual" else []
    if task not in ONLY_IN.get(way, PARTITIONS):
        return
    if way == LESS:
        yield from [words] if (words := best_words(task, FULL, found)) else []
    elif way == RECOVERY:
        yield from ((*rate, "--recovery-lr", other, *more) for rate in rates for other in RATES[task] for more in ((), *decay))
    elif way == FULL:
        yield from ((*rate, *more) for rate in rates for more in ((), *decay))
        yield from ((*rate, "--mixup", "0.4") for rate in rates if task in ("residual", "resnet"))
    elif way in TUNED:
        for rate in rates:
            for change in TUNED[way]:
                words = (*rate, *(("--change", json.dumps(change)) if change else ()))
                yield from ((*words, *more) for more in ((), *decay))
    elif words := best_words(task, "prototype", found):
        changed = words.index("--change")
        yield words if way in UNLIKE or IDEAS[way].kind == "directions" else words[:changed] + words[changed + 2 :]
        if way in UNLIKE and "--weight-decay" not in words:
            yield from ((*words, *more) for more in decay)


def carry_out(job: Job, data: Path, found: dict[str, Any], small: bool) -> None:
    if job.name not in found.get(job.task, {}):
        printed, few = (quick.printed, ["--rows", "94"]) if small else (children.printed, [])
        told = printed(
            "benchmarks.objectives.run", *job.command(data), *few, name=f"{job.task}: {job.name}",
            environment=children.one_thread(),
        )  # fmt: skip
        record.note(NAME, found, job.task, {job.name: told})
        print(f"{job.task}: {job.name}: validation {told['validation']['accuracy']:.2f} %", flush=True)


def tuning_jobs(task: str, way: str, found: dict[str, Any]) -> list[Job]:
    return [Job(task, _tuned_at(task, way), way, words, TUNING_SEED) for words in candidates(task, way, found)]


def best_words(task: str, way: str, found: dict[str, Any]) -> tuple[str, ...] | None:
    """The candidate that is best on the validation rows; None where none was tried."""
    kept = found.get(task, {})
    tried = {job.words: kept[job.name]["validation"] for job in tuning_jobs(task, way, found) if job.name in kept}
    if not tried:
        return None
    sign = 1 if _measure(task) == "loss" else -1
    return min(tried, key=lambda words: sign * tried[words][_measure(task)])


def _tuned_at(task: str, way: str) -> int:
    return 1 if way in (FULL, LESS) else 2 if task == "paper" else 4


def _counts(task: str, way: str) -> tuple[int, ...]:
    """Numbers of partitions that a way is trained with."""
    return (1,) if way in (FULL, LESS) else PARTITIONS[task]


def study(tasks: list[str], ways: list[str], data: Path, processes: int, *, finals: bool, small: bool = False) -> None:
    found = record.load(NAME)
    by_themselves = [way for way in ways if way in (FULL, RECOVERY, *TUNED)]
    others = [way for way in ways if way not in by_themselves]
    with ThreadPoolExecutor(processes) as pool:

        def carry_out_all(jobs: Iterator[Job]) -> None:
            list(pool.map(lambda job: carry_out(job, data, found, small), list(jobs)))

        for task in tasks:
            # The others are trained as is best for `prototype`, asked for or not.
            for some in (dict.fromkeys([*by_themselves, *(["prototype"] if others else [])]), others):
                carry_out_all(job for way in some for job in tuning_jobs(task, way, found))
            if finals:
                carry_out_all(job for way in (*by_themselves, *others) for job in final_jobs(task, way, found))


def final_jobs(task: str, way: str, found: dict[str, Any]) -> Iterator[Job]:
    if words := best_words(task, way, found):
        yield from (Job(task, count, way, words, seed) for count in _counts(task, way) for seed in SEEDS)


def markdown(found: dict[str, Any]) -> str:
    """One table for each network: its ways, those that were tuned and no more at the end."""
    lines: list[str] = []
    for task, counts in PARTITIONS.items():
        if task not in found:
            continue
        lines += [
            "",
            f"### {TITLES[task]}",
            "",
            f"| | tuning | {' | '.join(f'P = {count}' for count in counts)} | MACs | chosen |",
        ]
        lines.append(f"|---|---|{'---|' * len(counts)}---|---|")
        rows = [_row(task, way, words, found) for way in (FULL, *BESIDE, *IDEAS) if (words := best_words(task, way, found))]
        lines += [line for _, line in sorted(rows, key=lambda row: row[0])]
    return "\n".join(lines)


def _row(task: str, way: str, words: tuple[str, ...], found: dict[str, Any]) -> tuple[bool, str]:
    """(whether it was tuned only, its line)."""
    kept = found[task]
    cells, macs = [], []
    for count in _counts(task, way):
        runs = [kept[name] for seed in SEEDS if (name := Job(task, count, way, words, seed).name) in kept]
        cells.append(_cell(task, runs))
        macs += [f"{run['macs']:.2f}" for run in runs[:1]]
    tuned = kept[Job(task, _tuned_at(task, way), way, words, TUNING_SEED).name]["validation"][_measure(task)]
    only = not macs
    cells *= len(PARTITIONS[task]) // len(cells)
    return only, f"| {way} | {tuned:.{_digits(task)}f} | {' | '.join(cells)} | {', '.join(macs)} | {' '.join(words)} |"


def _measure(task: str) -> str:
    return "loss" if task == "gpt" else "accuracy"


def _digits(task: str) -> int:
    return 3 if task == "gpt" else 1


def _cell(task: str, runs: list[dict[str, Any]]) -> str:
    values, digits = [run["test"][_measure(task)] for run in runs], _digits(task)
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}" if len(values) > 1 else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--tasks", default=",".join(PARTITIONS))
    parser.add_argument("--ideas", default=",".join((*BESIDE, *IDEAS)), help="full training is always one more")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tune-only", action="store_true", help="no seeds 0, 1 and 2 yet")
    parser.add_argument("--table", action="store_true")
    quick.add_to(parser)
    options = parser.parse_args()
    if options.table:
        print(markdown(record.load(NAME)))
        return
    if options.data_dir is None and not options.quick:
        parser.error("give --data-dir")
    ideas = options.ideas.split(",")
    if unknown := set(ideas) - {*BESIDE, *IDEAS}:
        parser.error(f"unknown ideas {', '.join(sorted(unknown))}; expected some of: {', '.join((*BESIDE, *IDEAS))}")
    with quick.places(options.quick) as docs:
        if options.quick:
            study(["paper"], [FULL, "prototype"], quick.data(docs / "data"), 1, finals=True, small=True)
            print(markdown(record.load(NAME)))
            return
        tasks, finals = options.tasks.split(","), not options.tune_only
        study(tasks, [FULL, *ideas], options.data_dir, options.processes, finals=finals)


if __name__ == "__main__":
    main()
