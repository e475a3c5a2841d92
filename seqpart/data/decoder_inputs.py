"""Adds the decoder's inputs that models of transformers make of labels: only the loss gets labels, and blocks get inputs."""

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from seqpart.capture.inputs import forward_parameters
from seqpart.data.items import change_items
from seqpart.data.splits import Split, is_pair, x_and_y
from seqpart.data.test_sets import are_named

_NAME = "decoder_input_ids"
_MASKED = {"EncoderDecoderModel", "Pix2StructForConditionalGeneration"}
"""Models that make a mask of them, too."""
Shift = Callable[[torch.Tensor], torch.Tensor]


def with_decoder_inputs(data: Any, model: object) -> Any:
    """Returns data, a batch, or several sets by name, with `decoder_input_ids` beside the inputs where `model` makes them of
    labels (rows, positions), as T5, BART and Whisper do; other data as they are."""
    shift = _shift_of(model)
    if shift is None or data is None or isinstance(data, Split | str):
        return data
    if are_named(data):
        return {name: with_decoder_inputs(part, model) for name, part in data.items()}
    main = str(getattr(model, "main_input_name", "input_ids"))
    if isinstance(data, Mapping | tuple) or is_pair(data):
        return _with_shifted(data, shift, main)
    if isinstance(data, DataLoader) and data.collate_fn is not default_collate:
        loader = copy.copy(data)
        object.__setattr__(loader, "collate_fn", partial(_collated, data.collate_fn, shift, main))
        return loader
    return change_items(data, lambda item, _: _with_shifted(item, lambda labels: shift(labels[None])[0], main, dims=1))


def _shift_of(model: object) -> Shift | None:
    """Returns what makes decoder_input_ids of labels in the model's forward; None if it does not, as far as names tell."""
    of_peft: Any = getattr(model, "get_base_model", None)  # whose forward may take anything
    base: Any = model if of_peft is None else of_peft()
    kinds = {kind.__name__: sys.modules.get(kind.__module__) for kind in type(base).__mro__}
    if all(one.name != _NAME for one in forward_parameters(base)) or _MASKED & kinds.keys():
        return None
    if callable(own := getattr(base, "prepare_decoder_input_ids_from_labels", None)):
        return own  # type: ignore[no-any-return]
    homes = [module for name, module in kinds.items() if name.endswith("ForConditionalGeneration")]
    shift = next(filter(None, (getattr(home, "shift_tokens_right", None) for home in homes)), None)
    if shift is None or len(inspect.signature(shift).parameters) != 3:
        return None
    return lambda labels: shift(labels, base.config.pad_token_id, base.config.decoder_start_token_id)


def _with_shifted(rows: Any, shift: Shift, main: str, dims: int = 2) -> Any:
    """Returns a row or a batch with shifted labels, if its labels are whole numbers of `dims` dimensions."""
    if not isinstance(rows, Mapping) and not (isinstance(rows, tuple | list) and len(rows) == 2):
        return rows
    if isinstance(rows, Mapping) and "labels" not in rows:
        return rows
    x, y = x_and_y(rows, "")
    if isinstance(y, Mapping) or (isinstance(x, Mapping) and {_NAME, "decoder_inputs_embeds"} & set(x)):
        return rows
    try:
        labels = torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError):  # texts, or rows of several lengths
        return rows
    if labels.ndim != dims or labels.is_floating_point() or not (isinstance(x, Mapping) or hasattr(x, "shape")):
        return rows
    own = dict(rows if isinstance(rows, Mapping) else x if isinstance(x, Mapping) else {main: x})
    own[_NAME] = shift(labels.long())
    return own if isinstance(rows, Mapping) else (own, y)


def _collated(collate: Callable[[list[Any]], Any], shift: Shift, main: str, items: list[Any]) -> Any:
    """Collates items, and adds shifted labels to the batch."""
    return _with_shifted(collate(items), shift, main)
