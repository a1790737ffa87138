"""The interface of attention mechanisms: one class with a parallel form and a step form that share one state.

All modules use these axis letters: B images, H heads, T positions, K width of a query or key, V width of a value, C
features, E extra scalars per head. Queries and keys are [B, H, T, K], and values are [B, H, T, V]. A tensor of one
position has no T axis, and its name ends in `_t`.
"""

import enum
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeAlias, cast, get_args

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import TypeVar, get_original_bases

from linformer_cli.documents import Config
from linformer_cli.documents import setting as setting
from linformer_cli.errors import UsageError
from linformer_cli.native.program import MixInputs as MixInputs
from linformer_cli.native.program import NoProgram
from .kernels.registry import CAUSAL_SUMS, Operation, find_kernel
from .tensors import accumulator_dtype, check_lengths, fill_padding, may_check

# Extra scalars of a head by name: each tensor is [B, H, T, width], or [B, H, width] for one position.
Gates = Mapping[str, Tensor]


class Memory(enum.StrEnum):
    """How the size of a state depends on the number of positions."""

    CONSTANT = "constant"
    BOUNDED = "bounded"
    GROWING = "growing"


@dataclass(frozen=True)
class AttentionShape:
    """The sizes that a mechanism is built for.

    `positions` is T of a whole image, `row` the length of a row (see `ImageShape.row_for_attention`), and `layer` the
    index of the layer. Random blocks or features are drawn separately for each layer.
    """

    heads: int
    key_width: int
    value_width: int
    positions: int
    row: int
    layer: int = 0

    @property
    def heads_and_widths(self) -> tuple[int, int, int]:
        """H, K and V."""
        return self.heads, self.key_width, self.value_width


class AttentionOptions(Config):
    """Base class of every mechanism's options. Options are frozen, and unknown keys are refused."""

    parses_text = True


# The option `chunk` of many mechanisms.
Chunk = Annotated[int, Field(gt=0, le=65_536, description="positions per chunk of the parallel form")]

# Code that knows neither the mechanism nor its state uses a bare `Attention`.
Options = TypeVar("Options", bound=AttentionOptions, default=Any)
State = TypeVar("State", default=Any)
# Outputs, and the state after their positions.
Out: TypeAlias = tuple[Tensor, State]


