#!/usr/bin/env bash
# Two processes share each batch of a residual MLP on digits: the same run as one process with the same micro-batch, bit for bit.
set -eu
out=${1:-runs/torchrun}
model="--model mlp --width 128 --depth 4 --method streamed --partitions 3 --batch-size 64 --micro-batch-size 32 --epochs 2"
torchrun --standalone --nproc-per-node=2 -m seqpart.train --mem-limit 400MB $model --output-dir "$out/two"
OMP_NUM_THREADS=1 python -m seqpart.train --mem-limit 400MB $model --output-dir "$out/one"
cmp "$out/one/model.safetensors" "$out/two/model.safetensors"
echo "the weights of two processes are those of one, byte for byte"
