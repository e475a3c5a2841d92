# Sourced by smoke.sh, contract.sh and speed.sh, which set `name` and `limit`, the seconds that the call may take.
#
# `part NAME SECONDS COMMAND...` runs a part whatever became of those before it. What it said and found is kept at once, also in
# $OUT where that is set. `finish` prints the page. The one argument of a call is a folder of wheels that the machine lacks, for
# one that reaches no package index: they are installed beside, without what they depend on.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ $# -gt 0 ]; then
    if ! timeout 60 $python -m pip install -q --no-index --no-deps --no-compile --target "$work/packages" "$1"/*.whl; then
        echo "refused: $name could not install the wheels of $1." >&2
        exit 3
    fi
    export PYTHONPATH="$PYTHONPATH:$work/packages"
fi
# This also reads torch from the disk once, which may take half a minute and would be the first part's.
if ! timeout 90 $python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "refused: $name checks a GPU, and none was found." >&2
    exit 3
fi
touch "$work/begun" "$work/parts.tsv"

part() { # name, seconds, command
    local began=$SECONDS status=0 seconds=$((limit - SECONDS - 8))
    [ "$seconds" -gt "$2" ] && seconds=$2
    echo "== $1"
    if [ "$seconds" -lt 5 ]; then
        printf '%s\t0\tleft out\n' "$1" >>"$work/parts.tsv"
        return
    fi
    timeout -k 5 "$seconds" "${@:3}" >"$work/$1.log" 2>&1 || status=$?
    printf '%s\t%s\t%s\n' "$1" $((SECONDS - began)) $status >>"$work/parts.tsv"
    [ -z "${OUT:-}" ] || collect
}

collect() { # into $OUT, whatever there is by now
    find benchmarks/results -name '*.json' -newer "$work/begun" -exec cp {} "$OUT"/ \;
    tail -n +1 "$work"/*.log >"$OUT/log.txt"
    find "$work" -maxdepth 1 \( -name '*.toml' -o -name 'trace.json' \) -exec cp {} "$OUT"/ \;
}

finish() {
    $python -m benchmarks.gpu.page "$work" >"$work/page.txt"
    local good=$?
    cat "$work/page.txt"
    [ -z "${OUT:-}" ] || { collect; cp "$work/page.txt" "$OUT"/; }
    exit $good
}
