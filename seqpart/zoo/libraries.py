"""Models of torchvision, timm and transformers by name: whole, as their libraries make them. Planning cuts them."""

import difflib
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from seqpart.errors import OptionError, SeqpartError, first_line, refusing
from seqpart.model.weight_files import WeightFiles, matched, parameters_on_meta
from seqpart.profile.initial_weights import untie

LIBRARIES = ("torchvision", "timm", "hf")


@dataclass(frozen=True, slots=True)
class Made:
    """A model, whose parameters are on the meta device where `weights` are to fill them."""

    model: nn.Module
    weights: Path | None = None
    partial: bool = False
    """True if the weights may have tensors that the model lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """classes: outputs of the model, and shape: of its rows, where its library lets us choose. seed: of initial weights.
    weights: what it is to begin with; where these are all its tensors (not `partial`), or come from a checkpoint (`resumes`),
    it never exists whole. dtype: of its parameters, of hf:DIR alone. predicts_tokens: whether rows are tokens with one for each
    position to be predicted."""

    classes: int
    shape: tuple[int, ...]
    seed: int
    weights: Path | None = None
    partial: bool = False
    resumes: bool = False
    dtype: torch.dtype | None = None
    predicts_tokens: bool = False


def made(library: str, name: str, asked: Asked) -> Made:
    """Returns the model torchvision:NAME or timm:NAME, or hf:DIR by its config.json, with the weights beside that, if any.

    Raises OptionError for an unknown name, a library that is missing, and where theirs refuses.
    """
    torch.manual_seed(asked.seed)
    if library == "hf":
        return _transformers(name, asked)
    build = {"torchvision": _torchvision, "timm": _timm}[library]
    empty = asked.weights is not None and not asked.partial
    return Made(_empty_or_whole(lambda: build(name, asked.classes, asked.shape), empty), asked.weights, asked.partial)


def _empty_or_whole(build: Callable[[], nn.Module], empty: bool) -> nn.Module:
    """Builds the model on the meta device if `empty`, unless its constructor reads its own values."""
    if empty:
        try:
            with parameters_on_meta():
                return build()
        except OptionError:
            raise
        except Exception:  # it is tried whole, which tells what is wrong
            pass
    return build()


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
        with suppress(TypeError):  # a network of convolutions takes images of any size
            sized: nn.Module = timm.create_model(name, img_size=tuple(shape[1:]), **options)
            return sized
    return _tried(f"timm:{name}", lambda: timm.create_model(name, **options))


def _transformers(name: str, asked: Asked) -> Made:
    folder = Path(name)
    kind, config = _kind_and_config(name, folder, asked.predicts_tokens)
    beside = any(folder.glob("*.safetensors"))
    if asked.weights is None and not beside:
        if pickled := [path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"))]:
            raise OptionError(
                f"--model hf:{name}: found {pickled[0]}, a pickle, which runs what is in it when it is read. Save the model "
                "once more with save_pretrained: then it is safetensors."
            )
        with _default_dtype(asked.dtype or torch.float32):
            return Made(_tried(f"hf:{name}", lambda: kind(config)))
    dtype = asked.dtype or config.dtype or torch.float32
    with _default_dtype(dtype):
        config.dtype = dtype
        model = _tried(f"hf:{name}", lambda: _empty_or_whole(lambda: kind(config), not asked.partial))
    with suppress(SeqpartError):  # whoever is to read them says what is wrong
        untie(model, WeightFiles(asked.weights or folder))
    if asked.weights is not None or asked.resumes:
        return Made(model, asked.weights or folder, asked.partial)
    if (lacks := _lacks(model, folder)) is not None:
        return Made(model, folder, lacks)
    # Their names or shapes are others than the model's: what transformers converts exists whole.
    options = {} if asked.dtype is None else {"dtype": asked.dtype}
    read = {"local_files_only": True, "use_safetensors": True, **options}
    return Made(_tried(f"hf:{name}", lambda: kind.from_pretrained(folder, **read)))


def _lacks(model: nn.Module, folder: Path) -> bool | None:
    """True if the folder has tensors that the model lacks; None if it does not have all of the model's."""
    try:
        files = WeightFiles(folder)
    except OptionError:
        return None
    tensors = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)}
    match = matched(tensors, files.tensors)
    had = {id(tensors[name]) for name in match.found}
    alike = all(tuple(tensors[name].shape) == files.tensors[other].spec.shape for name, other in match.found.items())
    return bool(match.unexpected) if alike and all(id(tensor) in had for tensor in tensors.values()) else None


def _kind_and_config(name: str, folder: Path, predicts_tokens: bool) -> tuple[Any, Any]:
    """The class and the configuration of the model that a directory describes. Where config.json names no class, as that of a
    configuration alone does not, the data may say which: a causal language model."""
    transformers: Any = _library("transformers", "seqpart[hf]")
    if not (folder / "config.json").is_file():
        raise OptionError(
            f"--model hf:{name}: expected a directory with a config.json, as save_pretrained writes it; found none."
        )
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise OptionError(f"--model hf:{name}: config.json cannot be read: {error}") from error
    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if not config.architectures and predicts_tokens and type(config) in causal:
        config.architectures = [causal[type(config)].__name__]
    kind = getattr(transformers, (config.architectures or ["none"])[0], None)
    if kind is None:
        why = f"transformers {transformers.__version__} has none of these"
        if not config.architectures:
            why = f"the class of a {config.model_type} is known without where --data is text:FILE or hf-text:FILE"
        raise OptionError(
            f"--model hf:{name}: config.json names the architectures {config.architectures}, and {why}. Name one that it has, "
            'such as "architectures": ["LlamaForCausalLM"].'
        )
    return kind, config


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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
    with refusing(lambda error: OptionError(f"--model {what}: the library refused: {_short(error)}")):
        return make()


def called(name: str, option: str) -> Any:
    """Calls the function `package.module:function`, also from the current directory, and returns its result.

    Raises OptionError, naming `option`, where there is none and where the user's code fails.
    """
    module_name, _, function_name = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), function_name)):
        raise OptionError(f"{option}: expected package.module:function; found {name!r}.")
    module = _module(module_name, f"{option} {name}")
    function = getattr(module, function_name, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise OptionError(
            f"{option} {name}: {module_name} has no function {function_name!r}. It has {', '.join(public[:8]) or 'none'}."
        )
    cure = "It must run without arguments; --debug shows where it failed."
    with refusing(lambda error: OptionError(f"{option} {name}: calling {function_name}() failed: {_short(error)}. {cure}")):
        return function()


def _module(name: str, asked: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        # For `net.py:make` Python looks for a module `py` in the package `net`.
        cure = f" Give the name of the module: {name.removesuffix('.py')}:FUNCTION." if name.endswith(".py") else ""
        raise OptionError(f"{asked}: no module named {error.name!r} here or among the installed packages.{cure}") from None
    except Exception as error:
        raise OptionError(f"{asked}: importing {name} failed: {_short(error)}. --debug shows where it failed.") from error


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
