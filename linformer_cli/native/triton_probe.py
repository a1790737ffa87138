"""A small kernel that shows whether Triton can compile and launch kernels here. Importing this file needs Triton."""

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch


@triton.jit
def _write_ones(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), 1.0)


def run_kernel(device: "torch.device") -> None:
    """Compile and run a kernel on `device`. Raises what Triton raises, such as an error for a missing C compiler."""
    import torch

    with torch.cuda.device(device):
        _write_ones[(1,)](torch.zeros(16, device=device), SIZE=16)
        torch.cuda.synchronize()
