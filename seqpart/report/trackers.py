"""Wrappers of the trackers' libraries, which are optional. Their memory counts against the limit: they load before the plan.

TensorBoard's writer is that of torch, with the package tensorboard, or else that of tensorboardX. Weights & Biases runs a
process beside ours, which counts too; with WANDB_MODE=offline it needs no network.
"""

import inspect
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from seqpart.config import TrackerName
from seqpart.errors import OptionError, refusing


def load(names: Sequence[TrackerName]) -> None:
    """Imports the trackers' libraries, starts their processes and lets each log once, so that the memory they keep is taken
    before a plan is made. Raises OptionError, with the command that installs what is missing."""
    fresh = [name for name in names if name not in _LOADED]
    for name in fresh:
        _LIBRARIES[name]()
    for name in fresh:
        with tempfile.TemporaryDirectory() as folder:
            tracker = opened(name, Path(folder), "first", {}, None, mode="offline")
            tracker.log(1, {"loss": 1.0})
            tracker.close()
        _LOADED.add(name)


def opened(
    name: TrackerName, folder: Path, run: str, settings: Mapping[str, Any], behind: int | None, *, mode: str | None = None
) -> "TensorBoard | WeightsAndBiases":
    """Returns a tracker that writes below `folder` about `run`, which is new or resumes after `behind` updates.

    mode: of wandb; None: as WANDB_MODE says.
    """
    if name == "tensorboard":
        return TensorBoard(folder / "tensorboard" / run, behind)
    return WeightsAndBiases(folder, run, settings, mode)


class TensorBoard:
    def __init__(self, folder: Path, behind: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # What an earlier process logged about later updates is void: they are made again.
        self._writer = _writer()(str(folder), purge_step=None if behind is None else behind + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs values after so many updates."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Returns when everything logged is saved."""
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, folder: Path, run: str, settings: Mapping[str, Any], mode: str | None) -> None:
        wandb = _wandb()
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "seqpart"), id=run, name=run, dir=str(folder), config=dict(settings),
            resume="allow", mode=mode, settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _writer() -> Any:
    for module in ("torch.utils.tensorboard", "tensorboardX"):
        with suppress(ImportError):
            return import_module(module).SummaryWriter
    raise OptionError(
        "--log tensorboard: neither tensorboard nor tensorboardX is installed. pip install tensorboard, or leave it out."
    )


def _wandb() -> Any:
    try:
        import wandb
    except ImportError:
        raise OptionError("--log wandb: wandb is not installed. pip install wandb, or leave it out.") from None
    return wandb


def _wandb_with_login() -> None:
    wandb = _wandb()
    if os.environ.get("WANDB_MODE", "online") != "online":
        return
    if "prompt" not in inspect.signature(wandb.login).parameters:  # older versions would ask, and `init` refuses itself
        return
    with refusing(lambda error: OptionError(f"--log wandb: {type(error).__name__}: {error}. Or set WANDB_MODE=offline.")):
        is_known = wandb.login(prompt=False)  # there may be no server, or a key that it does not know
    if not is_known:
        raise OptionError("--log wandb: nobody is logged in. Run wandb login, or set WANDB_MODE=offline.")


_LIBRARIES: dict[TrackerName, Callable[[], object]] = {"tensorboard": _writer, "wandb": _wandb_with_login}
_LOADED: set[TrackerName] = set()
"""Trackers that this process has loaded."""
