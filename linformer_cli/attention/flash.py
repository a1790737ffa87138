"""FLASH, mixed-chunk attention (Hua 2022, arXiv 2202.10447): squared relu within chunks, linear between chunks."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .base import AttentionShape, Gates, Memory, MixInputs, Out, setting
from .parts.caches import add_cache
from .parts.gated_attention import GatedAttention, GatedOptions
from .tensors import accumulator_dtype, host_number


class FlashOptions(GatedOptions):
    chunk: int = setting(256, "C, positions per chunk; the first chunk starts at the first position", gt=0, le=65_536)


class FlashState(NamedTuple):
    """The current chunk, and the sum over finished chunks.

    z [B, 1, C, K] and v [B, 1, C, V] hold the current chunk; only the first `position` mod C rows are valid. s [B, 1,
    K, V] is the sum of k'_j v_j^T, with k' as in `FlashAttention`. `position` (0-d int64) counts positions.
    """

    z: Tensor
    v: Tensor
    s: Tensor
    position: Tensor


class FlashAttention(GatedAttention[FlashOptions, FlashState]):
    """y_t = sum over j <= t in the chunk of t of relu(q_t . k_j / C + b[t - j])^2 v_j
           + sum over j in earlier chunks of (q'_t . k'_j / C) v_j

    q, k, q' and k' are four scaled and shifted copies of one projection Z. This is section 3.2 of the source. Chunks
    start at multiples of C, and the last chunk may be partial. With `scale = "width"`, there is no b. The weights are
    then relu(q_t . k_j / sqrt(K))^2 / C in the chunk of t, and q'_t . k'_j / (C sqrt(K)) in earlier chunks. Weights are
    not normalised, so outputs can be large.

    There are three differences from the source. The sum over earlier chunks is divided by C instead of the sequence
    length, which a step does not know. b is a plain table indexed by distance. Sums are float32 or float64.

    In the bidirectional form, as in the source, the first sum covers the whole chunk of t, with b[|t - j|], and the
    second sum covers all positions and is divided by the length of the sequence instead of C. The source has separate
    biases for later positions.
    """

    name = "flash"
    source = "Hua 2022, arXiv 2202.10447"
    method = "squared relu in chunks, linear between chunks, one gated head"
    memory = Memory.CONSTANT
    bidirectional = True

    def __init__(self, options: FlashOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape, span=options.chunk)
        self.period = options.chunk
        self.linear_query, self.linear_key = (self.build_scale_offset() for _ in range(2))
        # Linear products are always divided by C, and with scale 'width' also by sqrt(K).
        self.linear_scale = self.score_scale * self.weight_scale

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, state: FlashState | None, gates: Gates) -> Out[FlashState]:
        dtype, chunk = accumulator_dtype(q.dtype), self.options.chunk
        z, values = k.squeeze(1), v.squeeze(1)
        if state is None:
            known, position = 0, host_number()
            carried = z.new_zeros(len(z), z.shape[2], values.shape[2], dtype=dtype)
        else:
            known, position, carried = int(state.position) % chunk, state.position, state.s.squeeze(1)
            # Start at the beginning of the current chunk, and process its cached part again.
            z, values = (torch.cat([old[:, 0, :known], new], 1) for old, new in ((state.z, z), (state.v, values)))
        y, total = self._attend_chunks(z.to(dtype), values.to(dtype), carried, known)
        # These are copies, because views would keep all positions in memory as long as the state lives.
        rest = z.shape[1] % chunk
        kept, room = z.shape[1] - rest, (0, 0, 0, chunk - rest)
        z, values = (functional.pad(x[:, kept:], room).unsqueeze(1) for x in (z, values))
        state = FlashState(z, values, total.unsqueeze(1).clone(), position + v.shape[2])
        return y.unsqueeze(1), state

    def _attend_chunks(self, z: Tensor, v: Tensor, carried: Tensor, known: int) -> tuple[Tensor, Tensor]:
        """Return outputs of the last T positions of z [B, known + T, K] and v, after `carried`, and the last sum."""
        chunk, length = self.options.chunk, z.shape[1]
        finished = length // chunk
        edge, sums, outputs = finished * chunk, carried.unsqueeze(1), []
        if finished:
            whole_z, whole_v = (x[:, :edge].unflatten(1, (finished, chunk)).flatten(0, 1) for x in (z, v))
            added = (self.linear_key(whole_z).transpose(1, 2) @ whole_v).unflatten(0, (-1, finished))
            sums = torch.cat([sums, added], dim=1).cumsum(dim=1)
            y = self._mix_chunk(whole_z, whole_v, sums[:, :-1].flatten(0, 1), 0)
            outputs.append(y.unflatten(0, (-1, finished)).flatten(1, 2)[:, known:])
        if edge < length:
            outputs.append(self._mix_chunk(z[:, edge:], v[:, edge:], sums[:, -1], 0 if finished else known))
        return torch.cat(outputs, dim=1), sums[:, -1]

    def _mix_chunk(self, z: Tensor, v: Tensor, before: Tensor, first: int) -> Tensor:
        """Return outputs [N, R - first, V] of chunks z [N, R, K], v [N, R, V] after the sum `before` [N, K, V]."""
        rows = z[:, first:]
        inside = self.mix(self.query(rows), self.key(z), v, first)
        return torch.add(inside, self.linear_query(rows) @ before, alpha=self.linear_scale)

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, gates: Gates) -> Tensor:
        dtype, length = accumulator_dtype(q.dtype), q.shape[2]
        chunk = min(self.options.chunk, length)
        # Values are 0 at the padding, and weights are not normalised, so no mask is needed.
        z, values = (functional.pad(x.squeeze(1).to(dtype), (0, 0, 0, -length % chunk)) for x in (k, v))
        chunk_z, chunk_v = (x.unflatten(1, (-1, chunk)).flatten(0, 1) for x in (z, values))
        inside = self.mix(self.query(chunk_z), self.key(chunk_z), chunk_v, 0, causal=False)
        s = self.linear_key(z).transpose(1, 2) @ values
        ends: Tensor | int = length if lengths is None else lengths.to(dtype).view(-1, 1, 1)
        scale = self.linear_scale * self.options.chunk
        y: Tensor = inside.view_as(values) + self.linear_query(z) @ (s * scale / ends)
        return y[:, :length].unsqueeze(1)

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> FlashState:
        widths = self.shape.key_width, self.shape.value_width
        z, v = (torch.zeros(batch, 1, self.options.chunk, width, device=device, dtype=dtype) for width in widths)
        s = torch.zeros(batch, 1, *widths, device=device, dtype=accumulator_dtype(dtype))
        return FlashState(z, v, s, host_number())

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: FlashState, gates_t: Gates) -> Out[FlashState]:
        z, v, s, position = state
        place = int(position) % self.options.chunk
        z[:, :, place], v[:, :, place] = k_t, v_t
        z_t, s = k_t.to(s.dtype), s[:, 0]
        keys, values = (part[:, 0, : place + 1].to(s.dtype) for part in (z, v))
        # The keys' scale and offset are applied to the single query, not to all keys: q . (z * scale + offset).
        q = self.query(z_t)
        scale, offset = self.key.scale.to(s.dtype), self.key.offset.to(s.dtype)
        start = self.start_scores(1, place + 1, place, keys)
        start = torch.add(start, (q @ offset).unsqueeze(-1), alpha=self.score_scale)
        scores = torch.baddbmm(start, q * scale, keys.transpose(1, 2), alpha=self.score_scale)
        y_t = torch.bmm(self.activate(scores), values)
        y_t = torch.baddbmm(y_t, self.linear_query(z_t), s, beta=self.weight_scale, alpha=self.linear_scale)
        if place + 1 == self.options.chunk:
            s.baddbmm_(self.linear_key(keys).transpose(1, 2), values)
        return y_t, state._replace(position=position + 1)

    def emit(self, inputs: MixInputs) -> None:
        builder, chunk, (_, K, V) = inputs.builder, self.options.chunk, inputs.sizes
        scaled = [(self.query, self.score_scale), (self.key, 1.0)]
        scaled += [(self.linear_query, self.linear_scale), (self.linear_key, 1.0)]
        inputs.emit(
            "flash",
            **add_cache(inputs, chunk),
            state=inputs.state(K * V),
            constants=builder.shared(self.list_constants(*scaled)),
            bias=builder.shared(self.reversed_bias()),
            weights=builder.scratch("weights", chunk),
            linear_query=builder.scratch("query", K),
            chunk=chunk,
            weight_scale=self.weight_scale,
        )
