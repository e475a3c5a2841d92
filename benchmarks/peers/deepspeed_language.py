"""DeepSpeed ZeRO-3 on the CPU accelerator, its state on disk: a language model of transformers, from its checkpoint.

    DS_ACCELERATOR=cpu MALLOC_MMAP_THRESHOLD_=65536 PYTHON -m benchmarks.peers.deepspeed_language CHECKPOINT FOLDER

PYTHON is that of environment.sh deepspeed, with transformers installed beside. Settings are those of deepspeed_zero3; layers
are checkpointed. Prints seconds of each update and the most anonymous and shared memory that it held behind the start, when the
model was whole once, as JSON.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

from benchmarks.peers.common import one_process, refuse
from benchmarks.peers.deepspeed_zero3 import config

BATCH, CONTEXT, UPDATES, LETTERS = 4, 64, 10, 29


def held() -> int:
    """Bytes of RssAnon and RssShmem."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


class Peak:
    """The most that was held, looked at 100 times a second."""

    def __init__(self) -> None:
        self.most, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.01):
            self.most = max(self.most, held())


def main() -> None:
    checkpoint, folder = sys.argv[1:]
    try:
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from transformers import AutoModelForCausalLM
    except ImportError as missing:
        refuse(f"{missing}; make the environment with environment.sh deepspeed, and install transformers in it")
    one_process()
    deepspeed.init_distributed(dist_backend="gloo")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").train()
    model.gradient_checkpointing_enable()
    narrow = next(model.parameters()).dtype == torch.bfloat16
    settings = config("nvme", max(parameter.numel() for parameter in model.parameters()), BATCH, Path(folder))
    settings["bf16"] = {"enabled": narrow}
    deepspeed.zero.Init(module=model, config_dict_or_path=settings, dtype=torch.bfloat16 if narrow else None)
    adam = DeepSpeedCPUAdam(model.parameters(), lr=1e-4, adamw_mode=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=settings)
    peak, seconds = Peak(), []
    for ids in torch.randint(LETTERS, (UPDATES, BATCH, CONTEXT)):
        begun = time.perf_counter()
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        seconds.append(round(time.perf_counter() - begun, 3))
    print(json.dumps({"seconds": seconds, "peak": peak.most, "loss": loss.item(), "version": deepspeed.__version__}))
    sys.stdout.flush()
    os._exit(0)  # its threads end slowly, and what there was to say is said


if __name__ == "__main__":
    main()
