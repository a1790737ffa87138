"""The memory of the `native` engine's programs: structures, and the states of a batch."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from linformer_cli.attention.base import fork_into
from linformer_cli.native.constants import BUFFERS, INTEGERS, REALS
from linformer_cli.native.library import load_library
from linformer_cli.native.packing import pack
from linformer_cli.native.program import Kind, Program
from linformer_cli.system.memory import allocate_zeros

# Up to this many images per thread, all threads share every product, because a thread with only a few images would read
# all weights to do little work. With more images, each thread takes its own share of the images through all layers.
FEW = 2
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
        *((name, _SIZE) for name in ("batch", "window", "threads", "divided", "stride", "blocks", "count")),
        *((name, _POINTER) for name in ("buffers", "operations")),
    ]


class Head(_Structure):
    """`Head` of inversion.h."""

    _fields_ = [
        *(("levels", _SIZE), ("mixtures", _SIZE), ("lowest", ctypes.c_double), ("highest", ctypes.c_double)),
        *(("guidance", ctypes.c_double), ("temperature", ctypes.c_double)),
        *(("top_k", _SIZE), ("top_p", ctypes.c_double)),
    ]


class Drawing(_Structure):
    """`Drawing` of drawing.h."""

    _fields_ = [
        ("head", Head),
        *((name, _SIZE) for name in ("ring", "reach", "output", "row")),
        *((name, _POINTER) for name in ("uniforms", "values")),
        *((name, _SIZE) for name in ("count", "known", "guessed", "first", "rows", "passes")),
    ]


def load_kernels() -> ctypes.CDLL:
    """Return the functions of engine.cpp. Raises `NoLibrary` if there is no library."""
    library = load_library()
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
        self.kernels = load_kernels()
        rows = max(batch, min(batch, 2) * program.window)  # look-ahead has a window for each of at most two rows
        self.tensors = [
            pack(buffer.tensor, buffer.dtype) if buffer.kind == Kind.WEIGHTS and buffer.tensor is not None
            else buffer.tensor if buffer.tensor is not None
            else allocate_zeros((batch if buffer.kind == Kind.STATE else rows, buffer.width), buffer.dtype)
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
        unit = (program.stride, program.blocks)
        self._bound = BoundProgram(batch, program.window, 1, 0, *unit, len(program.operations), *parts)

    @property
    def address(self) -> int:
        """The address of the program, for engine.cpp."""
        return self._bound.address

    def use_threads(self, threads: int) -> None:
        """Let `threads` threads work on every pass."""
        self._bound.threads = threads
        self.use_rows(self.batch)

    def use_rows(self, rows: int) -> None:
        """Let every pass work on the first `rows` images only."""
        threads = self._bound.threads
        self._bound.batch, self._bound.divided = rows, rows > FEW * threads > FEW

    def start(self) -> None:
        """Give every state its initial value."""
        for tensor, buffer in zip(self.tensors, self.program.buffers, strict=True):
            if buffer.kind == Kind.STATE:
                tensor.fill_(buffer.initial)

    def set_layer(self, layer: int, states: Sequence[Tensor]) -> None:
        """Copy tensors [n, ...] to the states of a layer, each row to B / n adjacent images."""
        for index, state in zip(self.program.states[layer], states, strict=True):
            fork_into(self.tensors[index], state.reshape(len(state), -1))
