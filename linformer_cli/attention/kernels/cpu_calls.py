"""Calls of the kernels for CPUs: tensors as their arguments, and checks."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from linformer_cli.attention.tensors import accumulator_dtype
from linformer_cli.native.library import load_function, read_structure


@dataclass(frozen=True)
class Kernels:
    """C++ functions whose argument is a `structure` of a `file`. `axes` names the dimensions of their inputs there."""

    file: str
    structure: str
    axes: str = "BHTC"

    def run(self, name: str, x: Tensor, /, **fields: Tensor | float | None) -> None:
        """Run the function `name` for inputs with the type and the sizes of `x`. `fields` are those of the structure.

        A tensor is passed with its strides if its field is a view; otherwise, it must be dense. None: a null pointer.
        """
        call = read_structure(self.file, self.structure)(threads=torch.get_num_threads())
        pointers = {one[0] for one in call._fields_ if one[1] == ctypes.c_void_p}
        view = read_structure("native/scan.h", "View")
        for field, value in (*zip(self.axes, x.shape, strict=True), *fields.items()):
            if isinstance(value, Tensor):
                address, narrow = value.data_ptr(), value.dtype == torch.bfloat16
                setattr(call, field, address if field in pointers else view(address, *value.stride()[:3], narrow))
            elif value is not None:
                setattr(call, field, value)
        function = load_function(name, ctypes.POINTER(type(call)), ctypes.c_int64)
        function(ctypes.byref(call), int(x.dtype == torch.float64))


def require_fit(q: Tensor, k: Tensor, v: Tensor, carried: Tensor | None, *others: Tensor, narrow: bool = False) -> None:
    """Raise `ValueError` unless types and sizes match, since a kernel would read beyond the end of a tensor.

    q and k are [B, H, T, C], v [B, H, T, V], `carried` [B, H, C, V] (None: not given), and `others` [B, H, T, 1 or C].
    q, k and v have one type, and the others its accumulator type. Only a `narrow` kernel reads bfloat16.
    """
    width = q.shape[-1]
    fits = k.shape == q.shape and v.shape == (*q.shape[:3], v.shape[-1])
    fits &= carried is None or carried.shape == (*q.shape[:2], width, v.shape[-1])
    fits &= all(x.shape[:3] == q.shape[:3] and x.shape[3] in (1, width) for x in others)
    given = [q, k, v, *others, *([] if carried is None else [carried])]
    fits &= q.dtype == k.dtype == v.dtype and (narrow or q.dtype == accumulator_dtype(q.dtype))
    if not fits or any(x.dtype != accumulator_dtype(q.dtype) for x in given[3:]):
        raise ValueError(f"sizes or types do not match: {[(list(x.shape), x.dtype) for x in given]}")


def require_sums_fit(q: Tensor, k: Tensor, v: Tensor, s: Tensor | None, z: Tensor | None) -> None:
    """`require_fit` for linear attention with the sums s [B, H, C, V] and z [B, H, C] (None: not given)."""
    for carried, values in ((s, v), (None if z is None else z.unsqueeze(-1), v[..., :1])):
        require_fit(q, k, values, carried, narrow=True)


def with_dense_rows(x: Tensor) -> Tensor:
    """Return x, copied only if its last dimension is not contiguous; kernels accept any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_like_projection(x: Tensor) -> Tensor:
    """Return an empty tensor like x [B, H, T, width] with a position's heads adjacent in memory, as a layer needs."""
    batch, heads, length, width = x.shape
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


def empty_like_projections(*parts: Tensor) -> tuple[Tensor, ...]:
    """Return an empty tensor like each part [B, H, T, width], adjacent in memory like the parts of one projection."""
    batch, heads, length, _ = parts[0].shape
    widths = [heads * part.shape[3] for part in parts]
    joined = parts[0].new_empty(batch, length, sum(widths)).split(widths, dim=-1)
    return tuple(part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in joined)
