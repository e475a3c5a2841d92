#!/usr/bin/env bash
# Everything that only a GPU can tell, in one call of under nine minutes, those parts first that teach most in a second.
#
#     benchmarks/gpu.sh [folder of wheels]
#
# The wheels are for a machine that reaches no package index. Results go to benchmarks/results; where OUT is set, those of this
# call are copied there, with the page that is printed at the end, what the parts said, and the hardware table of this machine
# (seqpart train --device sim:gpu-calibrated.toml). CARD names the table that the measurements stand beside, such as h100.
# A part that fails or takes too long is reported and does not keep the next one from running.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ $# -gt 0 ]; then
    timeout 20 $python -m pip install -q --no-index --find-links "$1" pytest pytest-xdist hypothesis tyro rich psutil \
        nvidia-ml-py ptflops safetensors scikit-learn xxhash
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if ! $python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "refused: benchmarks/gpu.sh checks a GPU, and none was found." >&2
    exit 3
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
touch "$work/begun" "$work/parts.tsv"
part() { # name, seconds, command
    echo "== $1"
    local began=$SECONDS status=0
    timeout -k 5 "$2" "${@:3}" >"$work/$1.log" 2>&1 || status=$?
    printf '%s\t%s\t%s\n' "$1" $((SECONDS - began)) $status >>"$work/parts.tsv"
    tail -n 60 "$work/$1.log"
}
tiny="--mem-limit 1.5GB --width 256 --depth 6 --batch-size 64 --steps 1"
part assumptions 55 $python -m benchmarks.gpu_assumptions --calibrate "$work/gpu-calibrated.toml" ${CARD:+--assume "$CARD"}
part verify 55 $python -m seqpart verify --device cuda --mem-limit 1.5GB --width 1024 --depth 12 --batch-size 64 --steps 2
part sanitizer 45 env TORCH_CUDA_SANITIZER=1 $python -m benchmarks.gpu_sanitized verify --device cuda $tiny
part tests 70 $python -m pytest -q -n0 -m gpu $(grep -rl --include='test_*.py' 'mark\.gpu' tests)
part overlap 45 $python -m benchmarks.gpu_overlap
part frontier 90 $python -m benchmarks.gpu_frontier --seconds 75
part grid 70 $python -m benchmarks.contract_grid --limits 2GB,4GB --methods streamed,seqpart:full --seconds 40
part peers 50 $python -m benchmarks.peers.on_gpu --network S --limit 2GB
$python -m benchmarks.gpu_page "$work" >"$work/page.txt"
good=$?
cat "$work/page.txt"
if [ -n "${OUT:-}" ]; then
    find benchmarks/results -name '*.json' -newer "$work/begun" -exec cp {} "$OUT"/ \;
    tail -n +1 "$work"/*.log >"$OUT/log.txt"
    cp "$work/page.txt" "$OUT"/
    [ -f "$work/gpu-calibrated.toml" ] && cp "$work/gpu-calibrated.toml" "$OUT"/
fi
exit $good
