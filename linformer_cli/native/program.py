"""The recurrent step of a model as data: buffers, and operations on them. An engine runs it without the model's code.

`model/compile_step.py` writes the program of a model: every block and attention mechanism emits its own operations with
a `Builder`. `ops/` has one file for each kind of operation, which names its arguments, checks them and computes. A
program has four kinds of buffers:

    SHARED    constants of all images: tables, biases, fixed patterns
    STATE     the state of each image, kept from step to step
    SCRATCH   intermediate results of each row of a pass; a row is an image, or with look-ahead a position of an image
    WEIGHTS   the matrix [rows, columns] of a product; an engine may store it in its own layout
"""

import enum
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.errors import LintxError
from .constants import ACTIVATIONS, FORMATS, TILE_ROWS

_FOLDER = Path(__file__).parent

NO_BUFFER = -1  # the index of a buffer that an operation does without


class NoProgram(LintxError):
    """The step of a model has no program; the message says why."""


class Kind(enum.IntEnum):
    SHARED = 0
    STATE = 1
    SCRATCH = 2
    WEIGHTS = 3


@dataclass(frozen=True)
class Buffer:
    """`width` numbers of type `dtype` for each image or row. A shared buffer has `width` numbers in total.

    `tensor` holds the contents of a shared buffer or of weights. Every number of a state starts as `initial`.
    """

    kind: Kind
    width: int
    dtype: torch.dtype = torch.float32
    tensor: Tensor | None = None
    initial: float = 0.0


@dataclass(frozen=True)
class Operation:
    """One operation: its name, the indices of its buffers, and its constants, in the order of `ops/`."""

    name: str
    buffers: tuple[int, ...]
    integers: tuple[int, ...] = ()
    reals: tuple[float, ...] = ()


class Argument(NamedTuple):
    """The name of an argument; its kind, `buffer`, `integer` or `real`; and whether it may be left out."""

    name: str
    kind: str
    optional: bool


# What `read_signatures` reads: a struct and its base, an argument of the struct, and the operation of a struct.
_DECLARATION = re.compile(
    r'^struct (\w+) : (\w+)|(\w+) = (buffer|integer|real)(_or_none)?\(\)|^OPERATION\("([\w.]+)", (\w+)', re.MULTILINE
)


@functools.cache
def read_signatures() -> dict[str, tuple[Argument, ...]]:
    """Read the arguments of every operation from the C++ that declares them, with or without a compiled library."""
    structs: dict[str, tuple[Argument, ...]] = {"Arguments": ()}
    found, struct = {}, ""
    for file in (_FOLDER / "operation.h", *sorted((_FOLDER / "ops").glob("*.h"))):
        code = re.sub("//.*", "", file.read_text("utf-8"))
        for new, base, argument, kind, optional, operation, implementation in _DECLARATION.findall(code):
            if new:
                struct, structs[new] = new, structs[base]
            elif argument:
                structs[struct] += (Argument(argument, kind, bool(optional)),)
            else:
                found[operation] = structs[implementation]
    return found


def bind(operation: str, arguments: dict[str, float]) -> Operation:
    """Return the operation with these arguments. Raises `TypeError` if one is missing or unknown."""
    signature = read_signatures()[operation]
    missing = {one.name for one in signature if not one.optional} - arguments.keys()
    unknown = arguments.keys() - {one.name for one in signature}
    if missing or unknown:
        raise TypeError(f"operation {operation}: missing {sorted(missing)}, unknown {sorted(unknown)}")
    parts: dict[str, list[float | None]] = {"buffer": [], "integer": [], "real": []}
    for one in signature:
        parts[one.kind].append(arguments.get(one.name))
    for part in parts.values():
        while part and part[-1] is None:
            part.pop()
    kinds = (parts["buffer"], parts["integer"])
    buffers, integers = (tuple(NO_BUFFER if x is None else int(x) for x in kind) for kind in kinds)
    return Operation(operation, buffers, integers, tuple(x or 0.0 for x in parts["real"]))


@dataclass(frozen=True)
class Program:
    """The step of a model, for up to `window` positions. Inputs and weights of matrix products have type `products`.

    Three buffers have names: `recent` is the ring of recent values, `label` the image's class (-1: no classes; at first
    none, if it is optional, or 0), and `output` the head's parameters. The states of layer i are the buffers
    `states[i]`. If the blocks step over pixels of `stride` values, the first `blocks` operations run only at the first
    value of a pixel, and leave the pixel's vector in the state `pixel`. Otherwise, these are 1, 0 and -1.
    """

    products: torch.dtype
    window: int
    buffers: tuple[Buffer, ...]
    operations: tuple[Operation, ...]
    recent: int
    label: int
    output: int
    states: tuple[tuple[int, ...], ...]
    stride: int = 1
    blocks: int = 0
    pixel: int = -1

    def state_bytes(self, batch: int) -> int:
        """Return the bytes of the state of `batch` images, including the position."""
        carried = [buffer for buffer in self.buffers if buffer.kind == Kind.STATE]
        return batch * sum(buffer.width * buffer.dtype.itemsize for buffer in carried) + torch.int64.itemsize


