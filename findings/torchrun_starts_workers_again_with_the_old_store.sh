#!/usr/bin/env bash
# torch 2.14.1: after --max-restarts torchrun starts all workers again with the key-value store that it gave to those before, and
# what they had written is still in it: env:// puts the keys of every attempt in one place, and so does init_process_group. (A
# comment in rendezvous.py says that each retry has a new store.) gloo writes its addresses there, so that new workers may read
# those of workers that have ended, and wait for them. Who sets up process groups in a job that may be restarted needs a
# prefix of their own: dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store). Fails if torch does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy
cd "$folder"
cat > worker.py <<'PY'
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
store, _, _ = next(rendezvous("env://"))
if attempt == "0":
    store.set(f"address of rank {rank}", "of the first attempt")
    sys.exit(1)
print(f"torch {torch.__version__}, attempt {attempt}: rank {rank} finds", store.get(f"address of rank {rank}").decode(), flush=True)
own = dist.PrefixStore(attempt, store)
assert not own.check([f"address of rank {rank}"])
PY
"$folder/env/bin/torchrun" --standalone --nproc-per-node=2 --max-restarts=1 worker.py > out.txt 2> err.txt || { cat err.txt; exit 1; }
cat out.txt
test "$(grep -c 'attempt 1: rank . finds of the first attempt' out.txt)" = 2
