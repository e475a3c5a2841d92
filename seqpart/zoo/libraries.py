"""Models of torchvision, timm and transformers by name: whole, as their libraries make them. Planning cuts them."""

import difflib
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from seqpart.errors import OptionError

LIBRARIES = ("torchvision", "timm", "hf")


def made(library: str, name: str, *, classes: int, shape: tuple[int, ...], seed: int) -> nn.Module:
    """torchvision:NAME and timm:NAME with `classes` outputs, for rows of `shape`; hf:DIR as its config.json says, with the
    weights that lie beside it, if there are any. `seed`: of initial weights.

    Raises OptionError for an unknown name, a library that is missing, and where theirs refuses.
    """
    torch.manual_seed(seed)
    return {"torchvision": _torchvision, "timm": _timm, "hf": _transformers}[library](name, classes, shape)


def _torchvision(name: str, classes: int, shape: tuple[int, ...]) -> nn.Module:
    models: Any = _library("torchvision.models", "torchvision")
    _refuse_unknown("torchvision", name, models.list_models())
    options = {"weights_backbone": None} if "backbone" in _arguments(models.get_model_builder(name)) else {}
    return _tried(f"torchvision:{name}", lambda: models.get_model(name, weights=None, num_classes=classes, **options))


def _arguments(function: Callable[..., Any]) -> str:
    return " ".join(function.__wrapped__.__annotations__ if hasattr(function, "__wrapped__") else function.__annotations__)


def _timm(name: str, classes: int, shape: tuple[int, ...]) -> nn.Module:
    timm: Any = _library("timm", "seqpart[hf]")
    _refuse_unknown("timm", name, timm.list_models())
    options: dict[str, Any] = {"num_classes": classes}
    if len(shape) == 3:
        options["in_chans"] = shape[0]
        try:
            sized: nn.Module = timm.create_model(name, img_size=tuple(shape[1:]), **options)
            return sized
        except TypeError:  # a network of convolutions takes images of any size
            pass
    return _tried(f"timm:{name}", lambda: timm.create_model(name, **options))


def _transformers(name: str, classes: int, shape: tuple[int, ...]) -> nn.Module:
    folder, library = Path(name), _library("transformers", "seqpart[hf]")
    if not (folder / "config.json").is_file():
        raise OptionError(
            f"--model hf:{name}: expected a directory with a config.json, as save_pretrained writes it; found none."
        )
    transformers: Any = library
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise OptionError(f"--model hf:{name}: config.json cannot be read: {error}") from error
    kind = getattr(transformers, (config.architectures or ["none"])[0], None)
    if kind is None:
        raise OptionError(
            f"--model hf:{name}: config.json names the architectures {config.architectures}, and transformers "
            f"{transformers.__version__} has none of these. Name one that it has, as LlamaForCausalLM."
        )
    if any(folder.glob("*.safetensors")):
        return _tried(f"hf:{name}", lambda: kind.from_pretrained(folder, local_files_only=True, use_safetensors=True))
    if pickled := [path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"))]:
        raise OptionError(
            f"--model hf:{name}: found {pickled[0]}, a pickle, which runs what is in it when it is read. Save the model once "
            "more with save_pretrained: then it is safetensors."
        )
    return _tried(f"hf:{name}", lambda: kind(config))


def _library(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise OptionError(f"--model: {module} is not there ({error}). pip install '{package}'.") from None


def _refuse_unknown(library: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, 3)
        raise OptionError(
            f"--model {library}:{name}: {library} has no model of that name."
            + (f" Near it: {', '.join(near)}." if near else f" It has {len(known)}, such as {', '.join(sorted(known)[:3])}.")
        )


def _tried(what: str, make: Callable[[], nn.Module]) -> nn.Module:
    try:
        return make()
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        raise OptionError(f"--model {what}: the library refused: {type(error).__name__}: {said}") from error
