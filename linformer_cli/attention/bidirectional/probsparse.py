"""Bidirectional ProbSparse attention: queries with the largest measures attend; the others get the mean value."""

import torch
from torch import Tensor

from linformer_cli.attention.parts.padding import find_padding

from .joined import join, weigh


def attend_largest(q: Tensor, k: Tensor, v: Tensor, measures: Tensor, count: Tensor, lengths: Tensor) -> Tensor:
    """Outputs [B, H, T, V]; the `count` [B] queries with the largest `measures` [B, H, T] attend.

    Queries are scaled, and measures are minus infinity at the padding. Other outputs are the mean of the values.
    """
    places = measures.topk(int(count.max()), dim=-1).indices
    chosen = q.gather(2, places.unsqueeze(-1).expand(-1, -1, -1, q.shape[-1]))
    found = join([weigh(chosen, k, v, find_padding(lengths, k.shape[2])[:, None, None])])
    means = (v.sum(dim=2) / lengths.view(-1, 1, 1)).unsqueeze(2)
    # Short sequences have fewer attending queries than places.
    used = torch.arange(places.shape[-1], device=q.device) < count.view(-1, 1, 1)
    found = torch.where(used.unsqueeze(-1), found, means)
    y: Tensor = means.expand_as(v).scatter(2, places.unsqueeze(-1).expand_as(found), found)
    return y
