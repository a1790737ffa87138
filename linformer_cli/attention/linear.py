"""Linear attention (Katharopoulos 2020, 'Transformers are RNNs', arXiv 2006.16236): feature maps replace softmax.

The definition compares every query with every earlier key, in time T^2:

    weights = (phi(q) @ phi(k).transpose(-1, -2)).tril()
    y = (weights @ v) / weights.sum(dim=-1, keepdim=True)

Without the mask, (phi(q) phi(k)^T) v is phi(q) (phi(k)^T v), in time T. With the mask, phi(k)^T v becomes a running
sum, which is all that a step needs to know of the past.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from linformer_cli.native.constants import STEP_MAPS
from .base import AttentionOptions, AttentionShape, Chunk, Gates, MixInputs, Out, SumAttention, setting
from .kernels.registry import FOLDED_STEP, LINEAR_ATTENTION, LINEAR_ATTENTION_ALL, find_kernel, kernel_for
from .parts.feature_maps import FEATURE_MAPS, Learned
from .parts.folded_sums import FoldedState, build_folded_state, step_folded
from .parts.sums import causal_sums, divide_by_weight, read_whole_sums, update_and_read
from .tensors import accumulator_dtype, fill_padding


class LinearOptions(AttentionOptions):
    feature_map: Literal["elu", "relu", "poly2", "taylor2", "learned"] = setting(
        "elu", "phi, the map of queries and keys"
    )
    features: int | None = setting(None, "C, width of the 'learned' feature map (default: the width of a key)", gt=0)
    chunk: Chunk = 64

    def check(self) -> None:
        if self.features is not None and self.feature_map != "learned":
            raise ValueError(f"'features' is for feature_map 'learned'; the width of '{self.feature_map}' is fixed")


class LinearState(NamedTuple):
    """s [B, H, C, V], the sum of phi(k_j) v_j^T, and z [B, H, C], the sum of phi(k_j)."""

    s: Tensor
    z: Tensor


class LinearAttention(SumAttention[LinearOptions, LinearState]):
    """y_t = phi(q_t) s_t / (phi(q_t) . z_t), with s_t = s_{t-1} + phi(k_t) v_t^T and z_t = z_{t-1} + phi(k_t).

    These are equations 18 to 20 of the source. Unlike the source's code, we add no epsilon to the denominator, since it
    would bias `poly2`. Where the denominator is exactly 0, y_t is 0. All sums are float32 or float64.

    In the bidirectional form, s and z are the sums over all positions: equation 4 of the source.
    """

    name = "linear"
    source = "Katharopoulos 2020, arXiv 2006.16236"
    method = "fixed feature map, running sums"
    bidirectional = True

    def __init__(self, options: LinearOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        self.feature_map = FEATURE_MAPS[options.feature_map](shape.heads, shape.key_width, options.features)

    def is_compiled(self, device: torch.device, dtype: torch.dtype) -> bool:
        widths = self.shape.key_width, self.shape.value_width
        fused = find_kernel(LINEAR_ATTENTION, device, dtype, widths, self.options.feature_map)
        return fused is not None or super().is_compiled(device, dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None, gates: Gates) -> Out[LinearState]:
        dtype = accumulator_dtype(q.dtype)
        s, z = (None, None) if state is None else state
        # A single kernel computes the feature map, the sums and the division.
        if attend := kernel_for(LINEAR_ATTENTION, q, k, v, feature_map=self.options.feature_map):
            y, s, z = attend(q, k, v, s, z, self.options.feature_map)
            return y, LinearState(s, z)
        phi_q, phi_k = self.feature_map(q.to(dtype)), self.feature_map(k.to(dtype))
        # With a column of ones appended to the values, the last column of s is z.
        values = functional.pad(v.to(dtype), (0, 1), value=1.0)
        carried = None if s is None or z is None else torch.cat([s, z.unsqueeze(-1)], dim=-1)
        both, total = causal_sums(phi_q, phi_k, values, carried, self.options.chunk)
        y = divide_by_weight(both[..., :-1], both[..., -1])
        # These are copies, because a view of one part would keep both parts in memory.
        return y, LinearState(total[..., :-1].contiguous(), total[..., -1].contiguous())

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, gates: Gates) -> Tensor:
        dtype = accumulator_dtype(q.dtype)
        if attend_all := kernel_for(LINEAR_ATTENTION_ALL, q, k, v, feature_map=self.options.feature_map):
            return attend_all(q, fill_padding(k, lengths, -math.inf), v, self.options.feature_map)
        phi_q, phi_k = self.feature_map(q.to(dtype)), self.feature_map(k.to(dtype))
        return divide_by_weight(*read_whole_sums(phi_q, phi_k, v.to(dtype), lengths))

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> LinearState:
        heads, width = self.shape.heads, self.feature_map.width
        dtype = accumulator_dtype(dtype)
        s = torch.zeros(batch, heads, width, self.shape.value_width, device=device, dtype=dtype)
        return LinearState(s, torch.zeros(batch, heads, width, device=device, dtype=dtype))

    def fix_state(self, state: LinearState, place: Tensor, room: Tensor, dtype: torch.dtype) -> Any:
        s, z = (part.contiguous() for part in state)
        widths = self.shape.key_width, self.shape.value_width
        if find_kernel(FOLDED_STEP, s.device, dtype, widths, self.options.feature_map):
            return build_folded_state(s, z, place, dtype)
        return LinearState(s, z)

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: Any, gates_t: Gates) -> tuple[Tensor, Any]:
        if isinstance(state, FoldedState):
            return step_folded(q_t, k_t, v_t, state, self.options.feature_map), state
        s, z = state
        phi_q, phi_k = self.feature_map(q_t.to(z.dtype)), self.feature_map(k_t.to(z.dtype))
        numerator = update_and_read(s, phi_q, phi_k, v_t.to(z.dtype))
        z.add_(phi_k)
        return divide_by_weight(numerator, (phi_q * z).sum(dim=-1)), state

    def emit(self, inputs: MixInputs) -> None:
        builder, width = inputs.builder, self.feature_map.width
        sums = {"s": inputs.state(width * self.shape.value_width), "z": inputs.state(width)}
        learned = {}
        if isinstance(self.feature_map, Learned):
            weight, bias = self.feature_map.weight, self.feature_map.bias
            learned = {"weight": builder.shared(weight.transpose(1, 2)), "bias": builder.shared(bias)}
        inputs.emit("linear", **sums, **learned, C=width, map=STEP_MAPS[self.options.feature_map], own_weights=True)
