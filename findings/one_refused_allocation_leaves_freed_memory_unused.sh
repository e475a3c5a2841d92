#!/usr/bin/env bash
# torch 2.14.1, glibc 2.36: a process that has freed 400 MB of small tensors makes as many again in the same memory. If one allocation
# was refused in between, as by a limit on data, and its error was caught, the new tensors take 400 MB more: glibc goes on in another
# heap (arena) in the thread to which the first one had to refuse something, and what is free in the first is not used by it again.
# So to catch "not enough memory" and go on with a smaller batch can cost more memory than was held before.
# Fails if it does otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.14.1 numpy
cat > "$folder/again.py" <<'PY'
import resource
import sys

import torch


def held():
    """Anonymous memory of this process, in MB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) // 1000


def tensors():
    return [torch.ones(25_000) for _ in range(4_000)]


torch.set_num_threads(1)
first = tensors()
last = first[-1]  # the end of the heap stays in use, so that nothing is given back
del first
before = held()
if sys.argv[1] == "refused":
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (4_000_000_000, hard))
    try:
        torch.empty(10_000_000_000)
    except RuntimeError as error:
        assert "allocate" in str(error), error
    else:
        raise AssertionError("it was not refused")
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
again = tensors()
print(held() - before)
PY
"$folder/env/bin/python" - <<'PY'
import platform

import torch

print("torch", torch.__version__, *platform.libc_ver())
PY
plain=$("$folder/env/bin/python" "$folder/again.py" plain)
refused=$("$folder/env/bin/python" "$folder/again.py" refused)
echo "400 MB freed and made again: $plain MB more; after a refused allocation: $refused MB more"
test "$plain" -lt 40
test "$refused" -gt 300
