"""Past bugs of settings that were taken and then not honoured, one test and one story each."""

import pytest
import torch
from torch import nn

from seqpart import BadInput, Trainer


def test_a_micro_batch_above_the_batch_is_refused(tmp_path):
    """It was cut down to the batch without a word."""
    x, y = torch.randn(40, 4), torch.arange(40) % 2
    trainer = Trainer(
        [lambda: nn.Linear(4, 2)], mem_limit="2GB", method="sil", batch_size=16, micro_batch_size=17, output_dir=tmp_path
    )
    with pytest.raises(BadInput, match="micro_batch_size=17 is more than the batch of 16"):
        trainer.plan((x, y), (x, y))