@dataclass(frozen=True)
class MixInputs:
    """The buffers of a mechanism, its `sizes` H, K and V, and the `columns` of q, k, v and extra in `projected`."""

    builder: "Builder"
    projected: int
    output: int
    columns: tuple[int, int, int, int]
    sizes: tuple[int, int, int]

    def emit(self, name: str, /, **arguments: float) -> None:
        """Emit operation `mix.<name>` with the mechanism's own arguments."""
        columns = ("q_column", "k_column", "v_column", "extra_column")
        sizes = zip(("H", "K", "V", *columns), (*self.sizes, *self.columns), strict=True)
        self.builder.emit(f"mix.{name}", inputs=self.projected, outputs=self.output, **dict(sizes), **arguments)

    def state(self, width: int, initial: float = 0.0, dtype: torch.dtype = torch.float32) -> int:
        return self.builder.state(self.sizes[0] * width, initial, dtype)


@dataclass
class Builder:
    """Collects a program: `x` is the buffer of the residual stream, to which the next norm adds `pending`."""

    products: torch.dtype
    width: int
    window: int = 1
    buffers: list[Buffer] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    pending: int = NO_BUFFER

    def __post_init__(self) -> None:
        self._named: dict[str, int] = {}
        self.x = self.scratch("x", self.width)

    def _append(self, buffer: Buffer) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def shared(self, tensor: Tensor) -> int:
        """Add a shared buffer with the numbers of `tensor`. Floating-point numbers become float32."""
        tensor = tensor.detach()
        tensor = (tensor.float() if tensor.is_floating_point() else tensor).contiguous()
        return self._append(Buffer(Kind.SHARED, tensor.numel(), tensor.dtype, tensor))

    def state(self, width: int, initial: float = 0.0, dtype: torch.dtype = torch.float32) -> int:
        """Add a state of `width` numbers for each image. States of a layer are numbered in call order."""
        return self._append(Buffer(Kind.STATE, width, dtype, initial=initial))

    def scratch(self, name: str, width: int, dtype: torch.dtype = torch.float32) -> int:
        """Reserve scratch memory of at least `width` numbers for each row. Calls with the same name share memory."""
        if name not in self._named:
            self._named[name] = self._append(Buffer(Kind.SCRATCH, 0, dtype))
        index = self._named[name]
        self.buffers[index] = replace(self.buffers[index], width=max(width, self.buffers[index].width))
        return index

    def emit(self, name: str, /, **arguments: float) -> None:
        """Append operation `name`. Its struct in `ops/` names and explains the arguments."""
        self.operations.append(bind(name, arguments))

    def project(
        self, linear: nn.Linear, source: int, name: str, activation: str = "none", sensitive: bool = False
    ) -> int:
        """Apply `linear` and `activation` to `source`, as scratch memory `name`; if `sensitive`, not in int8."""
        return self.project_by(linear.weight, linear.bias, source, name, activation, sensitive)

    def project_by(
        self, weight: Tensor, bias: Tensor, source: int, name: str, activation: str = "none", sensitive: bool = False
    ) -> int:
        """Do what `project` does, with `weight` [rows, columns] and `bias` [rows]."""
        rows, columns = weight.shape
        missing = -rows % TILE_ROWS
        output = self.scratch(name, rows + missing)
        products, code = self.products, str(self.products).removeprefix("torch.")
        if sensitive and products == torch.int8:
            products, code = torch.float32, "exact"
        matrix = self._append(Buffer(Kind.WEIGHTS, weight.numel(), products, weight.detach()))
        buffers = {"input": source, "output": output, "weights": matrix}
        buffers["bias"] = self.shared(functional.pad(bias, (0, missing)))
        if products == torch.bfloat16:
            buffers["converted"] = self.scratch("rounded", columns + columns % 2, torch.bfloat16)
        elif products == torch.int8:
            # Room for 16 bits per column, with the columns rounded up to a multiple of four, and for the scale.
            buffers["converted"] = self.scratch("quantised", (columns + 3) // 4 * 2 + 1, torch.int32)
        sizes = {"columns": columns, "rows": rows}
        self.emit("project", **buffers, **sizes, activation=ACTIVATIONS[activation], format=FORMATS[code])
        return output

    def gate(self, target: int, source: int, width: int, first: int, activation: str = "none") -> None:
        """Multiply `width` columns of buffer `target` by columns of `source`, from column `first`, activated."""
        self.emit("gate", y=target, gate=source, width=width, first=first, activation=ACTIVATIONS[activation])

    def norm(self, norm: nn.LayerNorm, pre: bool = True) -> int:
        """Emit the LayerNorm of x plus the pending branch. With `pre`, x becomes the sum; otherwise, the LayerNorm."""
        output = self.scratch("normed", self.width) if pre else self.x
        affine = {"gain": self.shared(norm.weight), "shift": self.shared(norm.bias)}
        self.emit("join", x=self.x, branch=self.pending, h=output, **affine, width=self.width)
        self.pending = NO_BUFFER
        return output

    def add_branch(self, norm: nn.LayerNorm, pre: bool, branch: Callable[[int], int]) -> None:
        """Emit what `Block.add_branch` computes. `branch` maps the buffer of its input to the buffer of its output."""
        self.pending = branch(self.norm(norm) if pre else self.x)
        if not pre:
            self.norm(norm, pre=False)

    def keep(self) -> int:
        if self.pending >= 0:
            self.add(self.pending)
            self.pending = NO_BUFFER
        kept = self.state(self.width)
        self.emit("copy", y=kept, x=self.x, width=self.width, first=0)
        return kept

    def add(self, source: int) -> None:
        self.emit("add", x=self.x, branch=source, width=self.width)