class Attention(nn.Module, ABC, Generic[Options, State]):
    """One mechanism: `attend` is its parallel form, and `step` is its step form.

    Training calls `attend` without a state; a prompt is read by `attend`, whose state is kept. `step` computes the same
    as `attend` at T = 1, without gradients. Up to rounding, outputs do not depend on how a sequence is cut into blocks.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    family: ClassVar[str]
    method: ClassVar[str]
    memory: ClassVar[Memory]
    options_type: ClassVar[type[AttentionOptions]]
    # The layer projects once and passes the same tensor as q and k.
    shared_query_key: ClassVar[bool] = False
    # The layer projects only queries. It passes its input as k and as v, and the output is not projected.
    shared_key_value: ClassVar[bool] = False
    # The mechanism replaces attention and feed-forward, so it needs a gated block instead of a transformer block.
    gated: ClassVar[bool] = False
    # The compiled operation that takes most of the time of `attend`, if there is one.
    compiled: ClassVar[Operation[Callable[..., object]] | None] = None
    # The mechanism has `attend_all`. Options may take it away, so an object can have False where its class has True.
    bidirectional: bool = False
    # The extra scalars that the layer projects: their widths by name, per head and position, in this order.
    gates: Mapping[str, int] = {}
    # After this many positions, the numbers in the state decide the same again. None: they do not repeat.
    period: int | None = None
    # The initial bias of the extra scalars, for example 5 for a gate that starts almost open.
    extra_bias: float = 0.0

    def __init_subclass__(cls) -> None:
        """Take `options_type` from the class statement, such as `LinearOptions` from `Attention[LinearOptions, ..]`."""
        super().__init_subclass__()
        for argument in (argument for base in get_original_bases(cls) for argument in get_args(base)):
            if isinstance(argument, type) and issubclass(argument, AttentionOptions):
                cls.options_type = argument

    def __init__(self, options: Options, shape: AttentionShape) -> None:
        super().__init__()
        self.options = options
        self.shape = shape

    @property
    def extra_per_head(self) -> int:
        """E, the number of extra scalars per head and position."""
        return sum(self.gates.values())

    @classmethod
    def fit_shape(cls, options: Options, shape: AttentionShape, width: int) -> AttentionShape:
        """Return this mechanism's sizes in a model of width `width`; `shape` holds those for a transformer block."""
        return shape

    @property
    def end(self) -> nn.Linear:
        """The last matrix of a mechanism whose layer has none; if its weights and bias are 0, the outputs are 0."""
        raise NotImplementedError

    def on_training_step(self, step: int, seed: int) -> None:
        """Prepare for training step `step`, for example by redrawing random buffers; never called in evaluation.

        The result must depend only on `step`, `seed` and the layer, so that a resumed run equals an uninterrupted one.
        """

    @property
    def unbounded(self) -> bool:
        """Whether a sequence can go on beyond `shape.positions`: the state is constant and positions are not used."""
        return self.memory is Memory.CONSTANT

    @classmethod
    def count_state_traffic(cls, positions: int) -> float | None:
        """How often a step reads or writes the state, averaged over `positions` positions (None: it reads parts)."""
        return 2.0 if cls.family == "kernel" and cls.memory is Memory.CONSTANT else None

    def is_compiled(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether `attend` runs compiled kernels, rather than plain torch, for inputs of `dtype` on `device`."""
        return self.compiled is not None and find_kernel(self.compiled, device, accumulator_dtype(dtype)) is not None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None = None, extra: Tensor | None = None
    ) -> Out[State]:
        """Return outputs [B, H, T, V] of T >= 1 positions that follow `state` (None: no positions), and the new state.

        The result is differentiable, also with respect to `state`, which is not modified. A NaN or infinity in the
        inputs changes neither earlier outputs nor other images. If an output is NaN or infinite, outputs from the first
        such input on send no gradient to earlier positions. `defer_checks` leaves this to the caller. Autocast is off.
        """
        with torch.autocast(q.device.type, enabled=False):
            y, after = self._attend_once(q, k, v, state, extra)
            # Plain torch and GPU kernels mask a product by multiplying by 0, and 0 times NaN is NaN. A NaN would
            # therefore reach outputs that must not depend on it. A finite sum, which may overflow, is a cheap test.
            if not may_check(y.device) or bool(y.detach().sum().isfinite()):
                return y, after
            # The number of positions before the first NaN or infinity in each image, int64 [B].
            ok = torch.stack([x.isfinite().all(dim=3).all(dim=1) for x in (q, k, v, extra) if x is not None])
            finite = ok.all(dim=0).long().cumprod(dim=1).sum(dim=1)
            parts, places = [], []
            for count in finite.unique().tolist():
                images = (finite == count).nonzero().flatten()
                select = functools.partial(torch.index_select, dim=0, index=images)
                parts.append(self._attend_cut(count, *map_states(select, (q, k, v, state, extra))))
                places.append(images)
            order = torch.cat(places).argsort()
            return map_states(lambda *x: torch.cat(x)[order], *parts)

    def _attend_once(self, q: Tensor, k: Tensor, v: Tensor, state: State | None, extra: Tensor | None) -> Out[State]:
        """`_attend`, with outputs of the type of v."""
        y, after = self._attend(q, k, v, state, self.name_gates(extra, q.dtype))
        return y.to(v.dtype), after

    def _attend_cut(
        self, finite: int, q: Tensor, k: Tensor, v: Tensor, state: State | None, extra: Tensor | None
    ) -> Out[State]:
        """`attend` in two blocks: the first `finite` positions, and the rest, which starts with a NaN or infinity."""
        if finite == q.shape[2]:
            return self._attend_once(q, k, v, state, extra)
        inputs, outputs = (q, k, v, extra), []
        if finite:
            q, k, v, extra = map_states(lambda x: x[:, :, :finite], inputs)
            y, state = self._attend_once(q, k, v, state, extra)
            outputs.append(y)
        q, k, v, extra = map_states(lambda x: x[:, :, finite:], inputs)
        y, after = self._attend_once(q, k, v, map_states(Tensor.detach, state), extra)
        return torch.cat([*outputs, y], dim=2), after

    def name_gates(self, extra: Tensor | None, dtype: torch.dtype) -> Gates:
        """Return the scalars in `extra` [B, H, .., E] by name, in the type of running sums for queries of `dtype`.

        With an `output` gate, they keep their type (see `scale_outputs`). Raises `ValueError` for another E.
        """
        if not self.gates:
            return {}
        if extra is None or extra.shape[-1] != self.extra_per_head:
            found = None if extra is None else list(extra.shape)
            raise ValueError(f"{self.name} needs extra scalars [B, H, T, {self.extra_per_head}], found {found}")
        extra = extra if "output" in self.gates else extra.to(accumulator_dtype(dtype))
        parts = extra.split(list(self.gates.values()), dim=-1) if len(self.gates) > 1 else (extra,)
        return dict(zip(self.gates, parts, strict=True))

    @abstractmethod
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, state: State | None, gates: Gates) -> Out[State]:
        """Compute what `attend` returns, which itself handles NaN, infinity and autocast. All `gates` are given.

        Outputs of `_attend`, `_attend_all` and `_step` may have any type: the caller converts them to that of v.
        """

    def attend_all(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, extra: Tensor | None = None
    ) -> Tensor:
        """Return outputs [B, H, T, V] of the bidirectional form: a position sees all positions of its own sequence.

        `lengths` (int64 [B], from 0 to T; None: all T) are the numbers of positions in the sequences. The positions
        after them are padding: their inputs change nothing, even if they are NaN, and get no gradient. Outputs at the
        padding are 0. Raises `UsageError` if the mechanism has no bidirectional form.
        """
        if not self.bidirectional:
            options = " with these options" if type(self).bidirectional else ""
            raise UsageError(f"'{self.name}'{options} has no bidirectional form; use another one, such as 'linear'")
        lengths = None if lengths is None else check_lengths(lengths, len(q), q.shape[2])
        with torch.autocast(q.device.type, enabled=False):
            if lengths is None:
                return self._attend_all(q, k, v, None, self.name_gates(extra, q.dtype)).to(v.dtype)
            q, k, v = (fill_padding(x, lengths) for x in (q, k, v))
            extra = None if extra is None else fill_padding(extra, lengths)
            # A sequence without positions is computed as one position, because an average over nothing would be NaN.
            y = self._attend_all(q, k, v, lengths.clamp(min=1), self.name_gates(extra, q.dtype))
            return fill_padding(y.to(v.dtype), lengths)

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, gates: Gates) -> Tensor:
        """Compute what `attend_all` of a `bidirectional` mechanism returns: 0 at the padding, `lengths` from 1 to T."""
        raise NotImplementedError

    @abstractmethod
    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> State:
        """Return the state before the first position; a GROWING state allocates room for `capacity` positions."""

    @torch.no_grad()
    def step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: State, extra_t: Tensor | None = None) -> Out[State]:
        """Return a position's output [B, H, V] and the new state, without gradients; may update `state` in place."""
        # Autocast is disabled only if it is on, because disabling it takes a noticeable part of a step's time.
        if torch.is_autocast_enabled(q_t.device.type):
            with torch.autocast(q_t.device.type, enabled=False):
                return self.step(q_t, k_t, v_t, state, extra_t)
        y_t, state = self._step(q_t, k_t, v_t, state, self.name_gates(extra_t, q_t.dtype))
        return y_t.to(v_t.dtype), state

    @abstractmethod
    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: State, gates_t: Gates) -> Out[State]:
        """Compute what `step` returns."""

    def state_bytes(self, batch: int, positions: int, dtype: torch.dtype) -> int:
        """Return bytes of the state after `positions` positions, for inputs of `dtype`."""
        return measure_state_bytes(self.init_state(batch, positions, torch.device("meta"), dtype))

    def emit(self, inputs: MixInputs) -> None:
        """Emit the operation that computes `step`; see `native/program.py`. Raises `NoProgram` if there is none."""
        raise NoProgram(f"it does not support {self.name} attention")

    def list_states(self, state: State) -> list[Tensor]:
        """Return the tensors [B, ...] of `state` that fill the state buffers created by `emit`, in the same order."""
        return [part for part in state_tensors(state) if part.dim()]

    def fix_state(self, state: State, place: Tensor, room: Tensor, dtype: torch.dtype) -> Any:
        """`state`, or another form of it that a fused step on a device updates in place.

        Inputs are of `dtype`. `place` (0-d int64, on the device) is the number of positions before the next step.
        `room` (0-d int64, on the host) is a larger number, which changes rarely.
        """
        return state


