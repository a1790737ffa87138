"""Nystrom attention (Xiong 2021, 'Nystromformer', arXiv 2102.03902): low rank through learned landmarks."""

import math
from typing import NamedTuple

import torch
from pydantic import field_validator
from torch import Tensor, nn
from torch.nn import functional

from .base import Attention, AttentionOptions, AttentionShape, Gates, Memory, MixInputs, Out, Shared, setting
from .parts.chunks import PowerOfTwoChunk
from .parts.running_averages import NOTHING, read_running_averages
from .tensors import accumulator_dtype, fill_padding, find_padding, host_number

_BLOCK = 32  # the fewest positions per matrix product: larger products are faster but contain more zeros


class RecentValues(NamedTuple):
    """The last values [B, H, kernel - 1, V] as a ring, at first zeros, whose oldest value has the index `oldest`."""

    values: Tensor
    oldest: Tensor

    def ordered(self) -> Tensor:
        """Return the values [B, H, kernel - 1, V] from the oldest to the newest."""
        order = torch.arange(self.values.shape[2], device=self.values.device) + self.oldest
        return self.values.index_select(2, order % self.values.shape[2])


class CausalConvolution(nn.Module):
    """y_t = sum over i < kernel of w_i v_{t - kernel + 1 + i}, with weights w [H, kernel] and kernel >= 2.

    All columns of v share the weights, which are at first uniform within kernel^(-1/2) of 0.
    """

    def __init__(self, heads: int, kernel: int) -> None:
        super().__init__()
        self.kernel = kernel
        self.weight = nn.Parameter(torch.empty(heads, kernel).uniform_(-(kernel**-0.5), kernel**-0.5))

    def attend(self, v: Tensor, recent: RecentValues | None, dtype: torch.dtype) -> tuple[Tensor, RecentValues]:
        """Return y [B, H, T, V] in `dtype` for v [B, H, T, V] after `recent` (None: no positions), and the new ring."""
        ring, length = self.kernel - 1, v.shape[2]
        before = v.new_zeros(*v.shape[:2], ring, v.shape[3]) if recent is None else recent.ordered()
        values = torch.cat([before, v], dim=2)
        # This is a copy, because a view would keep all values in memory as long as the state lives.
        kept = values[:, :, length:].to(before.dtype, copy=True)
        # A block at least as long as the ring needs values of the previous block, but no earlier ones.
        block = max(ring, _BLOCK)
        blocks = functional.pad(values.to(dtype), (0, 0, block - ring, -length % block)).unflatten(2, (-1, block))
        # Blocks, images and columns of v lie side by side, so each head needs one matrix product: [H, block, N B V].
        columns = blocks.permute(1, 3, 2, 0, 4).flatten(2)
        one = v.shape[0] * v.shape[3]
        earlier, own = self._matrix(block, dtype).split(block, dim=-1)
        y = torch.baddbmm(own @ columns[:, :, one:], earlier, columns[:, :, :-one])
        y = y.unflatten(2, (-1, v.shape[0], v.shape[3])).permute(3, 0, 2, 1, 4).flatten(2, 3)
        return y[:, :, :length], RecentValues(kept, host_number())

    def _matrix(self, block: int, dtype: torch.dtype) -> Tensor:
        """For each position of a block, the weights of the previous and the current block: [H, block, 2 block]."""
        places = torch.arange(block, device=self.weight.device)
        index = torch.arange(2 * block, device=self.weight.device) - places.unsqueeze(1) - block + self.kernel - 1
        outside = (index < 0) | (index >= self.kernel)
        return self.weight.to(dtype)[:, index.clamp(0, self.kernel - 1)].masked_fill(outside, 0)

    def init_recent(self, batch: int, value_width: int, device: torch.device, dtype: torch.dtype) -> RecentValues:
        values = torch.zeros(batch, len(self.weight), self.kernel - 1, value_width, device=device, dtype=dtype)
        return RecentValues(values, host_number())

    @torch.no_grad()
    def step(self, v_t: Tensor, recent: RecentValues, dtype: torch.dtype) -> Tensor:
        """Return y_t [B, H, V] in `dtype`; writes v_t into the ring, in place."""
        oldest, ring = int(recent.oldest), self.kernel - 1
        weight = self.weight.to(dtype)
        # Rotate the weights instead of the ring: weight i belongs to the value i places after the oldest.
        turned = torch.cat([weight[:, ring - oldest : ring], weight[:, : ring - oldest]], dim=1).unsqueeze(1)
        y_t = torch.addcmul((turned @ recent.values.to(dtype)).squeeze(2), weight[:, ring:], v_t.to(dtype))
        recent.values.select(2, oldest).copy_(v_t)
        recent.oldest.fill_((oldest + 1) % ring)
        return y_t

    def emit(self, inputs: MixInputs) -> None:
        """Emit an operation that adds y_t to the output of an attention mechanism."""
        recent = inputs.state((self.kernel - 1) * inputs.sizes[2])
        inputs.emit("convolution", recent=recent, weights=inputs.builder.shared(self.weight), kernel=self.kernel)


