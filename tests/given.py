"""What users bring: to the command line a module of models and data sets, most of them unusable, and data files; to a
Trainer a few rows with classes, and a short run of a model on them."""

import struct
import textwrap

import numpy as np
import torch

from seqpart import Trainer

OWN = """
    import mmap, time
    from pathlib import Path
    import torch
    from torch import nn

    def chain(*, middle=None, inputs=64, outputs=10):
        first = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32))
        return [first, *([middle] if middle else []), nn.Linear(32, outputs)]

    class Meddler(nn.Module):
        # Does its mischief in its third forward pass of the run, which has homes: planning runs every block too.
        def __init__(self, mischief):
            super().__init__()
            self.linear, self.mischief, self.calls = nn.Linear(32, 32), mischief, 0

        def forward(self, x):
            if type(x) is torch.Tensor and any(Path().glob("**/homes")):
                self.calls += 1
                if self.calls == 3:
                    self.mischief()
            return self.linear(x)

    def flip():
        (home,) = Path("out/homes").glob("block-00002.*.safetensors")
        data = bytearray(home.read_bytes())
        data[-1] ^= 1
        home.write_bytes(data)

    def fill():
        try:
            with open("small/filler", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
        except OSError:
            pass

    shared = []

    def take():
        shared.append(mmap.mmap(-1, 900 << 20))
        for at in range(0, 900 << 20, 4096):
            shared[0][at] = 1
        time.sleep(0.1)

    fits = chain
    def damages_home(): return chain(middle=Meddler(flip))
    def fills_disk(): return chain(middle=Meddler(fill))
    def takes_memory(): return chain(middle=Meddler(take))
    def narrow(): return chain(inputs=10)
    def few(): return chain(outputs=5)
    def number(): return 7
    def module(): return nn.ModuleList([nn.Linear(64, 10)])
    def empty(): return []
    def no_module(): return [lambda: 3]
    def raises(): raise ValueError("boom")
    def asks(width): return chain()
    value = 3

    def pair(y, x=None):
        x = torch.zeros(len(y), 64) if x is None else x
        return (x, torch.as_tensor(y)), (torch.zeros(2, 64), torch.tensor([0, 1]))

    def one_class(): return pair([3, 3, 3, 3])
    def negative(): return pair([-1, 0, 1, 0])
    def unseen(): return pair([1, 2, 1, 2])
    def sparse(): return pair([0, 1, 0, 10**9])
    def nobody(): return pair([], torch.zeros(0, 64))
    def short(): return pair([0, 1, 0], torch.zeros(4, 64))
    def floats(): return pair([0.0, 1.0, 0.5, 0.5])
    def other_shape(): return (torch.zeros(4, 8), torch.tensor([0, 1, 0, 1])), pair([0, 1])[1]
    def featureless(): return (torch.zeros(4, 0), torch.tensor([0, 1, 0, 1])), (torch.zeros(2, 0), torch.tensor([0, 1]))
    def words(): return ("train", "test")
    def triple(): return 1, 2, 3
"""


def write_own(folder, name="own"):
    (folder / f"{name}.py").write_text(textwrap.dedent(OWN))


def idx(data):
    """An array of bytes as an idx file."""
    return struct.pack(">4B", 0, 0, 8, data.ndim) + struct.pack(f">{data.ndim}i", *data.shape) + data.tobytes()


def write_idx(folder, *, rows=40, labels=None, damage=lambda name, data: data):
    folder.mkdir(exist_ok=True)
    for part, count in (("train", rows), ("t10k", 10)):
        images = np.random.default_rng(0).integers(0, 256, (count, 8, 8), np.uint8)
        y = np.arange(labels if labels is not None and part == "train" else count) % 10
        for name, data in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", y.astype(np.uint8))):
            (folder / name).write_bytes(damage(name, idx(data)))
    return folder


def write_npz(path, *, rows=40, spoil=None):
    x = np.random.default_rng(0).normal(size=(rows, 64)).astype(np.float32)
    if spoil is not None:
        x[7, 3] = spoil
    np.savez(path, x=x, y=np.arange(rows) % 4)
    return path


def classified(rows, shape, classes=3):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, *shape, generator=generator), torch.arange(rows) % classes


def trained(folder, model, shape=None, *, data=None, **options):
    """What a short run in `folder`/run leaves; on `data`, which is tested on too, or on rows of this shape."""
    train, test = (data, data) if data else (classified(48, shape), classified(12, shape))
    options = {"mem_limit": "2GB", "method": "sil", "epochs": 1, "batch_size": 16, "output_dir": folder / "run", **options}
    return Trainer(model, quiet=True, **options).fit(train, test)
