"""Which compiled kernel serves a call: the only place that asks for its device, its types and its sizes.

The reference form in plain torch defines the result of every operation, and runs wherever there is no kernel.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Generic, TypeVar

import torch
from torch import Tensor

from linformer_cli.attention.tensors import accumulator_dtype
from linformer_cli.native.constants import COMPILED_MAPS
from linformer_cli.native.gpu import has_triton
from linformer_cli.native.library import has_library
from . import cpu_linear, cpu_recurrences, cpu_scale

CPU_TYPES = (torch.float32, torch.float64, torch.bfloat16)
# The widths are whole tiles of a matrix unit, and the sums fit on the chip.
TRITON_TYPES = (torch.float32, torch.bfloat16)
TRITON_WIDTHS = (16, 32, 64)

F = TypeVar("F", bound=Callable[..., object])
F_co = TypeVar("F_co", bound=Callable[..., object], covariant=True)


# Of cpu_linear.py and triton_linear.py.
AttendLinear = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, str], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Operation(Generic[F_co]):
    """An operation and its kernels: `cpu` in C++, and `load_triton`, which returns that for CUDA devices.

    `fits` says whether the kernels support the tensors of a call beyond device, type and widths of the last one.
    """

    cpu: F_co | None = None
    load_triton: Callable[[], F_co] | None = None
    fits: Callable[..., bool] = lambda *inputs: all(x.dtype == inputs[0].dtype for x in inputs)


def _triton(module: str) -> ModuleType:
    """A module of kernels in Triton, which is not installed everywhere."""
    return importlib.import_module(f"{__package__}.{module}")


def _fits_scale(sums: Tensor, gate: Tensor) -> bool:
    fits = sums.dim() == 4 and sums.shape == gate.shape and sums.device == gate.device
    return fits and sums.dtype == accumulator_dtype(gate.dtype)


CAUSAL_SUMS = Operation(cpu_recurrences.sum_causally)
DELTA_RULE = Operation(cpu_recurrences.follow_delta_rule)
MESA_SOLVER = Operation(cpu_recurrences.solve)
SCALED_OUTPUTS = Operation(cpu_scale.scale, fits=_fits_scale)
EXPONENTIAL_ATTENTION = Operation(cpu_linear.attend_exponential)
LINEAR_ATTENTION: Operation[AttendLinear] = Operation(cpu_linear.attend, lambda: _triton("triton_linear").attend)
LINEAR_ATTENTION_ALL = Operation(cpu_linear.attend_all)
# Steps for CUDA graphs, in which nothing waits for the device; see folded_sums.py and `step_fixed_cache`.
FOLDED_STEP: Operation[Callable[[Tensor, Tensor, Tensor, tuple[Tensor, ...], str], Tensor]] = Operation(
    load_triton=lambda: _triton("triton_steps").step_folded
)
CACHE_STEP: Operation[Callable[[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]], Tensor]] = Operation(
    load_triton=lambda: _triton("triton_steps").step_cache
)


def find_kernel(
    operation: Operation[F],
    device: torch.device,
    dtype: torch.dtype,
    widths: tuple[int, int] = (0, 0),
    feature_map: str | None = None,
) -> F | None:
    """The kernel of `operation` for inputs of `dtype` on `device`, or None. `widths` are K and V.

    `feature_map` is that of linear attention, for operations that apply one.
    """
    if torch.compiler.is_exporting() or (feature_map is not None and feature_map not in COMPILED_MAPS):
        return None
    if operation.cpu is not None and device.type == "cpu":
        return operation.cpu if dtype in CPU_TYPES and has_library() else None
    fits = dtype in TRITON_TYPES and all(width in TRITON_WIDTHS for width in widths)
    return operation.load_triton() if operation.load_triton is not None and fits and has_triton(device) else None


def kernel_for(operation: Operation[F], *inputs: Tensor, feature_map: str | None = None) -> F | None:
    """`find_kernel` for a call with `inputs` [..., width], such as queries, keys and values."""
    if not operation.fits(*inputs):
        return None
    last = inputs[-1]
    return find_kernel(operation, last.device, last.dtype, (inputs[0].shape[-1], last.shape[-1]), feature_map)
