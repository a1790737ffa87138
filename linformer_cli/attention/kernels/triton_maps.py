"""What Triton kernels share: feature maps of linear attention, and loads. Importing this file needs Triton."""

import triton
import triton.language as tl

from linformer_cli.native.constants import COMPILED_MAPS

ELU: tl.constexpr = tl.constexpr(COMPILED_MAPS["elu"])
RELU: tl.constexpr = tl.constexpr(COMPILED_MAPS["relu"])


@triton.jit
def phi(x, MAP: tl.constexpr):
    """The features of x under feature map number `MAP`; NaN stays NaN."""
    if MAP == ELU:
        return tl.where(x < 0.0, tl.exp(tl.minimum(x, 0.0)), x + 1.0)
    else:
        tl.static_assert(MAP == RELU)
        return tl.where(x < 0.0, 0.0, x)


@triton.jit
def slope(features, MAP: tl.constexpr):
    """The derivative of the map, computed from the map's result."""
    if MAP == ELU:
        return tl.minimum(features, 1.0)
    else:
        tl.static_assert(MAP == RELU)
        return tl.where(features > 0.0, 1.0, 0.0)


@triton.jit
def load_row(x, image, head, image_stride, head_stride, WIDTH: tl.constexpr):
    """One head of x [B, H, WIDTH], in float32."""
    start = x + image.to(tl.int64) * image_stride + head.to(tl.int64) * head_stride
    return tl.load(start + tl.arange(0, WIDTH)).to(tl.float32)
