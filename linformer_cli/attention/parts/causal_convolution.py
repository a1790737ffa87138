"""A causal depthwise convolution of the values with one kernel per head; its state is a ring of recent values."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.attention.tensors import host_number
from linformer_cli.native.program import MixInputs

# The fewest positions per matrix product: larger products are faster but contain more zeros.
_BLOCK = 32


class RecentValues(NamedTuple):
    """The last kernel - 1 values [B, H, kernel - 1, V] as a ring, with zeros before the first position.

    `oldest` (a 0-d int64 tensor) is the index of the oldest value; later values follow and wrap around. A step
    overwrites the oldest value.
    """

    values: Tensor
    oldest: Tensor

    def ordered(self) -> Tensor:
        """The values [B, H, kernel - 1, V] from the oldest to the newest."""
        order = torch.arange(self.values.shape[2], device=self.values.device) + self.oldest
        return self.values.index_select(2, order % self.values.shape[2])


class CausalConvolution(nn.Module):
    """y_t = sum over i < kernel of w_i v_{t - kernel + 1 + i}, with weights w [H, kernel] and kernel >= 2.

    All columns of v share the weights. The last weight belongs to position t. Weights are initialised uniformly within
    kernel^(-1/2) of 0.
    """

    def __init__(self, heads: int, kernel: int) -> None:
        super().__init__()
        self.kernel = kernel
        self.weight = nn.Parameter(torch.empty(heads, kernel).uniform_(-(kernel**-0.5), kernel**-0.5))

    def attend(self, v: Tensor, recent: RecentValues | None, dtype: torch.dtype) -> tuple[Tensor, RecentValues]:
        """y [B, H, T, V] in `dtype` for v [B, H, T, V] after `recent` (None: no positions), and the new ring."""
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
        """The ring before the first position."""
        values = torch.zeros(batch, len(self.weight), self.kernel - 1, value_width, device=device, dtype=dtype)
        return RecentValues(values, host_number())

    @torch.no_grad()
    def step(self, v_t: Tensor, recent: RecentValues, dtype: torch.dtype) -> Tensor:
        """y_t [B, H, V] in `dtype`; writes v_t into the ring, in place."""
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
