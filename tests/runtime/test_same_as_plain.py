"""A run equals the plain PyTorch loop that a reader would write, parameter by parameter, bit for bit, on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from seqpart import Trainer
from seqpart.data.reader import windows
from seqpart.device.device import Device, keyed_seed
from seqpart.methods.objectives import OBJECTIVES, SyntheticLabels
from seqpart.store.row_file import RowLayout
from seqpart.zoo.models import mlp

CLASSES, WIDTH, DEPTH, ROWS = 5, 32, 4, 120
OPTIMIZERS = {
    "adam": lambda params, lr: torch.optim.Adam(params, lr=lr, fused=True),
    "adamw": lambda params, lr: torch.optim.AdamW(params, lr=lr, weight_decay=0.0, fused=True),
    "adafactor": lambda params, lr: torch.optim.Adafactor(params, lr=lr, weight_decay=0.0),
    "sgd": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9, fused=True),
}


def data(rows=ROWS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 12, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator)


def network():
    return mlp(12, CLASSES, width=WIDTH, depth=DEPTH)


def plain_modules(factories, seed):
    """The same initial weights: keyed by (seed, block)."""
    modules = []
    for number, factory in enumerate(factories):
        Device().seed(seed, "build", number)
        modules.append(factory())
    return modules


def train_plainly(modules, x, y, loss, *, optimizer, lr, epochs, batch, micro_batch, order):
    chain = nn.Sequential(*modules).train()
    step = OPTIMIZERS[optimizer](list(chain.parameters()), lr)
    for epoch in range(1, epochs + 1):
        rows = order(epoch)
        for start in range(0, len(rows), batch):
            picked = rows[start : start + batch]
            for at in range(0, len(picked), micro_batch):
                part = picked[at : at + micro_batch]
                value = loss(chain(x[part]), y[part])
                (value if len(part) == len(picked) else value * (len(part) / len(picked))).backward()
            step.step()
            step.zero_grad(set_to_none=True)
    return chain.eval()


def row_order(x, shuffle, seed, partition):
    layout = RowLayout(tuple(x.shape[1:]), x.dtype)

    def order(epoch):
        key = (seed, "order", partition, epoch) if shuffle else None
        return torch.cat([torch.from_numpy(w.rows) for w in windows(len(x), layout.chunk_rows, key)])

    return order


def assert_equal(path, modules):
    found = load_file(path)
    expected = {f"{number}.{name}": t for number, m in enumerate(modules) for name, t in m.state_dict().items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("batch", "micro_batch"), [(32, 32), (50, 20), (120, 7)])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.few(3)
def test_full_equals_a_plain_loop(optimizer, batch, micro_batch, shuffle, tmp_path):
    (x, y), seed = data(), 3
    momentum = {"momentum": 0.9} if optimizer == "sgd" else {}
    result = Trainer(
        network(), method="full", mem_limit="2GB", optimizer=optimizer, lr=1e-2, epochs=2, batch_size=batch,
        micro_batch_size=micro_batch, shuffle=shuffle, seed=seed, output_dir=tmp_path / "run", quiet=True, **momentum,
    ).fit((x, y), data(30, 1))  # fmt: skip
    modules = plain_modules(network(), seed)
    train_plainly(
        modules, x, y, F.cross_entropy, optimizer=optimizer, lr=1e-2, epochs=2, batch=batch, micro_batch=micro_batch,
        order=row_order(x, shuffle, seed, 0),
    )  # fmt: skip
    assert_equal(result.weights, modules)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("partitions", [(0, 3), (0, 2, 4)])
@pytest.mark.few(4)
def test_sil_equals_the_papers_algorithm_written_plainly(objective, partitions, tmp_path):
    (x, y), (x_test, y_test), seed = data(), data(30, 1), 5
    result = Trainer(
        network(), method="sil", mem_limit="2GB", objective=objective, partitions=partitions, optimizer="sgd", momentum=0.9,
        lr=1e-2, epochs=2, batch_size=25, shuffle=True, seed=seed, output_dir=tmp_path / "run", quiet=True,
    ).fit((x, y), (x_test, y_test))  # fmt: skip
    starts = list(partitions)
    modules = plain_modules(network(), seed)
    for p, first in enumerate(starts):
        part = modules[first : starts[p + 1] if p + 1 < len(starts) else len(modules)]
        last = p == len(starts) - 1
        loss = F.cross_entropy if last else plain_objective(objective, seed, p)
        chain = train_plainly(
            part, x, y, loss, optimizer="sgd", lr=1e-2, epochs=2, batch=25, micro_batch=25, order=row_order(x, True, seed, p)
        )
        with torch.no_grad():
            # In batches of 25, as the run does it: a matrix product of other height may round differently.
            x = torch.cat([chain(rows) for rows in x.split(25)])
            x_test = torch.cat([chain(rows) for rows in x_test.split(25)])
    assert_equal(result.weights, modules)
    assert result.accuracy == float((x_test.argmax(1) == y_test).sum()) / len(y_test)


def plain_objective(objective, seed, p):
    def labels(normal):
        key = keyed_seed(seed, "sil", p)
        rows = SyntheticLabels(key, CLASSES, WIDTH, normal=normal, finish=id, most=1 << 20, device=torch.device("cpu")).kept
        return rows.clone()

    if objective == "mse":
        sil = 10.0 * labels(normal=False)  # eq. 1 of the paper, kappa 10
        return lambda h, y: (h - sil[y]).square().mean()
    directions = labels(normal=True)
    directions /= directions.norm(dim=1, keepdim=True)
    if objective == "orthogonal":
        left, _, right = torch.linalg.svd(directions.double(), full_matrices=False)
        directions = F.normalize((left @ right).float(), dim=1)
    scale = (8.0 if p else 16.0) / WIDTH**0.5

    def cosine(h, y):
        return F.cross_entropy((F.layer_norm(h, (WIDTH,)) * scale) @ directions.T, y)

    return cosine


def fitted(tmp_path, name, model=None, **options):
    options = {"method": "sil", **options}
    trainer = Trainer(model or network(), mem_limit="2GB", output_dir=tmp_path / name, quiet=True, seed=1, **options)
    return trainer.fit(data(), data(30, 1))


def test_one_partition_of_sil_is_full_training(tmp_path):
    one = fitted(tmp_path, "sil", partitions=1)
    full = fitted(tmp_path, "full", method="full")
    assert one.weights.read_bytes() == full.weights.read_bytes()


@pytest.mark.parametrize("cache_dtype", ["fp32", "bf16"])
@pytest.mark.few(1)
def test_the_ram_tier_gives_the_same_bits_as_the_disk(cache_dtype, tmp_path):
    disk = fitted(tmp_path, "disk", partitions=3, cache_dtype=cache_dtype)
    ram = fitted(tmp_path, "ram", partitions=3, cache_dtype=cache_dtype, ram_limit="100MB")
    assert disk.weights.read_bytes() == ram.weights.read_bytes()
    assert {part.tier for part in disk.plan.partitions} == {"disk"}
    assert {part.tier for part in ram.plan.partitions} == {"ram"}


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(tmp_path):
    def dropping():
        return [lambda f=f: nn.Sequential(f(), nn.Dropout(0.3)) for f in network()[:-1]] + [network()[-1]]

    first = fitted(tmp_path, "a", dropping(), partitions=2)
    torch.rand(17)  # the caller's own random numbers must not matter
    second = fitted(tmp_path, "b", dropping(), partitions=2)
    third = Trainer(dropping(), mem_limit="2GB", method="sil", output_dir=tmp_path / "c", quiet=True, seed=2, partitions=2).fit(
        data(), data(30, 1)
    )
    assert first.weights.read_bytes() == second.weights.read_bytes()
    assert first.weights.read_bytes() != third.weights.read_bytes()


def test_a_run_leaves_the_callers_random_state_alone(tmp_path):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    fitted(tmp_path, "run", partitions=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_given_alive_is_trained_in_place_and_equals_the_run_from_factories(tmp_path):
    from_factories = fitted(tmp_path, "factories", partitions=2)
    alive = nn.Sequential(*plain_modules(network(), 1))
    result = fitted(tmp_path, "alive", alive, partitions=2)
    assert result.weights.read_bytes() == from_factories.weights.read_bytes()
    assert_equal(result.weights, list(alive))


def test_batch_norm_statistics_and_frozen_blocks_are_exported_as_plain_training_leaves_them(tmp_path):
    def build():
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
        model[0].requires_grad_(False)
        return model

    (x, y), plain = data(), build()
    result = Trainer(
        build(), method="full", mem_limit="2GB", optimizer="adam", lr=1e-2, epochs=2, batch_size=40, shuffle=False,
        output_dir=tmp_path / "run", quiet=True,
    ).fit((x, y), data(30, 1))  # fmt: skip
    optimizer = torch.optim.Adam([p for p in plain.parameters() if p.requires_grad], lr=1e-2, fused=True)
    for _ in range(2):
        for rows, labels in zip(x.split(40), y.split(40), strict=True):
            F.cross_entropy(plain(rows), labels).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert_equal(result.weights, list(plain))


class Odd(nn.Module):
    """Weights behind tensors of odd sizes in the same block, of two types: a scalar of the model's own comes first."""

    def __init__(self, wide):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.layers = nn.ModuleList([nn.Linear(37, 53), nn.Linear(53, 53).to(wide), nn.Linear(53, 53), nn.Linear(53, 19)])
        self.embedded = nn.Parameter(torch.randn(7, 3))

    def forward(self, x):
        x = x * self.scale + self.embedded.mean()
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh().float()
        return x


