"""Attention in which groups of queries share a list of keys, such as a block and its neighbours."""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from linformer_cli.attention.parts.recomputed import SCORES_KEPT, run_within

from .joined import weigh_once

# Blocks shorter than this cost more overhead than they save in products.
SHORTEST_BLOCK = 16


class Lists(NamedTuple):
    """Groups of R queries, each with a list of S keys, by their positions.

    queries is int64 [groups, R] and holds every position once. keys is int64 [H or 1, groups, S]. Numbers that are not
    positions are ignored. `hidden` (bool, [H or 1, groups or 1, R or 1, S]) is True for the keys that a query does not
    see.
    """

    queries: Tensor
    keys: Tensor
    hidden: Tensor


def weigh_lists(q: Tensor, k: Tensor, v: Tensor, lists: Lists, lengths: Tensor | None) -> Tensor:
    """The part [B, H, T, V + 2], as defined in `joined`, of scaled queries [B, H, T, K] for their lists of keys."""
    ends = q.shape[2] if lengths is None else lengths.view(-1, 1, 1, 1)
    keys = lists.keys.unsqueeze(0)
    hidden = lists.hidden | ((keys < 0) | (keys >= ends)).unsqueeze(-2)
    scores = lists.queries.numel() * lists.keys.shape[-1]
    return run_within(SCORES_KEPT, scores, functools.partial(_gather_and_weigh, lists, hidden), q, k, v)


def _gather_and_weigh(lists: Lists, hidden: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    part: Tensor = weigh_once(
        hidden, _gather(q, lists.queries.unsqueeze(0)), _gather(k, lists.keys), _gather(v, lists.keys)
    )
    part = part.flatten(2, 3)
    return part.index_select(2, lists.queries.flatten().argsort()[: q.shape[2]])


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    """[B, H, groups, S, W] for x [B, H, T, W] and rows [H or 1, groups, S]."""
    heads, length = x.shape[1:3]
    at = rows.clamp(0, length - 1) + torch.arange(heads, device=x.device).view(-1, 1, 1) * length
    rows_of_groups: Tensor = x.flatten(1, 2).index_select(1, at.flatten()).unflatten(1, at.shape)
    return rows_of_groups


def list_windows(length: int, reach: int, dilation: int, device: torch.device) -> Lists:
    """Position t sees t + i `dilation` for the whole numbers i from -reach to reach.

    Within one residue class of positions mod dilation, a window is contiguous. The positions of a class are cut into
    blocks that share their keys.
    """
    per_class = math.ceil(length / dilation)
    block = min(per_class, max(reach, SHORTEST_BLOCK))
    residue = torch.arange(dilation, device=device).view(-1, 1, 1)
    start = torch.arange(0, per_class, block, device=device).unsqueeze(-1)
    place, offset = (torch.arange(-side, block + side, device=device) for side in (0, reach))
    queries, keys = ((residue + dilation * (start + x)).flatten(0, 1) for x in (place, offset))
    hidden = (offset - place.unsqueeze(-1)).abs() > reach
    return Lists(queries, keys.unsqueeze(0), hidden[None, None])


def list_blocks(length: int, block: int, before: int, after: int, device: torch.device) -> Lists:
    """Every position sees its block of `block` positions, `before` positions before it and `after` positions after."""
    start = torch.arange(0, length, block, device=device).unsqueeze(-1)
    queries = start + torch.arange(block, device=device)
    keys = start + torch.arange(-before, block + after, device=device)
    return Lists(queries, keys.unsqueeze(0), torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device))
