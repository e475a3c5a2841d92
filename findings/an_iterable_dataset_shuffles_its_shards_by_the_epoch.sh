#!/usr/bin/env bash
# datasets 5.2.0: an IterableDataset that nobody shuffled gives the rows of its shards in another order once set_epoch(n) with n > 0 was called,
# which transformers' Trainer and loaders of accelerate do. A loop without set_epoch sees the rows in order in every epoch; so does one with it
# if there is one shard.
# Fails if datasets does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q datasets==5.2.0
"$folder/env/bin/python" -W ignore - <<'PY'
import datasets

print("datasets", datasets.__version__)
rows = datasets.Dataset.from_dict({"n": list(range(8))})
for shards in (1, 4):
    stream = rows.to_iterable_dataset(num_shards=shards)
    plain = [[row["n"] for row in stream] for _ in range(3)]
    assert plain == [list(range(8))] * 3
    found = []
    for epoch in range(3):
        stream.set_epoch(epoch)
        found.append([row["n"] for row in stream])
        print(f"{shards} shard(s), set_epoch({epoch}): {found[-1]}")
    assert found[0] == plain[0]
    assert (found == plain) is (shards == 1)
    assert all(sorted(order) == plain[0] for order in found)
PY
