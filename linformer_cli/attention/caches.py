"""A key-value cache, for the mechanisms that must keep every position."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class KeyValueCache(NamedTuple):
    """Keys [B, H, capacity, K] and values [B, H, capacity, V]; the first `position` (a 0-d int64 tensor) are valid."""

    keys: Tensor
    values: Tensor
    position: Tensor


def init_cache(
    batch: int, heads: int, capacity: int, widths: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> KeyValueCache:
    """An empty cache with room for `capacity` positions of keys and values of the given `widths`."""
    keys, values = (torch.zeros(batch, heads, capacity, width, device=device, dtype=dtype) for width in widths)
    return KeyValueCache(keys, values, torch.zeros((), dtype=torch.int64, device=device))


def extend_cache(cache: KeyValueCache | None, k: Tensor, v: Tensor) -> KeyValueCache:
    """A new cache that holds `cache` and then k [B, H, T, K], v [B, H, T, V]; differentiable, `cache` is untouched.

    The capacity stays as it was where the new positions fit, so that a cache is allocated once.
    """
    if cache is None:
        return KeyValueCache(k, v, torch.tensor(k.shape[2], device=k.device))
    start = int(cache.position)
    spare = max(cache.keys.shape[2] - start - k.shape[2], 0)
    keys = functional.pad(torch.cat([cache.keys[:, :, :start], k], dim=2), (0, 0, 0, spare))
    values = functional.pad(torch.cat([cache.values[:, :, :start], v], dim=2), (0, 0, 0, spare))
    return KeyValueCache(keys, values, cache.position + k.shape[2])


def push_in_place(cache: KeyValueCache, k_t: Tensor, v_t: Tensor) -> tuple[KeyValueCache, int]:
    """Write k_t [B, H, K], v_t [B, H, V] behind the last valid position; returns the cache and its length.

    A full cache (one that grew out of `attend` from nothing, say) is moved to one of twice the capacity.
    """
    start = int(cache.position)
    if start == cache.keys.shape[2]:
        room = (0, 0, 0, max(start, 1))
        cache = cache._replace(keys=functional.pad(cache.keys, room), values=functional.pad(cache.values, room))
    cache.keys[:, :, start] = k_t
    cache.values[:, :, start] = v_t
    return cache._replace(position=cache.position + 1), start + 1


def cache_bytes(batch: int, heads: int, capacity: int, widths: tuple[int, int], dtype: torch.dtype) -> int:
    """Bytes of a cache with room for `capacity` positions, its position included."""
    return batch * heads * capacity * sum(widths) * dtype.itemsize + torch.int64.itemsize
