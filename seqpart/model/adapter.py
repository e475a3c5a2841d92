"""The adapter of a peft model alone, as peft's own save_pretrained leaves it: the weights that learn, and the configuration."""

from pathlib import Path
from typing import Any

from safetensors import safe_open

from seqpart.errors import OptionError
from seqpart.store.direct import explained


def is_adapted(model: object) -> bool:
    """Whether it is a model of peft."""
    return hasattr(model, "peft_config") and hasattr(model, "save_pretrained") and hasattr(model, "active_adapters")


def write_adapter(folder: Path, weights: Path, model: Any) -> None:
    """What `PeftModel.from_pretrained(base, folder)` reads, from the file `weights` of all the model's tensors, of which only
    those of adapters are read. Raises OptionError for a model of another kind, StoreError where that cannot be written."""
    if not is_adapted(model):
        raise OptionError(
            f"save_adapter: expected a run of a peft model, as get_peft_model makes it; found {type(model).__name__}. "
            "`weights` and save_pretrained have the whole model."
        )
    try:
        with safe_open(weights, framework="pt") as file:
            learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
            named = [name for name in file.keys() if name in learned or _is_of(model, name)]  # noqa: SIM118
            state = {name: file.get_tensor(name) for name in named}
        # Whether embeddings were made larger, peft would ask the hub; those that learn are among its modules to save.
        model.save_pretrained(str(folder), state_dict=state, save_embedding_layers=False)
    except OSError as error:
        raise explained(error, folder) from None


def _is_of(model: Any, name: str) -> bool:
    """Whether a tensor belongs to an adapter, which is a part of its name."""
    return bool(set(model.peft_config) & set(name.split(".")))
