"""Tensors as arguments of the CPU kernels."""

import ctypes
from collections.abc import Mapping

from torch import Tensor


class View(ctypes.Structure):
    """`View` of scan.h: the address and strides of a tensor [B, H, T, width] whose last dimension is contiguous."""

    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("image", "head", "position"))]


def fill_call(call: ctypes.Structure, views: Mapping[str, Tensor | None], states: Mapping[str, Tensor | None]) -> None:
    """Set a kernel's arguments: `views` with their strides, and dense `states`. None becomes a null pointer."""
    for field, tensor in views.items():
        setattr(call, field, View() if tensor is None else View(tensor.data_ptr(), *tensor.stride()[:3]))
    for field, tensor in states.items():
        setattr(call, field, None if tensor is None else tensor.data_ptr())


def with_dense_rows(x: Tensor) -> Tensor:
    """x, copied only if its last dimension is not contiguous; kernels accept any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_like_projection(x: Tensor) -> Tensor:
    """An empty tensor like x [B, H, T, width], with the heads of a position adjacent in memory, as a layer needs."""
    batch, heads, length, width = x.shape
    return x.new_empty(batch, length, heads, width).transpose(1, 2)
