"""Bidirectional LSH attention: each round sorts a whole sequence by bucket and attends within chunks."""

import torch
from torch import Tensor
from torch.nn import functional

from linformer_cli.attention.tensors import find_padding

from .joined import join, weigh


def attend_sorted_chunks(
    q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, lengths: Tensor | None, chunk: int, average: bool
) -> Tensor:
    """Outputs [N, T, V] for q, k [N, T, K], v [N, T, V], the buckets [N, T, R] of R rounds, and lengths [N].

    A position sees the others in its chunk and in the previous chunk; the last chunk of the sequence precedes the
    first. The rounds are averaged, or weighted by their total weights.
    """
    count, length, _ = buckets.shape
    if lengths is None:
        lengths = torch.full((count,), length, device=q.device)
    with torch.no_grad():
        after_all = int(buckets.max()) + 1
        hidden = find_padding(lengths, length).unsqueeze(-1)
        order = buckets.masked_fill(hidden, after_all).permute(2, 0, 1).argsort(dim=-1, stable=True)
        slots = order.argsort(dim=-1)
        chunks = -(-length // chunk)
        own = functional.pad(order, (0, chunks * chunk - length)).unflatten(-1, (chunks, chunk))
        # Slots after the end of a sequence hold padding.
        unused = find_padding(lengths, chunks * chunk).unflatten(-1, (chunks, chunk)).expand_as(own)
        used_chunks = (lengths + chunk - 1) // chunk
        previous = (torch.arange(chunks, device=q.device) - 1) % used_chunks.unsqueeze(-1)
        previous = previous.unsqueeze(-1).expand_as(own)
        seen = torch.cat([own, own.gather(2, previous)], dim=-1)
        # A single chunk is not its own previous chunk. A single position sees itself.
        twice = (used_chunks == 1).view(-1, 1, 1)
        unused = torch.cat([unused, unused.gather(2, previous) | twice], dim=-1)
        itself = (own.unsqueeze(-1) == seen.unsqueeze(-2)) & (lengths > 1).view(-1, 1, 1, 1)
        mask = unused.unsqueeze(-2) | itself
        first = torch.arange(count, device=q.device).view(-1, 1, 1) * length
    queries, keys, values = (
        x.flatten(0, 1).index_select(0, (rows + first).flatten()).unflatten(0, rows.shape)
        for x, rows in ((q, own), (k, seen), (v, seen))
    )
    part = weigh(queries, keys, values, mask).flatten(2, 3)
    part = part.gather(2, slots.unsqueeze(-1).expand(-1, -1, -1, part.shape[-1]))
    return torch.stack([join([x]) for x in part]).mean(dim=0) if average else join(part.unbind())
