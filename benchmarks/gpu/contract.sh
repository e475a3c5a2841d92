#!/usr/bin/env bash
# The contract on a GPU, in 300 seconds: limits kept as NVML sees it from outside, bits, kills, predictions, assumptions.
#
#     benchmarks/gpu/contract.sh [folder of wheels]
#
# CARD names the table that the measurements stand beside, such as h100. gpu-calibrated.toml is a table of this machine:
# seqpart train --device sim:gpu-calibrated.toml.
name=benchmarks/gpu/contract.sh limit=300
. "$(dirname "$0")/parts.sh"
part assumptions 50 $python -m benchmarks.gpu.assumptions --calibrate "$work/gpu-calibrated.toml" ${CARD:+--assume "$CARD"}
part verified 75 $python -m benchmarks.gpu.verified
part resumed 50 $python -m benchmarks.gpu.resumed
part grid 90 $python -m benchmarks.contract_grid --limits 1.5GB,2GB,4GB,8GB --models resnet50,vit_b16 \
    --methods streamed,seqpart:checkpointed,seqpart:full --seconds 70
part tests 60 $python -m pytest -v -W default -p no:benchmark -o addopts= -m gpu tests/tools
finish
