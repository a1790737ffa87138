"""Programs in the memory of the `native` engine: structures, packed weights, and the states of a batch."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from linformer_cli.native import compiler
from linformer_cli.native.constants import BUFFERS, INTEGERS, LANES, REALS, TILE_ROWS
from linformer_cli.native.program import Kind, Program

SOURCE = Path(compiler.__file__).with_name("engine.cpp")
# Up to this many images per thread, all threads share every product: a thread with its own few images would read all
# weights for little work. With more images, each thread takes its share of them through all layers.
FEW = 2
# Integer products have the same bits on every machine. The options give everything beside them the same bits too:
# a fused multiply-add, which not every machine has, rounds once where a product and a sum round twice.
EXACT = ("-ffp-contract=off",)
_SIZE, _POINTER = ctypes.c_int64, ctypes.c_void_p
_SIGNATURES = {
    "lintx_step": (_POINTER, _SIZE),
    "lintx_draw": (_POINTER, _SIZE, _POINTER, _SIZE, *[_POINTER] * 2),
    "lintx_look_ahead": (*[_POINTER] * 2, _SIZE),
}


class _Structure(ctypes.Structure):
    @property
    def address(self) -> int:
        return ctypes.addressof(self)


class Buffer(_Structure):
    """`Buffer` of program.h."""

    _fields_ = [("data", _POINTER), ("stride", _SIZE), ("kind", _SIZE)]


class Operation(_Structure):
    """`Operation` of program.h."""

    _fields_ = [
        *(("code", _SIZE), ("buffer", _SIZE * BUFFERS), ("integer", _SIZE * INTEGERS)),
        ("real", ctypes.c_double * REALS),
    ]


class BoundProgram(_Structure):
    """`Program` of program.h."""

    _fields_ = [
        *((name, _SIZE) for name in ("batch", "window", "threads", "divided", "count")),
        *((name, _POINTER) for name in ("buffers", "operations")),
    ]


class Head(_Structure):
    """`Head` of drawing.h."""

    _fields_ = [("levels", _SIZE), ("mixtures", _SIZE), ("lowest", ctypes.c_double), ("highest", ctypes.c_double)]


class Drawing(_Structure):
    """`Drawing` of drawing.h."""

    _fields_ = [
        ("head", Head),
        *((name, _SIZE) for name in ("ring", "reach", "output", "row")),
        *((name, _POINTER) for name in ("uniforms", "values")),
        *((name, _SIZE) for name in ("count", "known", "guessed", "first", "rows", "passes")),
    ]


def load_kernels(products: torch.dtype) -> ctypes.CDLL:
    """The functions of engine.cpp for products of this type; raises `NoCompiler` if they are not available."""
    library = compiler.load_library(SOURCE, EXACT if products == torch.int8 else ())
    for name, signature in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = signature, None
    library.lintx_find_operation.restype = _SIZE
    sizes = (_SIZE * 5)()
    library.lintx_sizes(sizes)
    structures = (Buffer, Operation, BoundProgram, Head, Drawing)
    assert list(sizes) == [ctypes.sizeof(structure) for structure in structures], "program.h differs from this module"
    return library


class Memory:
    """A program with memory for `batch` images."""

    def __init__(self, program: Program, batch: int) -> None:
        self.program, self.batch = program, batch
        self.kernels = load_kernels(program.products)
        rows = max(batch, program.window)
        self.tensors = [
            pack(buffer.tensor, buffer.dtype) if buffer.kind == Kind.WEIGHTS and buffer.tensor is not None
            else buffer.tensor if buffer.tensor is not None
            else torch.zeros(batch if buffer.kind == Kind.STATE else rows, buffer.width, dtype=buffer.dtype)
            for buffer in program.buffers
        ]  # fmt: skip
        self._buffers = (Buffer * len(program.buffers))()
        for bound, buffer, tensor in zip(self._buffers, program.buffers, self.tensors, strict=True):
            kind = Kind.SHARED if buffer.kind == Kind.WEIGHTS else buffer.kind
            stride = 0 if kind == Kind.SHARED else buffer.width * buffer.dtype.itemsize
            bound.data, bound.stride, bound.kind = tensor.data_ptr(), stride, kind
        self._operations = (Operation * len(program.operations))()
        for bound, operation in zip(self._operations, program.operations, strict=True):
            bound.code = self.kernels.lintx_find_operation(operation.name.encode())
            assert bound.code >= 0, f"engine.cpp has no operation {operation.name}"
            bound.buffer[: len(operation.buffers)] = operation.buffers
            bound.integer[: len(operation.integers)] = operation.integers
            bound.real[: len(operation.reals)] = operation.reals
        parts = (ctypes.addressof(self._buffers), ctypes.addressof(self._operations))
        self._bound = BoundProgram(batch, program.window, 1, 0, len(program.operations), *parts)

    @property
    def address(self) -> int:
        """The address of the program for engine.cpp."""
        return self._bound.address

    def use_threads(self, threads: int) -> None:
        """Let `threads` threads work on every pass."""
        self._bound.threads, self._bound.divided = threads, self.batch > FEW * threads > FEW

    def start(self) -> None:
        """Give every state its initial value."""
        for tensor, buffer in zip(self.tensors, self.program.buffers, strict=True):
            if buffer.kind == Kind.STATE:
                tensor.fill_(buffer.initial)

    def set_layer(self, layer: int, states: Sequence[Tensor]) -> None:
        """Copy tensors [B, ...], or [1, ...] for all images, to the states of a layer."""
        for index, state in zip(self.program.states[layer], states, strict=True):
            self.tensors[index].copy_(state.reshape(len(state), -1))


def pack(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights [rows, columns] in the layout of `project`: [rows / 16, columns in words, 16] words of 32 bits.

    A word is one float, two bfloat16 numbers or four 8-bit integers. Zeros fill incomplete words and tiles. With
    integers, two more words per row follow its columns: the scale, a float, and the sum of the row's integers.
    """
    missing_columns, missing_rows = -weight.shape[1] % (4 // dtype.itemsize), -len(weight) % TILE_ROWS
    weight = functional.pad(weight, (0, missing_columns, 0, missing_rows))
    if dtype != torch.int8:
        return _arrange(weight.to(dtype))
    integers, scales = quantise(weight)
    sums = integers.sum(dim=1, dtype=torch.int32)
    tail = torch.stack((scales.view(torch.int32), sums), dim=1)
    return torch.cat((_arrange(integers), _arrange(tail)), dim=1)


def _arrange(rows: Tensor) -> Tensor:
    """Rows of whole words as int32 [rows / 16, words, 16]."""
    panels: Tensor = rows.contiguous().view(torch.int32).unflatten(0, (-1, LANES))
    return panels.transpose(1, 2).contiguous()


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers int8 [rows, columns] from -127 to 127, and the scale float32 [rows] that each row is multiplied by.

    A row with a number that is not finite has the scale NaN.
    """
    weight = weight.float()
    scales = weight.abs().amax(dim=1) / 127
    scales = scales.where(scales.isfinite(), torch.nan)
    return (weight / scales.unsqueeze(1)).round().clamp(-127, 127).nan_to_num(0).to(torch.int8), scales
