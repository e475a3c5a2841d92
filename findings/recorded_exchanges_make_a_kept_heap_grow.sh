#!/usr/bin/env bash
# torch 2.14.1: a process group records its last 2,000 collectives by default, those of gloo on CPUs too (the flight recorder, for
# finding hangs). Each record is a small piece of memory that is allocated while gradients are there and stays when they go. With
# a C library's heap that keeps what is freed, which saves page faults, gradients of the next update do not fit between them any
# more: a loop of 34 MB of gradients, exchanged in pieces of 1 MB, grows by 300 to 1,000 MB in 50 updates. (glibc's cache of small
# pieces is off here: it makes holes of its own, and hides some of these.) With TORCH_FR_BUFFER_SIZE=0, which is read when the
# first group is made, the same loop does not grow at all. Fails if torch does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy
cd "$folder"
cat > worker.py <<'PY'
import os
from pathlib import Path

import torch
import torch.distributed as dist

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU()) for _ in range(8)))
optimizer, megabytes = torch.optim.SGD(model.parameters(), lr=1e-3), []
for update in range(60):
    model(torch.randn(64, 1024)).square().mean().backward()
    for parameter in model.parameters():
        for piece in parameter.grad.view(-1).split(1 << 18):
            dist.all_reduce(piece)
    optimizer.step()
    optimizer.zero_grad()
    megabytes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20)
if dist.get_rank() == 0:
    records, grown = os.environ.get("TORCH_FR_BUFFER_SIZE", "2,000"), megabytes[-1] - megabytes[10]
    print(f"torch {torch.__version__}, {records} records: {megabytes[10]} MB after 10 updates, {megabytes[-1]} MB after 60")
    assert grown < 20 if records == "0" else grown > 100
dist.destroy_process_group()
PY
export MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2000000000
export GLIBC_TUNABLES=glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0
"$folder/env/bin/torchrun" --standalone --nproc-per-node=2 worker.py 2> err.txt || { cat err.txt; exit 1; }
TORCH_FR_BUFFER_SIZE=0 "$folder/env/bin/torchrun" --standalone --nproc-per-node=2 worker.py 2> err.txt || { cat err.txt; exit 1; }
