"""The functions, structures (network.h) and packed weights of native.cpp, for Python."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from linformer_cli.native.compiler import load_function, load_library
from linformer_cli.native.constants import LANES, TILE_ROWS

SOURCE = Path(__file__).with_name("native.cpp")
_SIZE, _POINTER, _REAL = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
_SIGNATURES = {
    "embed": (*[_SIZE] * 5, *[_POINTER] * 5),
    "step": (_POINTER, _SIZE, *[_POINTER] * 2),
    "look_ahead": (*[_POINTER] * 2, _SIZE),
    "draw_categorical": (*[_SIZE] * 2, *[_POINTER] * 3),
    "draw_mixture": (*[_SIZE] * 3, *[_REAL] * 2, *[_POINTER] * 3),
}

_POINTERS = (
    *("input", "output", "up", "down", "input_bias", "output_bias", "up_bias", "down_bias"),
    *("mid_gain", "mid_shift", "end_gain", "end_shift", "s", "z", "kept"),
)
_SIZES = (
    *("batch", "width", "heads", "key_width", "value_width", "feed_forward", "layers", "outputs"),
    *("pre", "gelu", "map", "half", "shares", "widest", "scratch_width"),
)
_ENDS = ("layer", "first_gain", "first_shift", "last_gain", "last_shift", "head", "head_bias", "scratch")


def load_kernels() -> ctypes.CDLL:
    """The functions of native.cpp; raises `NoCompiler` if they are not available."""
    for name, signature in _SIGNATURES.items():
        load_function(SOURCE, f"lintx_{name}", *signature)
    return load_library(SOURCE)


class Layer(ctypes.Structure):
    """`Layer` of network.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in _POINTERS]


class Surroundings(ctypes.Structure):
    """`Surroundings` of network.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("slots", "hidden", "levels", "reach")),
        *((name, ctypes.c_void_p) for name in ("places", "recent", "input", "output", "input_bias", "output_bias")),
    ]


class Tables(ctypes.Structure):
    """`Tables` of neighbour_tables.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("channels", "levels", "reach")),
        *((name, ctypes.c_void_p) for name in ("places", "recent", "rows", "weight", "bias")),
    ]


class Network(ctypes.Structure):
    """`Network` of network.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_void_p) for name in _ENDS[:-3]),
        ("around", Surroundings),
        ("tables", Tables),
        *((name, ctypes.c_void_p) for name in _ENDS[-3:]),
        ("window", ctypes.c_int64),
        ("trial", ctypes.c_void_p),
    ]


class Drawing(ctypes.Structure):
    """`Drawing` of network.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("sources", "reach", "levels", "row")),
        *((name, ctypes.c_void_p) for name in ("slots", "recent", "table", "place", "label")),
        ("mixtures", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("lowest", "highest")),
        *((name, ctypes.c_void_p) for name in ("uniforms", "values", "x", "out")),
        *((name, ctypes.c_int64) for name in ("count", "known", "guessed", "first", "rows", "passes")),
    ]


def pack(weight: Tensor) -> Tensor:
    """Weights [rows, columns] in the layout of `multiply` (network_pass.h): [rows / 16, columns in words, 16].

    A word, here an int32, is one float or two bfloat16 numbers. Zeros fill incomplete words and tiles.
    """
    missing_columns, missing_rows = -weight.shape[1] % (4 // weight.itemsize), -len(weight) % TILE_ROWS
    rounded = functional.pad(weight.detach(), (0, missing_columns, 0, missing_rows))
    panels: Tensor = rounded.contiguous().view(torch.int32).unflatten(0, (-1, LANES))
    return panels.transpose(1, 2).contiguous()