@pytest.mark.parametrize("method", ["full", "checkpointed", "streamed"])
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.05}], ids=["unclipped", "clipped"])
@pytest.mark.parametrize(("batch", "wide"), [(16, torch.float64), (1, torch.float32)], ids=["last row alone", "row by row"])
@pytest.mark.few(2)
def test_one_row_through_weights_behind_odd_tensors_has_the_bits_of_a_plain_loop(tmp_path, method, options, batch, wide):
    """Tensors lay one right behind the other, so that matrices began off a cache line, where the product with one row rounds
    otherwise; and norms of two types were added up in another order than torch's."""
    torch.manual_seed(0)
    model, plain = Odd(wide), Odd(wide)
    plain.load_state_dict(model.state_dict())
    x, y = torch.randn(33, 37), torch.arange(33) % 19
    optimizer, threads = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0, fused=True), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for at in range(0, 33, batch):
            F.cross_entropy(plain(x[at : at + batch]), y[at : at + batch]).backward()
            if options:
                nn.utils.clip_grad_norm_(plain.parameters(), options["clip_grad_norm"])
            optimizer.step()
            optimizer.zero_grad()
        Trainer(
            model, mem_limit="2GB", method=method, lr=0.01, batch_size=batch, epochs=1, shuffle=False, quiet=True,
            output_dir=tmp_path / "run", **options,
        ).fit((x, y))  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    found = model.state_dict()
    assert {name for name, tensor in plain.state_dict().items() if not torch.equal(found[name], tensor)} == set()


