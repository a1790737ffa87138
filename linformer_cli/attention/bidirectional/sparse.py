"""The keys of bidirectional sparse attention: near positions, columns, and summaries of blocks."""

import torch
from torch import Tensor

from linformer_cli.attention.parts.chunks import cut_chunks
from linformer_cli.attention.tensors import find_padding

from .joined import weigh
from .lists import Lists, list_blocks


def list_near(near: Tensor, symmetric: bool, stride: int, length: int) -> Lists:
    """The near positions: those that `near` [stride, stride] allows in a block, or those within less than `stride`."""
    side = stride if symmetric else 0
    rows = list_blocks(length, stride, side, side, near.device)
    distance = (rows.queries[0].unsqueeze(1) - rows.keys[0, 0]).abs()
    return rows._replace(hidden=(distance >= stride if symmetric else ~near)[None, None])


def weigh_columns(q: Tensor, k: Tensor, v: Tensor, stride: int, lengths: Tensor | None) -> Tensor:
    """The part [B, H, T, V + 2], as defined in `joined`, of the other positions t + i `stride`, for whole numbers i."""
    length = q.shape[2]
    rows = -(-length // stride)
    queries, keys, values = (cut_chunks(x, stride).transpose(2, 3) for x in (q, k, v))
    hidden = _hide_padding(q, rows * stride, lengths).unflatten(1, (rows, stride)).transpose(1, 2)
    own = torch.eye(rows, dtype=torch.bool, device=q.device)
    part = weigh(queries, keys, values, hidden[:, None, :, None] | own).transpose(2, 3)
    positions: Tensor = part.flatten(2, 3)[:, :, :length]
    return positions


def weigh_summaries(q: Tensor, k: Tensor, v: Tensor, sizes: tuple[int, int], lengths: Tensor | None) -> Tensor:
    """The part [B, H, T, V + 2] of the last c positions in every other block of l positions; `sizes` are l and c."""
    stride, summary = sizes
    length = q.shape[2]
    blocks = -(-length // stride)
    keys, values = (cut_chunks(x, stride)[:, :, :, -summary:].flatten(2, 3) for x in (k, v))
    hidden = _hide_padding(q, blocks * stride, lengths).unflatten(1, (blocks, stride))[..., -summary:].flatten(1)
    block = torch.arange(length, device=q.device) // stride
    own = block.unsqueeze(1) == torch.arange(blocks, device=q.device).repeat_interleave(summary)
    return weigh(q, keys, values, hidden[:, None, None] | own)


def _hide_padding(q: Tensor, positions: int, lengths: Tensor | None) -> Tensor:
    """True for padding, bool [B or 1, positions]."""
    return find_padding(torch.tensor([q.shape[2]], device=q.device) if lengths is None else lengths, positions)
