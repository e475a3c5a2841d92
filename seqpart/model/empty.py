"""Models that never exist whole: their parameters are on the meta device, and get their values from files when a run begins."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_META = "_seqpart_on_meta"


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, modules that are built have their parameters on the meta device, so that a model never exists whole; buffers are
    real."""
    register = nn.Module.register_parameter

    def without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param if param is None or param.is_meta else _on_meta(param))

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _on_meta(param: nn.Parameter) -> nn.Parameter:
    """The same one for the same parameter, which several modules may share."""
    known = getattr(param, _META, None)
    if known is None:
        known = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        setattr(param, _META, known)
    return known
