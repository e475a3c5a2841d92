"""The command, driven by a program of a user's: with an optimizer from a function, and with callbacks that do something.

python -m benchmarks.campaign.program WORD... -- OPTIONS OF THE COMMAND

optimizer=NAME             one of benchmarks.campaign.optimizers, in the place of --optimizer
learns=U:ENTRY:0           behind update U (0: before the first) this entry of the model is frozen; with 1 it learns
chdir=K:FOLDER             at the K-th update that this process sees it goes into another working directory
lead=K:FOLDER:LINK...      these links lead to FOLDER
second=K:FOLDER            another thread calls fit, and must be refused
kill=K                     it is killed
"""

if __name__ == "__main__":
    from seqpart.launch.process import prepare_command

    prepare_command(plans=False)  # before torch is loaded

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import seqpart.cli.job
from benchmarks.campaign.optimizers import OPTIMIZERS
from seqpart import train
from seqpart.callbacks import BeginEvent, StepEvent
from seqpart.errors import SeqpartError
from seqpart.runtime.result import Result
from seqpart.trainer import Trainer

MODULE = "benchmarks.campaign.program"


def divided(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The words for this program, and the options of the command."""
    at = arguments.index("--") if "--" in arguments else -1
    return arguments[: max(0, at)], arguments[at + 1 :]


def values_of(words: Iterable[str], name: str) -> list[list[str]]:
    """Of each word of that name, what stands behind it."""
    return [value.split(":") for found, _, value in (word.partition("=") for word in words) if found == name]


def changes_of(words: Iterable[str]) -> list[tuple[int, int, bool]]:
    """(update, entry of the model, whether it learns from then on)."""
    return [(int(update), int(entry), learns == "1") for update, entry, learns in values_of(words, "learns")]


def lead(links: Iterable[str | Path], folder: str | Path) -> None:
    for link in map(Path, links):
        new = link.with_name(f"{link.name}-new")
        new.symlink_to(folder)
        new.replace(link)


def second_fit(folder: str) -> None:
    """Raises RuntimeError unless it is refused in words."""
    told = list[str]()

    def fit() -> None:
        rows = torch.randn(8, 4), torch.arange(8) % 2
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        try:
            Trainer(model, mem_limit="2GB", method="full", batch_size=4, epochs=1, output_dir=Path(folder), quiet=True).fit(
                rows
            )
        except SeqpartError as error:
            told.append(str(error))

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    if not told:
        raise RuntimeError("a second fit, in another thread, was not refused in words")
    print(f"the second fit: {told[0]}", flush=True)


DEEDS: dict[str, Callable[..., object]] = {
    "chdir": os.chdir,
    "lead": lambda folder, *links: lead(links, folder),
    "second": second_fit,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


class Turns:
    """The callback."""

    def __init__(self, model: Any, words: list[str]) -> None:
        self._model, self._changes, self._seen = model, changes_of(words), 0
        self._deeds = [(int(at), name, rest) for name in DEEDS for at, *rest in values_of(words, name)]

    def on_begin(self, event: BeginEvent) -> None:
        self._let_learn(0)

    def on_step(self, event: StepEvent) -> None:
        self._let_learn(event.update)
        self._seen += 1
        for at, name, rest in self._deeds:
            if at == self._seen:
                DEEDS[name](*rest)

    def _let_learn(self, update: int) -> None:
        for at, entry, learns in self._changes:
            if at == update:
                self._model[entry].requires_grad_(learns)


def driven(words: list[str]) -> type[Trainer]:
    class Driven(Trainer):
        def __init__(self, model: object, **options: Any) -> None:
            for (name,) in values_of(words, "optimizer"):
                rate = options.pop("lr")
                for option in ("recovery_lr", "weight_decay", "momentum"):
                    del options[option]
                options["optimizer"] = OPTIMIZERS[name](rate)
            super().__init__(model, **options)

        def fit(self, *data: Any, **options: Any) -> Result:
            return super().fit(*data, **options, callbacks=[Turns(self.model, words)])

    return Driven


def main() -> int:
    words, options = divided(sys.argv[1:])
    sys.argv[1:] = options
    allowed = resource.getrlimit(resource.RLIMIT_DATA)
    with mock.patch.object(seqpart.cli.job, "Trainer", driven(words)):
        code = train.main()
    if (left := resource.getrlimit(resource.RLIMIT_DATA)) != allowed:
        print(f"RLIMIT_DATA was {allowed}, and the run leaves {left}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
