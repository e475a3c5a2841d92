"""A first look at a GPU, in seconds: versions, what NVML says of this process, links, direct I/O, the cap, alignment, chance.

    python -m benchmarks.gpu.probe                           on a GPU
    python -m benchmarks.gpu.probe --device sim --quick      what of it the simulated device answers

One row after the other is printed and kept: a call that is cut has those before it. Results: benchmarks/results.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.gpu import refusing_in_words
from benchmarks.gpu.assumptions import kept
from benchmarks.gpu.measures import MIB, Bench, Row
from seqpart.device.device import DOWN, UP
from seqpart.device.opening import open_device
from seqpart.device.pages import bytes_of
from seqpart.device.usage import MemoryUsage
from seqpart.store.direct import DirectFile
from seqpart.store.layout import ALIGNMENT

_PACKAGES = ("torch", "torchvision", "transformers", "timm", "peft", "bitsandbytes", "numpy", "tyro", "msgspec", "nvidia-ml-py")
_LOOKS = 20


def versions(bench: Bench) -> Iterator[Row]:
    found = [f"python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    yield Row(what="packages", note=", ".join(found))
    if bench.device.kind == "cuda":
        import pynvml

        pynvml.nvmlInit()
        capability = ".".join(map(str, torch.cuda.get_device_capability(bench.device.torch)))
        libraries = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        yield Row(
            what="card", note=f"{bench.device.name}, {capability}, {libraries}, driver {pynvml.nvmlSystemGetDriverVersion()}"
        )


def nvml(bench: Bench) -> Iterator[Row]:
    usage = MemoryUsage(bench.device)
    began = time.perf_counter()
    for _ in range(_LOOKS):
        held = usage.read()
    yield Row(what="a look at what is held", unit="s", measured=(time.perf_counter() - began) / _LOOKS, note=usage.source)
    yield Row(what="held beside the allocator's memory", unit="B", measured=held - bench.device.reserved())


def links(bench: Bench) -> Iterator[Row]:
    device, nbytes = bench.device, 4 * MIB if bench.quick else 256 * MIB
    began = time.perf_counter()
    pinned, there = device.host(nbytes), device.empty(nbytes)
    yield Row(what=f"pinning {nbytes // MIB} MiB", unit="s", measured=time.perf_counter() - began)
    hosts = {"pinned": pinned[:nbytes]}
    if device.kind == "cuda":
        hosts["pageable"] = torch.zeros(nbytes, dtype=torch.uint8)
    for name, host in hosts.items():
        for way, source, target in ((UP, host, there), (DOWN, there, host)):

            def copy(way: str = way, source: torch.Tensor = source, target: torch.Tensor = target) -> None:
                with device.copying(way):
                    device.copy(source[:nbytes], target[:nbytes])
                    device.wait(device.mark())

            assumed = bench.table("h2d" if way == UP else "d2h") if name == "pinned" else None
            yield Row(
                what=f"copies {way}, {name}", unit="B/s", assumed=assumed, measured=nbytes / bench.seconds(copy, repeats=3)
            )


def direct(bench: Bench) -> Iterator[Row]:
    """Files around the page cache, from and into pinned memory."""
    nbytes = 4 * MIB
    host = bench.device.host(nbytes)
    piece = bytes_of(host)
    with DirectFile.unnamed(bench.folder) as file:
        file.write_from(piece, 0)
        file.finish(nbytes)
        file.read_into(piece, 0)
        way = "around the page cache" if file.direct else "through the page cache"
    yield Row(what="a file from and into pinned memory", note=way)


def cap(bench: Bench) -> Iterator[Row]:
    """An allocation beyond the cap fails as one, and is possible again without it."""
    device, nbytes = bench.device, 4 * MIB if bench.quick else 256 * MIB
    device.release_cached()
    device.cap(device.reserved() + nbytes // 4)
    try:
        device.empty(nbytes)
        said = "the cap is not kept"
    except Exception as error:
        said = f"{type(error).__name__}, {'known' if device.is_out_of_memory(error) else 'NOT known'} as a failed allocation"
    finally:
        device.cap(None)
    device.empty(nbytes)
    yield Row(what="beyond the allocator's cap", note=said)


def alignment(bench: Bench) -> Iterator[Row]:
    """Products with a weight in a buffer, at multiples of some bytes, beside those with one of its own."""
    place = bench.device.torch
    if bench.device.kind != "cuda":
        return
    for at in (16, 64, 128, 256):
        equal = tried = 0
        for rows, width, out in ((1, 512, 512), (32, 768, 3072), (100, 1024, 1000), (256, 2048, 512)):
            for dtype in (torch.float32, torch.bfloat16):
                x, weight, bias = (torch.randn(*s, device=place, dtype=dtype) for s in ((rows, width), (out, width), (out,)))
                buffer = torch.empty(at + weight.nbytes, dtype=torch.uint8, device=place)
                lying = buffer[at:].view(dtype).view_as(weight).copy_(weight)
                equal += int(torch.equal(F.linear(x, weight, bias), F.linear(x, lying, bias)))
                tried += 1
        assumed = 1.0 if at % ALIGNMENT == 0 else None
        yield Row(what=f"equal products, weights {at} bytes off", unit="share", assumed=assumed, measured=equal / tried)


def chance(bench: Bench) -> Iterator[Row]:
    """Backward passes with the same bits when they are repeated: others need deterministic kernels."""
    place = bench.device.torch
    if bench.device.kind != "cuda":
        return
    image, kernel = torch.randn(32, 64, 56, 56, device=place), torch.randn(64, 64, 3, 3, device=place)
    table, words = torch.randn(1000, 256, device=place), torch.randint(0, 1000, (64, 512), device=place)
    heads = torch.randn(4, 8, 512, 64, device=place, dtype=torch.bfloat16)
    cases: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = {
        "a convolution's weight": (kernel, lambda weight: F.conv2d(image, weight, padding=1)),
        "an embedding": (table, lambda weight: F.embedding(words, weight)),
        "attention in bfloat16": (heads, lambda q: F.scaled_dot_product_attention(q, heads, heads, is_causal=True)),
    }
    for name, (leaf, run) in cases.items():
        found = []
        for _ in range(4):
            leaf = leaf.detach().requires_grad_()
            run(leaf).float().square().sum().backward()
            found.append(leaf.grad)
        same = sum(torch.equal(one, found[0]) for one in found if one is not None and found[0] is not None) / len(found)
        yield Row(what=f"equal gradients of {name}", unit="share", measured=same)


PROBES = (versions, nvml, links, direct, cap, alignment, chance)


@refusing_in_words
def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, sim or sim:CARD")
    parser.add_argument("--folder", type=Path, default=Path(), help="whose disk is tried (default: here)")
    parser.add_argument("--quick", action="store_true", help="sizes that a processor can do, for the simulated device")
    options = parser.parse_args(words)
    device = open_device(options.device)
    bench = Bench(device=device, assumed=device.hardware, folder=options.folder, quick=options.quick)
    return int(any(row.note.startswith("failed") for row in kept("gpu-probe", bench, PROBES)))


if __name__ == "__main__":
    sys.exit(main())