class SumAttention(Attention[Options, State]):
    """A mechanism whose state is a sum of constant size."""

    family = "kernel"
    memory = Memory.CONSTANT
    compiled: ClassVar[Operation[Callable[..., object]] | None] = CAUSAL_SUMS


def as_sequence(gates_t: Gates) -> Gates:
    """Return the gates of one position [B, H, width] as those of a sequence of one position."""
    return {name: gate.unsqueeze(2) for name, gate in gates_t.items()}


class Shared(NamedTuple):
    """A state tensor without a batch axis, shared by all images and never changed after its creation."""

    tensor: Tensor


def state_tensors(state: object) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, tuple):
        for part in state:
            yield from state_tensors(part)


def measure_state_bytes(state: object) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state_tensors(state))


def fork_state(state: State, copies: int = 1) -> State:
    """Return an independent copy of `state` with each image repeated `copies` times. Copies of an image are adjacent.

    Tensors without a batch (those without axes, and `Shared` ones) are copied but not repeated.
    """

    def repeat(x: Tensor) -> Tensor:
        return x.repeat_interleave(copies, dim=0) if copies > 1 else x.clone()

    return map_states(repeat, state, common=Tensor.clone)


def select_images(state: State, images: Tensor) -> State:
    """Return the state of the images with these numbers int64 [n] of `state`, in this order."""
    return map_states(lambda x: x.index_select(0, images), state)


def fork_into(tensor: Tensor, rows: Tensor) -> None:
    """Copy `rows` [n, ...] into `tensor` [B, ...], each to B / n adjacent images, as `fork_state` repeats them."""
    tensor.unflatten(0, (len(rows), -1)).copy_(rows.unsqueeze(1))


def map_states(
    change: Callable[..., Tensor], first: State, *others: State, common: Callable[[Tensor], Tensor] = lambda x: x
) -> State:
    """Apply `change` to corresponding tensors; for a tensor of all images, return `common` of the first one."""
    if isinstance(first, Shared):
        return cast(State, Shared(common(first.tensor)))
    if isinstance(first, Tensor):
        return cast(State, change(first, *others) if first.dim() else common(first))
    if isinstance(first, tuple):
        rest = cast(tuple[tuple[object, ...], ...], others)
        parts = [map_states(change, *part, common=common) for part in zip(first, *rest, strict=True)]
        return cast(State, type(first)(*parts) if hasattr(first, "_fields") else tuple(parts))
    return first