class NystromOptions(AttentionOptions):
    landmarks: int = setting(32, "m, number of learned landmarks per head", gt=0)
    iterations: int = setting(6, "Newton iterations that approximate Z, the inverse of A", gt=0)
    kernel: int = setting(33, "length of the causal convolution of the values, in positions; 0 for none", ge=0)
    chunk: PowerOfTwoChunk = 32

    @field_validator("kernel")
    @classmethod
    def _a_convolution_reaches_back(cls, kernel: int) -> int:
        if kernel == 1:
            raise ValueError("a convolution over 1 position mixes nothing; give 2 or more, or 0 for none")
        return kernel


class NystromState(NamedTuple):
    """The averages b [B, H, m, V], the logs l [B, H, m] of their total weights, Z [H, m, m], and recent values.

    Z depends only on the parameters, so all images share it. `step` uses the Z that was computed when the state was
    created. `attend` recomputes Z. `recent` is None without a convolution.
    """

    averages: Tensor
    log_weights: Tensor
    inverse: Shared
    recent: RecentValues | None


class NystromAttention(Attention[NystromOptions, NystromState]):
    """y_t = f_t Z b_t + a causal depthwise convolution of v.

    Each head has learned landmarks q~, k~ [m, K], and scores are scaled by K^(-1/2). f_t = softmax(q_t k~^T) is over
    the m landmarks. Row i of b_t [m, V] is the average of v_j over j <= t, weighted by exp(q~_i . k_j). Z is the result
    of `iterations` steps Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4 for A = softmax(q~ k~^T), starting at
    A^T / (largest column sum of A x largest row sum). y_t is defined by Z, not by the inverse that Z approximates.
    There are four differences from the source:

    - Landmarks are learned parameters, initialised to N(0, 1) with q~ = k~. The source takes means of q and k over
      segments of the whole sequence, which depend on later positions and have no step form.
    - b_t is an average over the positions up to t. In the source, every landmark sees all positions.
    - The convolution covers the last `kernel` positions up to and including t, and none after t.
    - The initial value of Z is scaled per head. By default, the source's code uses one maximum over the whole batch, so
      the output for an image depends on the other images.

    Z and the averages are float32 or float64. `attend` computes Z with gradients, and `init_state` without.

    The bidirectional form is that of the source: landmarks are means over segments, as in `_segment_weights`, b covers
    all positions, and the kernel of the convolution, with the same weights, is centred at t. The learned landmarks are
    not used. Only the initial value of Z differs from the source, as above.
    """

    name = "nystrom"
    source = "Xiong 2021, arXiv 2102.03902"
    family = "low-rank"
    method = "learned landmarks, running averages, convolution of values"
    memory = Memory.CONSTANT
    bidirectional = True

    def __init__(self, options: NystromOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        self.landmark_queries = nn.Parameter(torch.randn(shape.heads, options.landmarks, shape.key_width))
        self.landmark_keys = nn.Parameter(self.landmark_queries.detach().clone())
        self.convolution = CausalConvolution(shape.heads, options.kernel) if options.kernel else None
        self.scale = shape.key_width**-0.5

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, state: NystromState | None, gates: Gates) -> Out[NystromState]:
        dtype = accumulator_dtype(q.dtype)
        queries, keys = self._scaled_landmarks(dtype)
        inverse = self.invert_landmarks(keys)
        weights = (q.to(dtype) @ keys.transpose(-1, -2)).softmax(dim=-1) @ inverse
        scores = k.to(dtype) @ queries.transpose(-1, -2)
        before = self._nothing(len(q), q.device, dtype) if state is None else state[:2]
        y, averages, log_weights = read_running_averages(weights, scores, v.to(dtype), *before, self.options.chunk)
        recent = None
        if self.convolution is not None:
            local, recent = self.convolution.attend(v, None if state is None else state.recent, dtype)
            y = y + local
        return y, NystromState(averages, log_weights, Shared(inverse.detach()), recent)

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, gates: Gates) -> Tensor:
        dtype, count = accumulator_dtype(q.dtype), min(self.options.landmarks, q.shape[2])
        ends = torch.full((1,), q.shape[2], device=q.device) if lengths is None else lengths
        q, k, wide = q.to(dtype) * self.scale, k.to(dtype), v.to(dtype)
        means = _segment_weights(ends, q.shape[2], count, dtype)
        queries, keys = means @ q, means @ k
        # A sequence shorter than `landmarks` has fewer segments. The rows and columns of missing landmarks are 0.
        missing = find_padding(ends, count)[:, None, None]
        shares, a = ((x @ keys.transpose(-1, -2)).masked_fill(missing, -math.inf).softmax(dim=-1) for x in (q, queries))
        inverse = self.invert(a.masked_fill(missing.transpose(-1, -2), 0))
        scores = fill_padding(k @ queries.transpose(-1, -2), lengths, -math.inf)
        y = shares @ inverse @ (scores.softmax(dim=2).transpose(-1, -2) @ wide)
        if self.convolution is not None:
            later = self.options.kernel - 1 - self.options.kernel // 2
            local, _ = self.convolution.attend(functional.pad(v, (0, 0, 0, later)), None, dtype)
            y = y + local[:, :, later:]
        return y

    def _scaled_landmarks(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.landmark_queries.to(dtype) * self.scale, self.landmark_keys.to(dtype) * self.scale

    def invert_landmarks(self, keys: Tensor) -> Tensor:
        """Z [H, m, m], approximately the inverse of A, for scaled landmark keys [H, m, K]."""
        return self.invert((self.landmark_queries.to(keys.dtype) @ keys.transpose(-1, -2)).softmax(dim=-1))

    def invert(self, a: Tensor) -> Tensor:
        """Z [..., m, m], approximately the inverse of a [..., m, m]."""
        largest = a.sum(dim=-2).amax(dim=-1) * a.sum(dim=-1).amax(dim=-1)
        z: Tensor = a.transpose(-1, -2) / largest[..., None, None]
        one = torch.eye(a.shape[-1], device=a.device, dtype=a.dtype)
        for _ in range(self.options.iterations):
            az = a @ z
            z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
        return z

    def _nothing(self, batch: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        size = (batch, self.shape.heads, self.options.landmarks)
        averages = torch.zeros(*size, self.shape.value_width, device=device, dtype=dtype)
        return averages, torch.full(size, NOTHING, device=device, dtype=dtype)

    @torch.no_grad()
    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> NystromState:
        accumulator = accumulator_dtype(dtype)
        averages, log_weights = self._nothing(batch, device, accumulator)
        if device.type == "meta":  # only the shape is wanted; Z would import torch's compiler, which takes seconds
            inverse = averages.new_empty(self.shape.heads, *2 * [self.options.landmarks])
        else:
            with torch.autocast(device.type, enabled=False):
                inverse = self.invert_landmarks(self._scaled_landmarks(accumulator)[1]).to(device)
        recent = None
        if self.convolution is not None:
            recent = self.convolution.init_recent(batch, self.shape.value_width, device, dtype)
        return NystromState(averages, log_weights, Shared(inverse), recent)

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: NystromState, gates_t: Gates) -> Out[NystromState]:
        averages, log_weights, inverse, recent = state
        dtype = averages.dtype
        # Each head needs one matrix product for all images: [H, B, K] times [H, K, m].
        queries, keys = (landmarks.transpose(1, 2) for landmarks in self._scaled_landmarks(dtype))
        gates = q_t.to(dtype).transpose(0, 1).bmm(keys).softmax(dim=-1).bmm(inverse.tensor)
        scores = k_t.to(dtype).transpose(0, 1).bmm(queries).transpose(0, 1)
        torch.logaddexp(log_weights, scores, out=log_weights)
        share = (scores - log_weights).exp_().unsqueeze(-1)
        averages.lerp_(v_t.to(dtype).unsqueeze(-2), share)
        y_t = (gates.transpose(0, 1).unsqueeze(-2) @ averages).squeeze(-2)
        if self.convolution is not None and recent is not None:
            y_t += self.convolution.step(v_t, recent, dtype)
        return y_t, state

    @torch.no_grad()
    def emit(self, inputs: MixInputs) -> None:
        builder, landmarks = inputs.builder, self.options.landmarks
        queries, keys = self._scaled_landmarks(torch.float32)
        inputs.emit(
            "nystrom",
            averages=inputs.state(landmarks * self.shape.value_width),
            largest=inputs.state(landmarks, initial=NOTHING),
            weights=inputs.state(landmarks),
            keys=builder.shared(keys.transpose(1, 2)),
            queries=builder.shared(queries.transpose(1, 2)),
            inverse=builder.shared(self.invert_landmarks(keys)),
            m=landmarks,
        )
        if self.convolution is not None:
            self.convolution.emit(inputs)

    def list_states(self, state: NystromState) -> list[Tensor]:
        """List the averages, the logs of total weights, weights relative to these logs (all 1), recent values."""
        parts = [state.averages, state.log_weights, torch.ones_like(state.log_weights)]
        return parts if state.recent is None else [*parts, state.recent.ordered()]


def _segment_weights(lengths: Tensor, positions: int, landmarks: int, dtype: torch.dtype) -> Tensor:
    """Return weights [B, 1, landmarks, positions] of `dtype` that average each segment of sequences of `lengths` [B].

    Position t of n belongs to segment t m / n, rounded down, of m = min(landmarks, n). Other weights are 0.
    """
    n = lengths.unsqueeze(1)
    place = torch.arange(positions, device=lengths.device)
    segment = torch.where(place < n, place * n.clamp(max=landmarks) // n, landmarks)
    members = (segment.unsqueeze(1) == torch.arange(landmarks, device=lengths.device).unsqueeze(1)).unsqueeze(1)
    return members / members.sum(dim=-1, keepdim=True).clamp(min=1).to(dtype)
