"""Fake tensors: shapes and types without memory, and without torch's compiler. See [Note: the compiler]."""

from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from seqpart.memory.compiler import enter, leave, without_compiler


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A FakeTensorMode that takes real tensors too."""

    def __init__(self) -> None:
        with without_compiler():
            super().__init__(allow_non_fake_inputs=True)

    def __enter__(self) -> "FakeMode":
        enter()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            leave()
