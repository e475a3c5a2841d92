"""A process of our own, made ready before torch loads: its environment, the C library's cache and NVIDIA's tables.

The command does all of it, and what it starts inherits it. Nothing here is for a process that somebody else's program runs in:
`import seqpart` and `Trainer` never import this, and what a run changes there ends with the run (`Device.running`).
"""

import os
import sys
from types import ModuleType

from seqpart.device.gpu_tables import may_use_gpu, release_gpu_tables
from seqpart.device.heap import Heap
from seqpart.device.process_limits import limited_sizes, set_mark_back
from seqpart.errors import OptionError, StoreError
from seqpart.interrupts import hold_back

VARIABLES = {"GOMP_SPINCOUNT": "1000", "THP_MEM_ALLOC_ENABLE": "0"}
"""Read by the libraries when they load. OpenMP's threads that wait spin for microseconds, which small steps need, and then
sleep: spinning on they would starve the I/O threads. Tensors aligned for huge pages leave holes in a heap that is kept."""
_TUNABLES, _NO_CACHE = "GLIBC_TUNABLES", "glibc.malloc.tcache_count"
_PROGRAMS = ("seqpart", "seqpart.train")


def prepare() -> None:
    """Load torch into a process that does nothing but runs: with less memory, and with threads that do not starve our I/O.

    Distributed tensors cannot be used there. A working directory that is gone, and a process that is too small for torch, end
    the program in words; the libraries would end it in theirs. Raises OptionError where torch is loaded already: then it is too
    late.
    """
    if "torch" in sys.modules:
        raise OptionError("seqpart.launch.prepare() must run before torch loads, and torch is loaded already. Call it first.")
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    try:
        os.getcwd()  # noqa: PTH109 (pathlib is not needed for it)
    except OSError as error:
        _end(f"the working directory cannot be used: {error.strerror}. Go to one that exists.", StoreError.exit_code)
    if not may_use_gpu():
        sys.meta_path.insert(0, _Notice())  # what is held while torch loads counts too
    _load_torch()
    _without_distributed_tensors()


def prepare_command(*, plans: bool = True) -> None:
    """`prepare` for the command. Does nothing where torch is loaded: within another program (a notebook's %run).

    plans: it makes a plan, which depends on the heap: it starts anew without the C library's cache of small pieces.
    """
    if "torch" in sys.modules:
        return
    if plans:
        _restart_without_cache()
    prepare()


def _without_distributed_tensors() -> None:
    """Keeps fake tensors from loading the package of distributed tensors, 7 MB and 0.4 s.

    At the first fake tensor torch looks up the class of distributed tensors, once and for good. Here it finds a class that no
    tensor has: distributed tensors that are made in this process later do not work.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from seqpart.device.compiler import without_compiler

    name = "torch.distributed.tensor"
    stand_in = sys.modules[name] = ModuleType(name)
    vars(stand_in)["DTensor"] = type("DTensor", (), {})
    try:
        with without_compiler(), FakeTensorMode():
            torch.empty(1).uniform_()
    finally:
        del sys.modules[name]


def _restart_without_cache() -> None:
    """Restarts this program without glibc's cache of small pieces, a setting that is read when a process starts.

    Does nothing if it was started without it, if the user has set it, without glibc, within another program, or where help is
    asked for.
    """
    tunables, words = os.environ.get(_TUNABLES, ""), {word.rpartition("/")[2] for word in sys.orig_argv}
    if not Heap.can_be_kept or _NO_CACHE in tunables or words.isdisjoint(_PROGRAMS) or not words.isdisjoint(("-h", "--help")):
        return
    os.environ[_TUNABLES] = ":".join(filter(None, (tunables, f"{_NO_CACHE}=0")))
    hold_back()  # a signal that has come is lost where the program is replaced
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _load_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        small = limited_sizes()
        if not small or "map" not in str(error):
            raise
        _end(
            f"PyTorch does not fit into this process, whose size is limited (ulimit {' '.join(small)}): {error}. "
            "Raise that limit: --mem-limit is what limits a run.",
            OptionError.exit_code,
        )


def _end(message: str, code: int) -> None:
    sys.stderr.write(f"seqpart: {message}\n")
    sys.exit(code)


class _Notice:
    """A module finder that finds nothing, but notices when torch's libraries are loaded."""

    def find_spec(self, *_: object) -> None:
        if "torch._C" in sys.modules:
            sys.meta_path.remove(self)
            if release_gpu_tables():
                # The kernel's mark counts file pages, of which there were many for a moment. What was held before, the tables
                # and torch's libraries, is less than all of torch is.
                set_mark_back()
