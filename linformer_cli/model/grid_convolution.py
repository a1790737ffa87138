"""A causal depthwise convolution over the grid of an image: each vector is joined by those around it that are known.

Linear attention has to find what stands two columns to the left or one row up by its sums; here it is at hand. Short
convolutions before efficient attentions (Poli 2023, Hyena, arXiv 2302.10866) are the same along the sequence alone.
"""

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linformer_cli.config import ImageShape
from linformer_cli.native.compiler import has_library, load_library

SOURCE = Path(__file__).with_name("grid_convolution.cpp")
_SIZE, _POINTER = ctypes.c_int64, ctypes.c_void_p
_SIGNATURES = {
    "lintx_grid_convolution": (*[_SIZE] * 8, *[_POINTER] * 5),
    "lintx_grid_convolution_gradient": (*[_SIZE] * 8, *[_POINTER] * 7),
}


class GridState(NamedTuple):
    """The last vectors, recent [B, reach, W], zeros for those before the first, and how many were seen: 0-d int64.

    `recent` is a ring: vector number t stands in place t mod reach.
    """

    recent: Tensor
    position: Tensor


def list_taps(image: ImageShape, rows: int, side: int) -> Tensor:
    """What a position sees besides itself, int64 [taps, 2]: how many values back, and how many columns to the left.

    That is, of its own row and the `rows` - 1 above, whatever is at most `side` pixels away in its row, and known.
    """
    row = image.values_per_row
    side = min(side * image.channels, row - 1)
    lefts = [(up, left) for up in range(rows) for left in range(side, -side - 1 if up else 0, -1)]
    return torch.tensor([(up * row + left, left) for up, left in lefts], device="cpu").reshape(-1, 2)


class GridConvolution(nn.Module):
    """y_t = x_t + sum over taps of w_tap * x_{t - back}, for vectors of any width W with weights of their own each.

    A tap beyond an edge of the image adds nothing. The state holds the last vectors, as many as the farthest tap looks
    back: about `rows` - 1 rows, whatever the length. Weights start N(0, 0.05^2).
    """

    taps: Tensor

    def __init__(self, image: ImageShape, rows: int, side: int, width: int) -> None:
        super().__init__()
        self.register_buffer("taps", list_taps(image, rows, side), persistent=False)
        self.row, self.width = image.values_per_row, width
        self.reach = int(self.taps[:, 0].max()) if len(self.taps) else 1
        self.weight = nn.Parameter(torch.empty(len(self.taps), width))
        nn.init.normal_(self.weight, std=0.05)

    def attend(self, x: Tensor, state: GridState | None) -> tuple[Tensor, GridState]:
        """y [B, T, W] for x [B, T, W] behind the vectors in `state` (None: nothing), and the state after them."""
        position = 0 if state is None else int(state.position)
        ring = torch.arange(self.reach, device=x.device)
        if state is None:
            known = x
        else:
            known = torch.cat([state.recent[:, (ring + position) % self.reach].to(x.dtype), x], dim=1)
        weight = self.weight.to(x.dtype)
        if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and has_library(SOURCE):
            y = _Convolution.apply(known.contiguous(), weight, self.taps, position, x.shape[1], self.row)
        else:
            y = self._convolve(known, weight, position, x.shape[1])
        end = position + x.shape[1]
        kept = known[:, -self.reach :]
        missing = self.reach - kept.shape[1]
        kept = nn.functional.pad(kept, (0, 0, missing, 0))  # oldest first
        return y, GridState(kept[:, (ring - end) % self.reach], torch.tensor(end, device=x.device))

    def _convolve(self, known: Tensor, weight: Tensor, position: int, length: int) -> Tensor:
        """The textbook: known [B, N, W] shifted by every tap in turn, of which the last `length` are asked for."""
        first = known.shape[1] - length
        columns = (torch.arange(length, device=known.device) + position) % self.row
        y = known[:, first:]
        for (back, left), of_tap in zip(self.taps.tolist(), weight, strict=True):
            seen = nn.functional.pad(known, (0, 0, back, 0))[:, first : first + length]
            inside = (columns >= left) & (columns - left < self.row)
            y = y + seen * (of_tap * inside.unsqueeze(-1))
        return y

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> GridState:
        recent = torch.zeros(batch, self.reach, self.width, device=device, dtype=dtype)
        return GridState(recent, torch.zeros((), dtype=torch.int64, device=device))

    @torch.no_grad()
    def step(self, x_t: Tensor, state: GridState) -> tuple[Tensor, GridState]:
        """y [B, W] for one more vector [B, W], which goes into the ring, in place."""
        recent, position = state
        back, left = self.taps.unbind(1)
        column = position % self.row - left
        inside = (column >= 0) & (column < self.row)
        weight = self.weight.to(x_t.dtype) * inside.unsqueeze(-1)
        y_t = x_t + (recent[:, (position - back) % self.reach] * weight).sum(dim=1)
        # Not by indexing, which would ask a GPU for the position.
        recent.index_copy_(1, (position % self.reach).unsqueeze(0), x_t.to(recent.dtype).unsqueeze(1))
        return y_t, GridState(recent, position.add_(1))

    def list_places(self, positions: int) -> Tensor:
        """In which place of the ring each tap finds its vector: int32 [positions, taps], -1 where there is none."""
        position = torch.arange(positions, device="cpu").unsqueeze(1)
        back, left = self.taps.cpu().unbind(1)
        column = position % self.row - left
        missing = (position < back) | (column < 0) | (column >= self.row)
        return torch.where(missing, -1, (position - back) % self.reach).to(torch.int32)

    def state_bytes(self, batch: int, dtype: torch.dtype) -> int:
        return batch * self.reach * self.width * dtype.itemsize + torch.int64.itemsize


class _Convolution(torch.autograd.Function):
    """The compiled form: one pass forward, one backward."""

    @staticmethod
    def forward(ctx: Any, known: Tensor, weight: Tensor, taps: Tensor, position: int, length: int, row: int) -> Tensor:
        ctx.save_for_backward(known, weight, taps)
        ctx.place = position, row
        y = known.new_empty(known.shape[0], length, known.shape[2])
        _call("lintx_grid_convolution", known, weight, taps, ctx.place, y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        known, weight, taps = ctx.saved_tensors
        of_known, of_weight = torch.empty_like(known), weight.new_empty(len(known), *weight.shape)
        _call(
            "lintx_grid_convolution_gradient",
            *(known, weight, taps, ctx.place, gradients[0].contiguous(), of_known, of_weight),
        )
        return of_known, of_weight.sum(dim=0), None, None, None, None


def _call(
    name: str, known: Tensor, weight: Tensor, taps: Tensor, place: tuple[int, int], y: Tensor, *more: Tensor
) -> None:
    back, left = (column.contiguous() for column in taps.unbind(1))
    function = getattr(load_library(SOURCE), name)
    function.argtypes, function.restype = _SIGNATURES[name], None
    sizes = (*known.shape, known.shape[1] - y.shape[1], *place, len(taps))
    tensors = (back, left, known, weight.contiguous(), y, *more)
    function(int(known.dtype == torch.float64), *sizes, *(tensor.data_ptr() for tensor in tensors))
