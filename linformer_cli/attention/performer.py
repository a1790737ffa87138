"""Performer (Choromanski 2020, FAVOR+, arXiv 2009.14794): softmax attention estimated by random features."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from linformer_cli.native.constants import STEP_MAPS
from .base import AttentionOptions, AttentionShape, Chunk, Gates, MixInputs, Out, SumAttention, setting
from .kernels.registry import EXPONENTIAL_ATTENTION, kernel_for
from .parts.random_features import (
    RELU_OFFSET,
    WEIGHT_FLOOR,
    FeatureMapName,
    PerformerMap,
    divide_by_floored_weight,
    divide_sums,
    draw_directions,
    exp_below_maximum,
    raise_maximum,
    replace_vanished,
    seeded_normal,
    sine_features,
)
from .parts.sums import causal_sums, decayed_causal_sums, divide_by_weight, read_whole_sums, update_and_read
from .tensors import accumulator_dtype, fill_padding


class PerformerOptions(AttentionOptions):
    feature_map: FeatureMapName = setting("positive", "phi, the random feature map of queries and keys")
    features: int | None = setting(None, "m, number of features (default: K ln K, rounded up to a multiple of 8)", gt=0)
    orthogonal: bool = setting(True, "use random directions that are orthogonal in blocks of K, not independent")
    redraw_every: int = setting(0, "training steps between redraws of the directions; 0 never redraws", ge=0)
    chunk: Chunk = 64

    def check(self) -> None:
        if self.features is not None and self.features % self.features_per_direction:
            found = f"an even number of 'features', found {self.features}"
            raise ValueError(f"feature_map '{self.feature_map}' makes two features per direction and needs {found}")

    @property
    def features_per_direction(self) -> int:
        return 2 if self.feature_map in ("hyperbolic", "trig") else 1


class PerformerState(NamedTuple):
    """s [B, H, m, V + 1], the sum of phi(k_j) [v_j, 1]^T divided by exp(c); its last column is z.

    c is the running maximum of the exponents: [B, H, m] for `positive` and `hyperbolic`, and [B, H] for `trig`, which
    also has n [B, H], the total weight of the keys. `relu` has neither c nor n.
    """

    s: Tensor
    c: Tensor | None = None
    n: Tensor | None = None


class PerformerAttention(SumAttention[PerformerOptions, PerformerState]):
    """y_t = sum over j <= t of A_tj v_j / sum of A_tj, A_tj = phi(x_t) . phi(y_j), x = q K^(-1/4), y = k K^(-1/4).

    The directions are w_i ~ N(0, I). There are four feature maps. The first two come from Lemma 1 of the source:

        positive    phi_i(x) = exp(w_i . x - |x|^2 / 2)
        hyperbolic  exp(w_i . x - |x|^2 / 2) and exp(-w_i . x - |x|^2 / 2)
        trig        exp(|x|^2 / 2) [sin(w_i . x), cos(w_i . x)]
        relu        max(w_i . x, 0) + 1e-3, which does not estimate the softmax kernel

    Unlike the source's code, we add no epsilon to an exponential, and no result is defined by a maximum over the whole
    sequence, which would depend on later keys. Let a_ti and b_ji be the logarithms of feature i of query t and of key
    j, and c_i(t) the maximum of b_ji over j <= t. The state has sums of exp(b_ji - c_i(t)), which a query reads with
    the weights softmax over i of a_ti + c_i(t). `trig` keeps one maximum, that of |y_j|^2 / 2, and its denominator is
    at least a tenth of the keys' total weight.

    In the bidirectional form, the sums and the maxima are those of all positions: equation 6 of the source.
    """

    name = "performer"
    source = "Choromanski 2020, arXiv 2009.14794"
    method = "random features of softmax, running sums"
    bidirectional = True
    directions: Tensor

    def __init__(self, options: PerformerOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        width = shape.key_width
        self.features = options.features or 8 * max(1, math.ceil(width * math.log(width) / 8))
        count = self.features // options.features_per_direction
        # w [directions, K], the same for all heads.
        self.register_buffer("directions", draw_directions(count, width, options.orthogonal))

    @torch.no_grad()
    def on_training_step(self, step: int, seed: int) -> None:
        if self.options.redraw_every and step % self.options.redraw_every == 0:
            count, width = self.directions.shape
            normal = seeded_normal(seed, self.shape.layer, step)
            self.directions.copy_(draw_directions(count, width, self.options.orthogonal, normal))

    @property
    def _map(self) -> PerformerMap:
        return PerformerMap(self.directions, self.options.feature_map)

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """Estimate exp(x_t . y_j) [B, H, T, J] from q [B, H, T, K] and k [B, H, J, K]: scaled phi(x_t) . phi(y_j).

        For inspection of moderate inputs: exponentials are not stabilised. `relu` does not estimate this kernel.
        """
        phi = self._map
        if self.options.feature_map == "relu":
            return phi.relu(q) @ phi.relu(k).transpose(-1, -2) / self.features
        half_q, half_k = phi.half_square(q).unsqueeze(-1), phi.half_square(k).unsqueeze(-1)
        if self.options.feature_map == "trig":
            phi_q, phi_k = (sine_features(phi.project(x)) * half.exp() for x, half in ((q, half_q), (k, half_k)))
            return phi_q @ phi_k.transpose(-1, -2)
        phi_q, phi_k = (phi.log_query(q) - half_q).exp(), phi.log_key(k).exp()
        return phi_q @ phi_k.transpose(-1, -2) / self.features

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: PerformerState | None, gates: Gates
    ) -> Out[PerformerState]:
        if self.options.feature_map in ("positive", "hyperbolic"):
            return self._attend_exponential(q, k, v, state)
        dtype = accumulator_dtype(q.dtype)
        # With a column of ones appended to the values, the last column of s is z.
        q, k, values = q.to(dtype), k.to(dtype), functional.pad(v.to(dtype), (0, 1), value=1.0)
        if self.options.feature_map == "trig":
            return self._attend_trigonometric(q, k, values, state)
        phi_q, phi_k = self._map.relu(q), self._map.relu(k)
        sums, s = causal_sums(phi_q, phi_k, values, None if state is None else state.s, self.options.chunk)
        return divide_by_weight(sums[..., :-1], sums[..., -1]), PerformerState(s)

    def _attend_exponential(self, q: Tensor, k: Tensor, v: Tensor, state: PerformerState | None) -> Out[PerformerState]:
        """`_attend` for `positive` and `hyperbolic`: key features over their maximum, which cancels in y."""
        dtype = accumulator_dtype(q.dtype)
        before = None if state is None or state.c is None else (state.s, state.c)

        def log_features() -> tuple[Tensor, Tensor]:
            return self._map.log_query(q.to(dtype)), self._map.log_key(k.to(dtype))

        if attend := kernel_for(EXPONENTIAL_ATTENTION, q, k, v):
            found = attend(q, k, v, self._map.exponent_columns(dtype), before)
            y = replace_vanished(found.y, found.weights, log_features, functional.pad(v, (0, 1), value=1.0), before)
            return y, PerformerState(torch.cat([found.s, found.z.unsqueeze(-1)], dim=-1), found.c)
        (a, b), values = log_features(), functional.pad(v.to(dtype), (0, 1), value=1.0)
        c = b.detach().amax(dim=2)
        c = c if before is None else torch.maximum(c, before[1])
        carried = before and before[0] * (before[1] - c).exp().unsqueeze(-1)
        units = c.unsqueeze(2)
        sums, s = causal_sums((a + units).softmax(dim=-1), (b - units).exp(), values, carried, self.options.chunk)
        return divide_sums(sums, lambda: (a, b), values, before), PerformerState(s, c)

    def _attend_trigonometric(
        self, q: Tensor, k: Tensor, values: Tensor, state: PerformerState | None
    ) -> Out[PerformerState]:
        exponent = self._map.half_square(k)
        c = exponent.detach().cummax(dim=-1).values
        before, sums_before, total_before = c[..., :1], None, None
        if state is not None:
            assert state.c is not None and state.n is not None
            c = torch.maximum(c, state.c.unsqueeze(-1))
            # Before the first position, there is no maximum and nothing to rescale.
            before = torch.where(state.c.isinf().unsqueeze(-1), c[..., :1], state.c.unsqueeze(-1))
            sums_before, total_before = state.s, state.n[..., None, None]
        log_decay = torch.cat([before, c[..., :-1]], dim=-1) - c
        weights = (exponent - c).exp().unsqueeze(-1)
        phi_q, phi_k = sine_features(self._map.project(q)), sine_features(self._map.project(k))
        chunk, ones = self.options.chunk, torch.ones_like(weights)
        sums, s = decayed_causal_sums(phi_q, phi_k, values * weights, log_decay, sums_before, chunk)
        totals, n = decayed_causal_sums(ones, ones, weights, log_decay, total_before, chunk)
        return divide_by_floored_weight(sums, totals.squeeze(-1)), PerformerState(s, c[..., -1].clone(), n.flatten(1))

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, gates: Gates) -> Tensor:
        dtype = accumulator_dtype(q.dtype)
        q, k, values = q.to(dtype), k.to(dtype), v.to(dtype)
        floor = None
        if self.options.feature_map == "relu":
            phi_q, phi_k = self._map.relu(q), self._map.relu(k)
        elif self.options.feature_map == "trig":
            weights = exp_below_maximum(self._map.half_square(k).unsqueeze(-1), lengths)
            phi_q, phi_k = sine_features(self._map.project(q)), sine_features(self._map.project(k)) * weights
            floor = WEIGHT_FLOOR * weights.sum(dim=2)
        else:
            a, b = self._map.log_query(q), self._map.log_key(k)
            c = fill_padding(b.detach(), lengths, -math.inf).amax(dim=2, keepdim=True)
            phi_q, phi_k = (a + c).softmax(dim=-1), exp_below_maximum(b, lengths)
        sums, weight = read_whole_sums(phi_q, phi_k, values, lengths)
        return divide_by_weight(sums, weight if floor is None else torch.maximum(weight, floor))

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> PerformerState:
        heads, dtype = self.shape.heads, accumulator_dtype(dtype)
        s = torch.zeros(batch, heads, self.features, self.shape.value_width + 1, device=device, dtype=dtype)
        if self.options.feature_map == "relu":
            return PerformerState(s)
        if self.options.feature_map == "trig":
            n = s.new_zeros(batch, heads)
            return PerformerState(s, torch.full_like(n, -math.inf), n)
        return PerformerState(s, s.new_full(s.shape[:-1], -math.inf))

    def _step(
        self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: PerformerState, gates_t: Gates
    ) -> Out[PerformerState]:
        s, c, n = state
        q_t, k_t, v_t = (x.to(accumulator_dtype(s.dtype)) for x in (q_t, k_t, v_t))
        values = functional.pad(v_t, (0, 1), value=1.0)
        if c is None:
            phi_q, phi_k = self._map.relu(torch.stack([q_t, k_t]))
            sums = update_and_read(s, phi_q, phi_k, values)
            y_t = divide_by_weight(sums[..., :-1], sums[..., -1])
        elif n is not None:
            exponent = self._map.half_square(k_t)
            rescale = raise_maximum(c, exponent)
            weight = exponent.sub_(c).exp_()
            n.mul_(rescale).add_(weight)
            phi_q, phi_k = sine_features(self._map.project(torch.stack([q_t, k_t])))
            phi_k.mul_(weight.unsqueeze(-1))
            y_t = divide_by_floored_weight(update_and_read(s, phi_q, phi_k, values, rescale.unsqueeze(-1)), n)
        else:
            a, b = self._map.log_query(torch.stack([q_t, k_t]))
            b -= self._map.half_square(k_t).unsqueeze(-1)
            rescale = raise_maximum(c, b)
            sums = update_and_read(s, a.add_(c).softmax(dim=-1), b.sub_(c).exp_(), values, rescale)
            y_t = sums[..., :-1] / sums[..., -1:]
        return y_t, state

    def emit(self, inputs: MixInputs) -> None:
        builder, count = inputs.builder, len(self.directions)
        sums = {"s": inputs.state(self.features * self.shape.value_width), "z": inputs.state(self.features)}
        columns = self._map.columns(torch.float32)
        if self.options.feature_map == "relu":
            # This is the learned map of linear attention, without a bias and with one matrix for all heads.
            sums |= {"weight": builder.shared(columns), "bias": builder.shared(torch.zeros(count))}
            inputs.emit("linear", **sums, C=count, map=STEP_MAPS["learned"], own_weights=False, offset=RELU_OFFSET)
        elif self.options.feature_map == "trig":
            sums |= {"c": inputs.state(1, -math.inf), "n": inputs.state(1)}
            inputs.emit("performer_trig", **sums, directions=builder.shared(columns), C=self.features, D=count)
        else:
            sums["largest"] = inputs.state(self.features, -math.inf)
            inputs.emit("performer", **sums, directions=builder.shared(columns), C=self.features, D=count)

    def list_states(self, state: PerformerState) -> list[Tensor]:
        s, *maxima = state
        return [s[..., :-1], s[..., -1], *(part for part in maxima if part is not None)]
