"""Single-head attention (Merity 2019, 'SHA-RNN', arXiv 1911.11423): only queries have a matrix."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from .base import AttentionOptions, AttentionShape, MixInputs
from .parts.caches import (
    CachedAttention,
    FixedCache,
    KeyValueCache,
    add_rows,
    attend_cached,
    attend_masked,
    cache_format,
    init_cache,
)
from .tensors import accumulator_dtype


class SingleHeadOptions(AttentionOptions):
    """Single-head attention has no options."""


class OverparameterisedGate(nn.Linear):
    """A learned vector g [V] = sigmoid(f) * tanh(c), where c and f are the halves of W sigmoid(s) + b.

    s [V], W [2V, V] and b are parameters, so g does not depend on the input. The matrix only changes how g is learned.
    """

    per_position = False  # the product with W is not one of a position

    def __init__(self, width: int) -> None:
        super().__init__(width, 2 * width)
        self.start = nn.Parameter(torch.zeros(width))

    def vector(self) -> Tensor:
        c, f = self(self.start.sigmoid()).chunk(2)
        return f.sigmoid() * c.tanh()


class SingleHeadAttention(CachedAttention[SingleHeadOptions]):
    """y_t = g * sum over j <= t of softmax_j(u_t . m_j / sqrt(K)) m_j, where u_t = sigmoid(a) * sigmoid(b) * norm(q_t).

    m_j, the input of the layer at position j, is both key and value. q_t = W_q m_t + b_q, norm is a LayerNorm with
    weights, and a, b and g [K] are learned vectors. The source multiplies queries by sigmoid(a), keys by sigmoid(b) and
    values by g, which gives the same y_t. g is over-parameterised; see `OverparameterisedGate`. There is one head, as
    wide as the model, and no matrix after it.

    This is the attention of section 6 of the source. The source's blocks also have an LSTM, and only one of them has
    attention. Here every block has attention, and one norm serves q_t and m_j, where the source has two.
    """

    name = "single_head"
    source = "Merity 2019, arXiv 1911.11423"
    family = "exact"
    method = "one wide head; inputs are keys and values"
    shared_key_value = True

    def __init__(self, options: SingleHeadOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        if shape.heads != 1 or shape.key_width != shape.value_width:
            raise ValueError(f"'single_head' has one head whose keys are its values, found {shape.heads_and_widths}")
        width = shape.key_width
        self.query_norm = nn.LayerNorm(width)
        self.query_gate, self.key_gate = (nn.Parameter(torch.zeros(width)) for _ in range(2))
        self.value_gate = OverparameterisedGate(width)

    @classmethod
    def fit_shape(cls, options: SingleHeadOptions, shape: AttentionShape, width: int) -> AttentionShape:
        return replace(shape, heads=1, key_width=width, value_width=width)

    @property
    def end(self) -> nn.Linear:
        return self.value_gate

    def _scale(self) -> Tensor:
        """Return sigmoid(a) * sigmoid(b), the factor [K] of normalised queries."""
        return self.query_gate.sigmoid() * self.key_gate.sigmoid()

    def _queries(self, q: Tensor) -> Tensor:
        """Return u of the class's formula, in the type of sums."""
        dtype, norm = accumulator_dtype(q.dtype), self.query_norm
        u = nn.functional.layer_norm(q.to(dtype), norm.normalized_shape, norm.weight.to(dtype), norm.bias.to(dtype))
        return u * self._scale().to(dtype)

    def attend_cache(self, q: Tensor, cache: KeyValueCache) -> Tensor:
        return attend_cached(self._queries(q), cache, cache.keys) * self.value_gate.vector()

    def step_fixed(self, q_t: Tensor, cache: FixedCache) -> Tensor:
        keys, _, seen = cache.read()
        u = self._queries(q_t).unsqueeze(2).to(keys.dtype)
        return attend_masked(u, keys, keys, seen).squeeze(2) * self.value_gate.vector()

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> KeyValueCache:
        return init_cache(batch, replace(self.shape, value_width=0), capacity, device, dtype)

    @torch.no_grad()
    def emit(self, inputs: MixInputs) -> None:
        builder, capacity, scale = inputs.builder, self.shape.positions, self._scale()
        inputs.emit(
            "single_head",
            memory=add_rows(inputs, capacity * self.shape.key_width),
            gain=builder.shared(self.query_norm.weight * scale),
            shift=builder.shared(self.query_norm.bias * scale),
            gate=builder.shared(self.value_gate.vector()),
            capacity=capacity,
            format=cache_format(builder),
        )
