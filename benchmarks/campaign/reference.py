"""A plain PyTorch loop for a job: `python -m benchmarks.campaign.reference FILE MICRO_BATCHES [WORDS --] [options of the job]`.

tools/profiling's program, with the random numbers of each block drawn by the same keys as seqpart draws them, and with the
micro-batch that the run had: `32`, or `32,16` for a run that went on with half of it after an allocation that failed. At which
update it did, nobody wrote down: a file is written for each, FILE-0.safetensors and so on, while there are updates.
"""

import itertools
import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import numpy as np
import torch
from profiling.plain import Program
from profiling.question import job_of, parsed, way_named
from profiling.trace import StepLog
from safetensors.torch import save_file

from benchmarks.campaign.optimizers import OPTIMIZERS
from benchmarks.campaign.program import changes_of, divided, values_of
from seqpart.cli.job import Job
from seqpart.device.device import Device
from seqpart.model.metrics import Metrics


class Keyed(Program):
    """`changes`: the updates, counted from 0, from which each micro-batch but the first holds. `words`: see program.py."""

    def __init__(self, job: Job, place: Path, micro_batches: list[int], changes: tuple[int, ...], words: list[str]) -> None:
        super().__init__(job, way_named("full"), place, StepLog(place / "steps"))
        self._learns = changes_of(words)
        self._let_learn(0)
        build = next((OPTIMIZERS[name](self._rate) for (name,) in values_of(words, "optimizer")), self._chosen.build)
        self._optimizer = build([parameter for parameter in self.blocks.parameters() if parameter.requires_grad])
        self._parameters = list(self.blocks.parameters())  # whose norm is taken: those that do not learn have no gradients
        self._sizes, self._changes, self._done = [min(size, self._batch) for size in micro_batches], changes, 0
        self._key: tuple[int, ...] = ()
        self._device_of_keys = Device()

    @property
    def updates(self) -> int:
        """Of one epoch."""
        return -(-self._train.count // self._batch)

    def _update(self, numbers: np.ndarray, metrics: Metrics) -> None:
        if self._done:
            self._let_learn(self._done)
            known = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
            new = [one for one in self._parameters if one.requires_grad and id(one) not in known]
            if new:
                self._optimizer.add_param_group({"params": new})
        self._micro = self._sizes[sum(self._done >= change for change in self._changes)]
        self._key = (1 + self._done // self.updates, self._done % self.updates, -1)
        super()._update(numbers, metrics)
        self._done += 1

    def _let_learn(self, update: int) -> None:
        for at, entry, learns in self._learns:
            if at == update:
                self.blocks[entry].requires_grad_(learns)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        epoch, update, micro = self._key
        self._key = (epoch, update, micro + 1)
        for number, block in enumerate(self.blocks):
            self._device_of_keys.seed(self._job.seed, *self._key, number)
            x = block(x)
        return x

    def _autocast(self) -> AbstractContextManager[Any]:
        """Without torch's cache of casts: with it a weight that a recurrent layer uses at every step has its gradients
        added up in bfloat16, and seqpart adds them up in float32."""
        return Device().autocast(self._job.autocast)

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            f"{number}.{name}": tensor.detach().contiguous()
            for number, block in enumerate(self.blocks)
            for name, tensor in block.state_dict().items()
        }


def main(arguments: list[str] | None = None) -> int:
    target, sizes, *rest = sys.argv[1:] if arguments is None else arguments
    words, options = divided(rest)
    micro_batches, place = [int(size) for size in sizes.split(",")], Path(target).parent
    job = job_of(parsed(options), way_named("full"))
    total = Keyed(job, place, micro_batches, (), words).updates * int(job.epochs)
    for number, changes in enumerate(itertools.combinations_with_replacement(range(total + 1), len(micro_batches) - 1)):
        program = Keyed(job, place, micro_batches, changes, words)
        found = program.run()
        save_file(program.weights(), f"{target}-{number}.safetensors")
        said = {"train_losses": found["train_losses"], "changes": changes}
        Path(f"{target}-{number}.json").write_text(json.dumps(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
