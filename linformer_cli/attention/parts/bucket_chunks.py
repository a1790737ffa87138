"""Attention within buckets: positions are sorted by bucket, and each sees the `window` ones before it in its own."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

EMPTY = -1  # marks an entry of a ring that was never written


class BucketLayout(NamedTuple):
    """The order of positions after sorting by bucket in each of R rounds, for N = B H sequences.

    rows [R, N, slots] is the position in each slot, and slots [R, N, T] is the slot of each new position. The codes
    key_codes [R, N, positions] and query_codes [R, N, slots] grow by 1 per slot and by another `window` per bucket, so
    t sees an earlier j in a round if and only if their codes differ by at most `window`.
    """

    rows: Tensor
    slots: Tensor
    key_codes: Tensor
    query_codes: Tensor


@torch.no_grad()
def sort_by_bucket(
    bucket: Tensor, rings: Tensor | None, known: int, buckets: int, window: int
) -> tuple[BucketLayout, Tensor]:
    """Return the layout of new positions with the buckets [R, N, T] after `known` earlier ones, and the new rings.

    The rings [R, N, buckets, window] hold the last positions of each bucket in any order. Unused entries are `EMPTY`.
    """
    rounds, rows_of, new = bucket.shape
    device = bucket.device
    sorted_bucket, order = bucket.sort(dim=-1, stable=True)
    counts = bucket.new_zeros(rounds, rows_of, buckets).scatter_add_(-1, bucket, torch.ones_like(bucket))
    starts = counts.cumsum(dim=-1) - counts
    gaps = (counts > 0).cumsum(dim=-1) - 1  # number of non-empty buckets before this one
    place, offsets = (torch.arange(count, device=device) for count in (new, window))
    gap = window * gaps.gather(-1, sorted_bucket)
    positions, nowhere = order + known, known + new
    if rings is None:
        ring = bucket.new_full((rounds, rows_of, buckets, window), EMPTY)
        used, at = new, place.expand_as(gap)
    else:
        ring = rings.long().sort(dim=-1).values
        # The ring of a bucket precedes the new positions of the bucket.
        used, at = new + min(buckets, new) * window, place + gap + window
    codes = at + gap
    size = -(-used // window) * window
    rows = bucket.new_full((rounds, rows_of, size + window), nowhere).scatter_(-1, at, positions)
    key_codes = bucket.new_full((rounds, rows_of, nowhere + 1), -window - 1).scatter_(-1, positions, codes)
    query_codes = bucket.new_full((rounds, rows_of, size), -3 * window - 3).scatter_(-1, at, codes)
    if rings is not None:
        # Rings of buckets without new positions go after the last slot and are cut off.
        first = torch.where(counts > 0, starts + window * gaps, size).unsqueeze(-1)
        ring_rows = torch.where(ring == EMPTY, nowhere, ring).flatten(2)
        rows.scatter_(-1, (first + offsets).flatten(2), ring_rows)
        ring_codes = first + offsets + window * gaps.unsqueeze(-1)
        ring_codes = torch.where((counts > 0).unsqueeze(-1), ring_codes, -window - 1).flatten(2)
        key_codes.scatter_(-1, ring_rows, ring_codes)
        key_codes[..., nowhere] = -window - 1
    slots = torch.empty_like(order).scatter_(-1, order, at)
    # The new ring holds the last `window` entries of the old ring and the new positions together.
    index = counts.unsqueeze(-1) + offsets
    newer = positions.gather(-1, (starts.unsqueeze(-1) + index - window).clamp(0, new - 1).flatten(2))
    kept = torch.where(index < window, ring.gather(-1, index.clamp(max=window - 1)), newer.view_as(index))
    # Codes are compared many times, and comparing narrow integers is faster.
    narrow = torch.int16 if size + (buckets + 4) * (window + 1) < 2**15 else torch.int32
    return BucketLayout(rows[..., :size], slots, key_codes.to(narrow), query_codes.to(narrow)), kept


def attend_in_buckets(
    queries: Tensor, keys: Tensor, values: Tensor, layout: BucketLayout, known: int, window: int
) -> Tensor:
    """Return outputs [N, T, V] of new positions for all queries, keys and values; v of a position that sees no key.

    In chunks of `window` slots, slot i sees the slots before i in its own chunk, and the slots from i on in the
    previous chunk. One matrix [window, window] per chunk holds all scores: those of the chunk are below the diagonal.
    """
    rounds, rows_of, size = layout.rows.shape
    length, new = queries.shape[1], layout.slots.shape[-1]
    values_and_one = functional.pad(values, (0, 1), value=1.0)
    base = torch.arange(rows_of, device=queries.device).unsqueeze(-1)
    rows = (layout.rows.clamp(max=length - 1) + base * length).flatten()
    # All chunks form one sequence. An extra chunk precedes it, so that the first chunk has a previous chunk too.
    shifted = functional.pad(rows, (window, 0))
    chunk_queries, chunk_keys, chunk_values = (
        x.flatten(0, 1).index_select(0, at).unflatten(0, (-1, window))
        for x, at in ((queries, rows), (keys, shifted), (values_and_one, shifted))
    )
    below = torch.ones(window, window, dtype=torch.bool, device=queries.device).tril(-1)
    hidden = _find_hidden(layout, below)
    own, before = (chunk_queries @ part.transpose(1, 2) for part in (chunk_keys[1:], chunk_keys[:-1]))
    scores = torch.where(below, own, before).masked_fill(hidden, -math.inf)
    first = size * torch.arange(rounds * rows_of, device=rows.device)
    slots = (layout.slots + first.view(rounds, rows_of, 1)).flatten()
    with torch.no_grad():
        # The softmax covers all rounds of a position, so the rounds need a common maximum.
        top = scores.amax(dim=-1).flatten().index_select(0, slots).view(rounds, rows_of, new).amax(dim=0)
        top = top.masked_fill_(top == -math.inf, 0)
        spread = top.new_zeros(rounds * rows_of * size)
        spread.index_copy_(0, slots, top.expand(rounds, -1, -1).flatten())
    weights = (scores - spread.view(-1, window, 1)).exp()
    sums = weights.tril(-1) @ chunk_values[1:] + weights.triu() @ chunk_values[:-1]
    sums = sums.flatten(0, 1).index_select(0, slots).view(rounds, rows_of, new, -1).sum(dim=0)
    total = sums[..., -1:]
    alone = total == 0
    return torch.where(alone, values[:, known:], sums[..., :-1] / total.masked_fill(alone, 1))


@torch.no_grad()
def _find_hidden(layout: BucketLayout, below: Tensor) -> Tensor:
    """Find scores to mask, bool [chunks, window, window]: of keys that the round hides, or that an earlier one saw."""
    rounds, rows_of, size = layout.rows.shape
    window = len(below)
    seen = torch.zeros(rounds, rows_of * size // window, window, window, dtype=torch.bool, device=below.device)
    for number in range(rounds):
        # The codes of round `number`, in the order of that round and of all later ones.
        later = rounds - number
        keys = layout.key_codes[number].expand(later, -1, -1).gather(-1, layout.rows[number:])
        queries = torch.where(layout.query_codes[number:] < 0, layout.query_codes[number:], keys)
        keys = functional.pad(keys.flatten(), (window, 0)).unflatten(0, (-1, 1, window))
        near = torch.where(below, keys[1:], keys[:-1])
        near = near.sub_(queries.view(-1, window, 1)).abs_() <= window
        near = near.view(later, -1, window, window)
        torch.gt(near[0], seen[number], out=seen[number])
        seen[number + 1 :] |= near[1:]
    # The first chunk of a sequence has no previous chunk; the chunk before it belongs to another sequence.
    seen.view(rounds * rows_of, -1, window, window)[:, 0].logical_and_(below)
    return seen.logical_not_().flatten(0, 1)
