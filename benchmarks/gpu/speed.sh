#!/usr/bin/env bash
# How fast a GPU is trained on, in 420 seconds: a Llama beside plain PyTorch and its offloading, and what hides behind what.
#
#     benchmarks/gpu/speed.sh [folder of wheels]
name=benchmarks/gpu/speed.sh limit=420
. "$(dirname "$0")/parts.sh"
part llama 190 $python -m benchmarks.gpu.llama --seconds 160 --trace "$work/trace.json"
part overlap 45 $python -m benchmarks.gpu.overlap
part llama-3B 120 $python -m benchmarks.gpu.llama --size 3B --limits 16GB,24GB --seconds 80
part frontier 90 $python -m benchmarks.gpu.frontier --seconds 70
part peers 50 $python -m benchmarks.peers.on_gpu --network S --limit 2GB
finish
