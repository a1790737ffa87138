"""The functions of runner.h: a program with memory for a batch of images, driven by C++."""

import ctypes
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linformer_cli.errors import LintxError
from .library import load_library
from .program import Program
from .program_file import Images, lay_out_program

_SIZE, _WORD, _REAL, _POINTER = ctypes.c_int64, ctypes.c_uint64, ctypes.c_double, ctypes.c_void_p
# The arguments of the functions that return a size, or -1 for an error. The first argument is the runner.
_SIZES = {
    "filter": (_REAL, _SIZE, _REAL),
    "guide": (_REAL,),
    "start": (_WORD, _WORD, _POINTER),
    "continue": (_POINTER,),
    "fork": (_SIZE, _POINTER),
    "keep": (_SIZE, _POINTER),
    "pick": (_POINTER,),
    "resize": (_SIZE,),
    "seed": (_WORD, _POINTER, _SIZE),
    "draw": (_SIZE, _SIZE),
    "draw_next": (),
    "give_next": (_POINTER,),
    "read": (_POINTER,),
    "probabilities": (_SIZE, _POINTER),
    "frequencies": (_POINTER,),
    "known": (),
    "look_aheads": (),
    "place": (_SIZE,),
}
# The arguments of the functions that return nothing.
_EMPTY = {
    "close": (),
    "use_threads": (_SIZE,),
    "draw_without_end": (),
    "choose": (_SIZE, _POINTER, _SIZE, _POINTER, _POINTER),
    "pixels": (_SIZE, _POINTER),
}
# The arguments of the functions that return an address, or null for an error.
_ADDRESSES = {"values": (_SIZE,), "buffer": (_SIZE, _POINTER), "state": (_SIZE, _SIZE, _SIZE, _POINTER)}


@functools.cache
def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    for result, functions in ((_SIZE, _SIZES), (None, _EMPTY), (_POINTER, _ADDRESSES)):
        for name, arguments in functions.items():
            function = getattr(library, f"lintx_{name}")
            function.argtypes, function.restype = (_POINTER, *arguments), result
    for function in (library.lintx_open, library.lintx_open_in_place):
        function.argtypes, function.restype = (_POINTER, _SIZE, _SIZE), _POINTER
    library.lintx_error.restype = ctypes.c_char_p
    return library


class Runner:
    """A runner of runner.h, which explains its functions, for the program in `data`.

    `copy` opens a file that may be damaged, not the result of `lay_out_program`. Raises `NoLibrary` without a library,
    `MemoryError` if there is too little memory, and `LintxError` if C++ refuses a call.
    """

    def __init__(self, data: NDArray[np.uint8], batch: int, copy: bool = False) -> None:
        self._library, self._data = _declare(load_library()), data
        opening = self._library.lintx_open if copy else self._library.lintx_open_in_place
        address = opening(data.ctypes.data, len(data), batch)
        self.address = self._check(address)
        self._finalizer = weakref.finalize(self, self._library.lintx_close, address)

    @classmethod
    def of(cls, program: Program, images: Images, batch: int) -> "Runner":
        return cls(lay_out_program(program, images), batch)

    def call(self, name: str, *arguments: object) -> int:
        """Call `lintx_<name>`. A tensor or an array is passed as its address. Raises `LintxError` for an error."""
        result = getattr(self._library, f"lintx_{name}")(self.address, *map(_find_address, arguments))
        return 0 if name in _EMPTY else self._check(result)

    def view(self, buffer: int, rows: int, dtype: torch.dtype) -> Tensor:
        """Return the memory of a buffer of the program as a tensor [rows, width]. It ends with the runner."""
        width = _SIZE()
        address = self.call("buffer", buffer, ctypes.byref(width))
        return self._wrap(address, (rows, width.value // dtype.itemsize), dtype)

    def values(self, rows: int, length: int) -> Tensor:
        """Return the memory of the values int64 [rows, T + 1]. It ends with the runner."""
        return self._wrap(self.call("values", 0), (rows, length + 1), torch.int64)

    def _wrap(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = shape[0] * shape[1] * dtype.itemsize
        if not count:
            return torch.empty(shape, dtype=dtype)
        memory: Any = (ctypes.c_char * count).from_address(address)
        memory.runner = self  # the tensor keeps the memory, and the memory keeps the runner
        return torch.frombuffer(memory, dtype=dtype).view(*shape)

    def _check(self, result: int | None) -> int:
        if result is not None and result >= 0:
            return result
        reason = self._library.lintx_error().decode()
        raise MemoryError(reason) if "enough memory" in reason else LintxError(reason)


def _find_address(argument: object) -> object:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return argument.ctypes.data if isinstance(argument, np.ndarray) else argument
