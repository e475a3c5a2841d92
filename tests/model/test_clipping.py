"""The norm that clipping divides by is torch's, to the bit, whatever types the gradients have."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from seqpart.model.optimizers import GradientNorm, total_norm

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


@given(st.lists(st.tuples(st.sampled_from(TYPES), st.integers(1, 40)), min_size=1, max_size=12), st.integers(0, 99))
def test_norms_are_added_up_in_torch_s_own_order_of_types(kinds, seed):
    """In the order of the model's parameters the last bits were others, and so was every tensor that was trained."""
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(size, generator=generator).to(dtype) for dtype, size in kinds]
    found = total_norm([GradientNorm.of(gradient) for gradient in gradients])
    assert torch.equal(found, nn.utils.get_total_norm(gradients))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU on this machine")
def test_on_a_gpu_norms_are_those_of_torch_s_kernel_for_lists_of_tensors():
    gradients = [torch.randn(size, device="cuda") for size in (1, 1000, 70_001, 1 << 20)]
    assert torch.equal(total_norm([GradientNorm.of(one) for one in gradients]), nn.utils.get_total_norm(gradients))


def test_without_gradients_there_is_no_norm():
    assert total_norm([]) is None
