"""Compares the causal convolution with torch's convolution, and tests its ring buffer."""

import torch
from loops import loop_over
from tolerances import FLOAT64, assert_agree
from torch import Tensor
from torch.nn import functional

from linformer_cli.attention.nystrom import CausalConvolution

HEADS, WIDTH = 3, 2


def build(kernel: int) -> CausalConvolution:
    torch.manual_seed(0)
    return CausalConvolution(HEADS, kernel).double()


def draw(length: int) -> Tensor:
    return torch.randn(2, HEADS, length, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@loop_over("kernel", [2, 5, 33, 34, 70])
@loop_over("length", [1, 31, 32, 33, 100])
def test_the_causal_convolution_equals_torchs_convolution_padded_on_the_left(kernel: int, length: int) -> None:
    convolution, v = build(kernel), draw(length)
    padded = functional.pad(v, (0, 0, kernel - 1, 0))
    expected = functional.conv2d(padded, convolution.weight[:, None, :, None], groups=HEADS)
    y, _ = convolution.attend(v, None, torch.float64)
    assert_agree(y, expected, FLOAT64)
    recent, outputs = convolution.init_recent(2, WIDTH, v.device, v.dtype), []
    for t in range(length):
        outputs.append(convolution.step(v[:, :, t], recent, torch.float64))
    assert_agree(torch.stack(outputs, dim=2), expected, FLOAT64)


def test_the_ring_buffer_has_the_type_of_the_values() -> None:
    """A bfloat16 buffer takes half the memory of a float32 buffer. Sums are still float32."""
    convolution, v = build(4).float(), draw(9).bfloat16()
    y, recent = convolution.attend(v, None, torch.float32)
    assert (y.dtype, recent.values.dtype) == (torch.float32, torch.bfloat16)
    expected, _ = convolution.attend(v.float(), None, torch.float32)
    assert torch.equal(y, expected)
    y_t = convolution.step(v[:, :, 0], recent, torch.float32)
    assert (y_t.dtype, recent.values.dtype) == (torch.float32, torch.bfloat16)
