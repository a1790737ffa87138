"""The contract that every attention meets: one class, two executions, one state.

Axis letters, the same everywhere: B images, H heads, T positions, K width of a query or key, V width of a value,
C width of a feature, E extra scalars of a head. Queries and keys are [B, H, T, K], values [B, H, T, V]; a tensor of
one position has no T axis and its name ends in `_t`.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from linformer_cli.config import Config

State = TypeVar("State")


class Memory(enum.StrEnum):
    """What a state does as the number of positions grows."""

    CONSTANT = "constant"
    BOUNDED = "bounded"
    GROWING = "growing"


@dataclass(frozen=True)
class AttentionShape:
    """The sizes that a mechanism is built for.

    `positions` is the T of a whole image and `row` the number of values of one image row; `layer` numbers the layer,
    for mechanisms whose fixed pattern differs by layer.
    """

    heads: int
    key_width: int
    value_width: int
    positions: int
    row: int
    layer: int = 0


class AttentionOptions(Config):
    """Base of every mechanism's options: frozen, unknown keys refused. Field descriptions appear in the help."""


class Attention(nn.Module, ABC):
    """One mechanism, in both its forms.

    `attend` continuing from a state is the whole idea: training is `attend` from nothing, priming is `attend` over
    the known values, and `step` is `attend` at T = 1 without gradients. For every way of cutting a sequence into
    blocks the outputs are the same.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    family: ClassVar[str]
    method: ClassVar[str]
    memory: ClassVar[Memory]
    options_type: ClassVar[type[AttentionOptions]]
    # The layer projects once and passes the same tensor as q and k.
    shared_query_key: ClassVar[bool] = False
    # It replaces attention and feed-forward together: a gated block is built around it, not a transformer block.
    gated: ClassVar[bool] = False
    # E, the number of extra scalars per head and position that the layer projects for this mechanism.
    extra_per_head: int = 0
    # Where the bias of that projection starts: 5, say, for a gate that should be nearly open at first.
    extra_bias: float = 0.0

    def __init__(self, options: AttentionOptions, shape: AttentionShape) -> None:
        super().__init__()
        self.options = options
        self.shape = shape

    @classmethod
    def fit_shape(cls, options: Any, shape: AttentionShape, width: int) -> AttentionShape:
        """The sizes it has in a model of `width` whose vectors are cut into the heads of `shape`."""
        return shape

    def on_training_step(self, step: int, seed: int) -> None:
        """Called before training step `step` of a run with `seed`, never in evaluation: a chance to draw buffers anew.

        What it does must depend on the two numbers and the layer alone, so that a resumed run is the unbroken one.
        """

    def is_compiled(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether `attend` would compute inputs of this type with kernels compiled here, rather than in plain torch."""
        return False

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any = None, extra: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Outputs [B, H, T, V] of T >= 1 positions after those in `state` (None: no positions), and the new state.

        Differentiable, also through `state`, which is left as it was.
        """

    @abstractmethod
    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> Any:
        """The state of the empty prefix; `capacity` is how many positions a GROWING state should make room for."""

    @abstractmethod
    def step(
        self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: Any, extra_t: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """The output [B, H, V] of one position, no gradients; may update `state` in place: keep what it returns."""

    @abstractmethod
    def state_bytes(self, batch: int, positions: int, dtype: torch.dtype) -> int:
        """Bytes of the state after `positions` positions, for inputs of `dtype`."""


class Shared(NamedTuple):
    """A tensor with axes of a state that is the same for all images, so that its first axis is not the batch.

    It is written once, when the state is made: neither `attend` nor `step` changes it.
    """

    tensor: Tensor


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that running sums are kept in: float64 for float64 inputs, float32 for everything smaller."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def state_tensors(state: Any) -> Iterator[Tensor]:
    """Every tensor of a (nested) state."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, tuple):
        for part in state:
            yield from state_tensors(part)


def measure_state_bytes(state: Any) -> int:
    """The bytes that the tensors of `state` really hold."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state_tensors(state))


def fork_state(state: State, copies: int = 1) -> State:
    """An independent copy of `state`, each image repeated `copies` times (image i becomes i * copies and on).

    The first axis of every state tensor is the batch; a tensor without axes belongs to all images, and so does one
    that is `Shared`: it is copied, but not repeated.
    """
    if isinstance(state, Shared):
        return cast(State, Shared(state.tensor.clone()))
    if isinstance(state, Tensor):
        forked = state.repeat_interleave(copies, dim=0) if state.dim() and copies > 1 else state.clone()
        return cast(State, forked)
    if isinstance(state, tuple):
        parts = (fork_state(part, copies) for part in state)
        return cast(State, type(state)(*parts) if hasattr(state, "_fields") else tuple(parts))
    return state
