#!/usr/bin/env bash
# The first look at a GPU, in 150 seconds: does seqpart run on it, to the bits of full training, and what of it is as assumed?
#
#     benchmarks/gpu/smoke.sh [folder of wheels]
name=benchmarks/gpu/smoke.sh limit=150
. "$(dirname "$0")/parts.sh"
tiny="--mem-limit 1.5GB --width 256 --depth 6 --batch-size 64 --steps 1"
part probe 40 $python -m benchmarks.gpu.probe
part verify 40 $python -m seqpart verify --device cuda --mem-limit 2GB --width 1024 --depth 12 --batch-size 64 --steps 1
part doctor 15 $python -m seqpart doctor
part tests 45 $python -m pytest -v -W default -p no:benchmark -o addopts= -m "gpu and not slow" \
    tests/device/test_device.py tests/runtime/test_partition.py tests/capture/test_made_buffers.py
part sanitizer 35 env TORCH_CUDA_SANITIZER=1 $python -m benchmarks.gpu.sanitized verify --device cuda $tiny
finish