class Squeezed(nn.Module):
    """Its output has no dimension of rows where there is one row."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x).squeeze()


@pytest.mark.parametrize(("method", "batch", "micro"), [("full", 4, 4), ("checkpointed", 3, 1), ("streamed", 1, 1)])
def test_a_model_that_squeezes_its_output_trains_on_batches_that_end_in_one_row(method, batch, micro, tmp_path):
    """It ended in the midst of the run: len() of a tensor without dimensions."""
    torch.manual_seed(0)
    x, y, model = torch.randn(13, 6), torch.randn(13), Squeezed()
    expected = Squeezed()
    expected.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for rows in torch.arange(13).split(batch):
        for part in rows.split(micro):
            (F.mse_loss(expected(x[part]).reshape(-1), y[part]) * (len(part) / len(rows))).backward()
        optimizer.step()
        optimizer.zero_grad()
    result = Trainer(
        model, nn.MSELoss(), lambda parameters: torch.optim.SGD(parameters, lr=0.1), mem_limit="1GB", method=method, epochs=1,
        batch_size=batch, micro_batch_size=micro, shuffle=False, quiet=True, output_dir=tmp_path / "run", save_every="never",
    ).fit((x, y), (x, y))  # fmt: skip
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), expected.parameters(), strict=True))
    assert result.test_loss == pytest.approx(F.mse_loss(expected(x), y).item())
