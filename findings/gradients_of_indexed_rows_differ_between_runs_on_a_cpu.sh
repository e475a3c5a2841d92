#!/usr/bin/env bash
# torch 2.14.1, on a CPU with two threads: the gradient of weight[ids], where ids repeat, differs in its last bits from one run of the
# same program to the next. So training is not reproducible on a CPU either, whatever is seeded, for every model that takes rows of a
# parameter by a tensor of indices (transformers' experts with batched_mm do). The gradients of F.embedding and index_select, the
# same rows by other names, never differ; nor do these with one thread, or with torch.use_deterministic_algorithms(True).
# Fails if torch does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import torch
import torch.nn.functional as F

print("torch", torch.__version__)
ROWS, WIDTH, TAKEN, RUNS = 8, 4096, 512, 30


def gradient(take):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, WIDTH, generator=generator, requires_grad=True)
    ids = torch.randint(0, ROWS, (TAKEN,), generator=generator)
    (take(weight, ids) * torch.randn(TAKEN, WIDTH, generator=generator)).square().sum().backward()
    return weight.grad


def different(take):
    first = gradient(take)
    return sum(not torch.equal(gradient(take), first) for _ in range(RUNS))


WAYS = {
    "weight[ids]": lambda weight, ids: weight[ids],
    "F.embedding": lambda weight, ids: F.embedding(ids, weight),
    "index_select": lambda weight, ids: weight.index_select(0, ids),
}
torch.set_num_threads(2)
found = {name: different(take) for name, take in WAYS.items()}
for name, count in found.items():
    print(f"{name}: {count} of {RUNS} runs have another gradient")
torch.use_deterministic_algorithms(True)
found["deterministic"] = different(WAYS["weight[ids]"])
torch.use_deterministic_algorithms(False)
torch.set_num_threads(1)
found["one thread"] = different(WAYS["weight[ids]"])
print(f"weight[ids] with deterministic algorithms: {found['deterministic']}, with one thread: {found['one thread']}")
assert found.pop("weight[ids]") > 0 and not any(found.values())
PY
