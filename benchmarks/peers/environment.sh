#!/bin/sh
# Make the environment of a peer: sh benchmarks/peers/environment.sh deepspeed|torch|gpu [FOLDER]
#
# deepspeed  DeepSpeed 0.19.8 on the CPU accelerator, its operators compiled at once (minutes); needs libaio-dev and g++
# torch      PyTorch alone: plain, mapped and FSDP2. seqpart's own environment does as well
# gpu        PyTorch, torchao and accelerate, for a machine with a CUDA GPU
#
# Default FOLDER: benchmarks/peers/.environments/NAME. PYTHON names the interpreter (3.11 or newer).
set -eu

name=${1:-}
here=$(cd "$(dirname "$0")" && pwd)
folder=${2:-$here/.environments/$name}
python=${PYTHON:-python3}

refuse() {
    echo "environment.sh: $1" >&2
    exit 3
}

needs_for_deepspeed() {
    command -v g++ >/dev/null || refuse "deepspeed compiles its operators: g++ is missing. Install it (Debian: apt-get install g++)."
    echo '#include <libaio.h>' | g++ -E -x c++ - >/dev/null 2>&1 ||
        refuse "deepspeed's disk offload needs libaio's header: install it (Debian: apt-get install libaio-dev)."
}

case $name in
deepspeed) needs_for_deepspeed ;;
torch) ;;
gpu) command -v nvidia-smi >/dev/null || refuse "gpu: no NVIDIA driver was found (nvidia-smi is missing)." ;;
*) refuse "expected deepspeed, torch or gpu; found '$name'." ;;
esac
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || refuse "Python 3.11 or newer is needed; name one with PYTHON=..."

mkdir -p "$(dirname "$folder")"
"$python" -m venv "$folder"
. "$folder/bin/activate"
pip install --quiet "torch>=2.11" numpy
case $name in
deepspeed)
    pip install --quiet ninja packaging setuptools wheel scikit-learn
    export DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$folder/extensions" MAX_JOBS="${MAX_JOBS:-2}"
    pip install --quiet --no-build-isolation deepspeed==0.19.8
    # Compiled now: inside a small cgroup the compiler would be what runs out of memory.
    # A build that was interrupted leaves a lock behind, for which the next one would wait for ever.
    rm -f "$TORCH_EXTENSIONS_DIR"/*/lock
    python -c '
from deepspeed.ops.op_builder.cpu import AsyncIOBuilder, CPUAdamBuilder, PinMemoryBuilder, ShareMemCommBuilder
for builder in (AsyncIOBuilder, CPUAdamBuilder, PinMemoryBuilder, ShareMemCommBuilder):
    builder().load()
'
    ;;
gpu) pip install --quiet torchao==0.18.0 accelerate==1.15.0 ;;
esac
echo "$folder: $(pip list --format freeze 2>/dev/null | grep -E '^(torch|deepspeed|torchao|accelerate)==' | tr '\n' ' ')"
