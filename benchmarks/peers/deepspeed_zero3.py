"""DeepSpeed ZeRO-3 in one process on the CPU accelerator, its state in memory (--offload cpu) or on disk (nvme).

Start it with DS_ACCELERATOR=cpu MALLOC_MMAP_THRESHOLD_=65536. Tuned for the least memory; the constants say how. What no
setting takes away: stage 3 keeps the gradients of the whole model in memory (S: 0.4 GB, L: 1.6 GB).
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

from benchmarks.peers.common import Chain, Task, mean_loss, one_process, parser, refuse, task_of, train
from benchmarks.peers.networks import build

SMALL = 10_000
"""Parameters below this many elements stay in memory: norms and biases, about 1 MB in all. A read from disk for each of
them would cost time and save nothing."""
PARAM_BUFFERS = 2
"""Buffers of the largest parameter's size for weights on their way. Three, and reading ahead, took 22 MB more and no less time
in S; one does not do: a weight and what is written back are there at once."""
ADAM_BUFFERS = 4
"""The least for Adam: weight, gradient and two moments."""
AIO = {"block_size": 1 << 20, "queue_depth": 16, "intra_op_parallelism": 2, "single_submit": False, "overlap_events": True}
"""Two threads, as many as there are cores."""


def config(offload: str, largest: int, batch: int, folder: Path) -> dict[str, Any]:
    place: dict[str, Any] = {"device": offload, "pin_memory": False}
    if offload == "nvme":
        place["nvme_path"] = str(folder)
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "zero_optimization": {
            "stage": 3,
            "offload_param": place | {"buffer_count": PARAM_BUFFERS, "buffer_size": largest, "max_in_cpu": 0},
            "offload_optimizer": place | {"buffer_count": ADAM_BUFFERS, "fast_init": False},
            # One parameter at a time in the optimizer, and one group's weights alive in a pass.
            "sub_group_size": largest,
            "stage3_param_persistence_threshold": SMALL,
            "stage3_max_live_parameters": largest,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
            "reduce_bucket_size": largest,
            "overlap_comm": False,
            "contiguous_gradients": False,
        },
        "aio": AIO,
        "gradient_clipping": 0.0,  # without this line it clips at 1
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }


def main() -> None:
    began = time.perf_counter()
    made = parser(__doc__)
    made.add_argument("--offload", choices=["cpu", "nvme"], required=True)
    options = made.parse_args()
    task = task_of(options)
    try:
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError as missing:
        refuse(f"{missing}; make the environment with environment.sh deepspeed")
    one_process()
    deepspeed.init_distributed(dist_backend="gloo")
    largest = largest_parameter(task.blocks)
    settings = config(options.offload, largest, task.batch, options.folder)
    model = Chain(partitioned(task, settings))
    adam = DeepSpeedCPUAdam(model.parameters(), lr=task.rate, adamw_mode=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=settings)

    def update(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = mean_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        return loss.item()

    train(task, update, engine, began)
    sys.stdout.flush()
    os._exit(0)  # its threads end slowly, and what there was to say is said


def partitioned(task: Task, settings: dict[str, Any]) -> list[torch.nn.Module]:
    """Block by block, each put away before the next is built.

    Not built inside zero.Init: there a module's tables are empty already when its own code initializes them. And its
    `dtype` argument is left alone: torch.float32 became bfloat16 in 0.19.8.
    """
    import deepspeed

    blocks, swapper = [], None
    for number, factory in enumerate(task.blocks):
        blocks.append(build(factory, number, task.options.seed))
        put_away = deepspeed.zero.Init(module=blocks[-1], config_dict_or_path=settings, param_swapper=swapper)
        swapper = put_away.param_swapper
    return blocks


def largest_parameter(blocks: list[Any]) -> int:
    """Elements of the largest parameter, found without memory."""
    with torch.device("meta"):
        return max(parameter.numel() for factory in set(blocks) for parameter in factory().parameters())


if __name__ == "__main__":
    main()
