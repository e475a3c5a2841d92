#!/usr/bin/env bash
# torch 2.14.1 on a CPU: torch.set_num_threads, called in one thread, changes neither the process, as its page says, nor that thread
# alone. Threads that computed before keep their number; every thread that computes for the first time afterwards takes the new
# one. A pool whose workers ask for one thread each, so that they do not get in each other's way, thereby leaves one thread to
# whatever begins later: a second pool, a DataLoader's or a server's threads, which then compute on one core without a word. The
# thread that made the pool sees its own number unchanged. Setting it there once more, to what it is, helps. Fails if torch does
# otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy
"$folder/env/bin/python" - <<'PY'
from concurrent.futures import ThreadPoolExecutor

import torch


def new_thread():
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


torch.set_num_threads(4)
waiting = ThreadPoolExecutor(1)
waiting.submit(lambda: torch.ones(4) @ torch.ones(4)).result()  # a thread that has computed
before = torch.get_num_threads(), waiting.submit(torch.get_num_threads).result(), new_thread()
with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
    pool.submit(torch.get_num_threads).result()
after = torch.get_num_threads(), waiting.submit(torch.get_num_threads).result(), new_thread()
torch.set_num_threads(torch.get_num_threads())
again = torch.get_num_threads(), waiting.submit(torch.get_num_threads).result(), new_thread()
print(f"torch {torch.__version__}: threads of the main thread, of one that computed before, and of a new one")
print(f"  at first {before}; after a worker asked for 1: {after}; after the main thread asked for its own: {again}")
assert before == (4, 4, 4), before
assert after == (4, 4, 1), after
assert again == (4, 4, 4), again
PY
