"""Which compiled kernel serves a call, by its device, types and sizes. The form in plain torch defines the result."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from linformer_cli.attention.tensors import accumulator_dtype
from linformer_cli.native.constants import COMPILED_MAPS
from linformer_cli.native.gpu import has_triton
from linformer_cli.native.library import has_library
from . import cpu_linear, cpu_recurrences, cpu_scale

CPU_TYPES = (torch.float32, torch.float64, torch.bfloat16)
# The widths are whole tiles of a matrix unit, and the sums fit on the chip.
TRITON_TYPES = (torch.float32, torch.bfloat16)
TRITON_WIDTHS = (16, 32, 64)
# One program holds the sums of a head; a product of many images is faster in torch's libraries.
_MOST_SUMS, _MOST_ROWS = 2**14, 64

F = TypeVar("F", bound=Callable[..., object])
F_co = TypeVar("F_co", bound=Callable[..., object], covariant=True)
# Of cpu_linear.py and triton_linear.py.
AttendLinear = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, str], tuple[Tensor, Tensor, Tensor]]


class SumsStep(NamedTuple):
    """A step of running sums or of a delta rule, with vectors that broadcast to [B, H, C] or [B, H, V]:

        p = a * s,    u = w * v - (e * d)^T p,    s = p + k u^T,    y = scale q s

    Without `erase`, u is v. Without `read`, d is k. The decay a is a `factor`, a `log`, or a `gate`: then log a is
    power * logsigmoid(decay + bias). If `floor` is positive, q and k are replaced by silu(q) and silu(k) scaled to
    length 1, e is most_erased * sigmoid(erase), and w is most_written * sigmoid(write). If `epsilon` is positive, y is
    divided by its root mean square. y is multiplied by SiLU(gate).
    """

    decay: Tensor | None = None
    bias: Tensor | None = None
    erase: Tensor | None = None
    write: Tensor | None = None
    read: Tensor | None = None
    gate: Tensor | None = None
    scale: float = 1.0
    power: float = 1.0
    most_erased: float = 1.0
    most_written: float = 1.0
    floor: float = 0.0
    epsilon: float = 0.0
    decay_form: Literal["factor", "log", "gate"] = "factor"


class Unnormed(NamedTuple):
    """Vectors [B, width] whose norm (None: there is none) is left to the products that read them."""

    x: Tensor
    norm: nn.LayerNorm | None = None


_fuses_steps = False


@contextmanager
def fuse_steps() -> Iterator[None]:
    """Use kernels of steps that have not run on a GPU yet."""
    global _fuses_steps
    before, _fuses_steps = _fuses_steps, True
    try:
        yield
    finally:
        _fuses_steps = before


@dataclass(frozen=True)
class Operation(Generic[F_co]):
    """An operation and its kernels: `cpu` in C++, and `load_triton`, which returns that for CUDA devices.

    `fits` checks what device, type and widths of a call's last tensor leave open. Unless it was `tried` on a GPU, a
    kernel is used only in `fuse_steps`, for all widths.
    """

    cpu: F_co | None = None
    load_triton: Callable[[], F_co] | None = None
    fits: Callable[..., bool] = lambda *inputs: all(x.dtype == inputs[0].dtype for x in inputs)
    tried: bool = True


def _triton(module: str) -> ModuleType:
    """Return a module of kernels in Triton, which is not installed everywhere."""
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
    load_triton=lambda: getattr(_triton("triton_steps"), "step_divided_cache" if _fuses_steps else "step_cache")
)
# Steps with look-ahead; `triton_ahead.py` explains their arguments.
AHEAD_STEP: Operation[Callable[[Tensor, Tensor, Tensor, tuple[Tensor, ...], str], Tensor]] = Operation(
    load_triton=lambda: _triton("triton_ahead").step_ahead, tried=False
)
KEPT_ROWS: Operation[Callable[[Tensor, Tensor, tuple[Tensor, ...], int], None]] = Operation(
    load_triton=lambda: _triton("triton_ahead").keep_rows, tried=False
)
STEP_SUMS: Operation[Callable[[Tensor, Tensor, Tensor, Tensor, SumsStep], Tensor]] = Operation(
    load_triton=lambda: _triton("triton_steps").step_sums,
    fits=lambda s, *inputs: s.dtype in TRITON_TYPES and s.shape[2] * s.shape[3] <= _MOST_SUMS,
    tried=False,
)
PROJECTION: Operation[Callable[[Unnormed, nn.Linear, str, Unnormed | None], Tensor]] = Operation(
    load_triton=lambda: _triton("triton_steps").project, fits=lambda x: len(x) <= _MOST_ROWS, tried=False
)


def find_kernel(
    operation: Operation[F],
    device: torch.device,
    dtype: torch.dtype,
    widths: tuple[int, int] = (0, 0),
    feature_map: str | None = None,
) -> F | None:
    """Find the kernel for `dtype` and `widths` (K and V) on `device`, or None. Some kernels apply a `feature_map`."""
    if torch.compiler.is_exporting() or (feature_map is not None and feature_map not in COMPILED_MAPS):
        return None
    if operation.cpu is not None and device.type == "cpu":
        return operation.cpu if dtype in CPU_TYPES and has_library() else None
    fits = dtype in TRITON_TYPES
    fits &= all(width in TRITON_WIDTHS for width in widths) if operation.tried else _fuses_steps
    return operation.load_triton() if operation.load_triton is not None and fits and has_triton(device) else None


def kernel_for(operation: Operation[F], *inputs: Tensor, feature_map: str | None = None) -> F | None:
    """Call `find_kernel` for a call with `inputs` [..., width], such as queries, keys and values."""
    if not operation.fits(*inputs):
        return None
    last = inputs[-1]
    return find_kernel(operation, last.device, last.dtype, (inputs[0].shape[-1], last.shape[-1]), feature_map)
