#!/usr/bin/env bash
# Everything that only a GPU can tell, in one call of under nine minutes: tests, proof of equal bits, contract grid, peers.
#
#     benchmarks/gpu.sh [folder of wheels]
#
# The wheels are for a machine that reaches no package index. Results go to benchmarks/results/*-gpu.json and, where OUT is
# set, are copied there. A part that fails is reported and does not keep the next one from running.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ $# -gt 0 ]; then
    $python -m pip install -q --no-index --find-links "$1" pytest pytest-xdist hypothesis tyro rich psutil nvidia-ml-py ptflops \
        safetensors scikit-learn xxhash
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
failed=""
part() { # name, seconds, command
    echo "== $1"
    timeout "$2" "${@:3}" || failed="$failed $1"
}
part tests 100 $python -m pytest -q -n0 -m gpu tests
part verify 60 $python -m seqpart verify --device cuda --mem-limit 1.5GB --width 1024 --depth 12 --batch-size 64 --steps 2
part grid 280 $python -m benchmarks.contract_grid --seconds 230
part peers 80 $python -m benchmarks.peers.on_gpu --network S --limit 2GB
[ -n "${OUT:-}" ] && cp benchmarks/results/*-gpu.json "$OUT"/
echo "failed:${failed:- nothing}"
[ -z "$failed" ]
