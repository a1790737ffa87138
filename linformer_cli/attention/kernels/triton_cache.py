"""The kernel of `cache.py`: softmax attention of one position to its cache, which is read once (online softmax)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linformer_cli.attention.parts.caches import KeyValueCache

from .tensors import with_dense_rows
from .triton_maps import load_row

# The number of elements of a block of keys. A batch of one image has few programs, so each of them must have many loads
# in flight.
BLOCK_ELEMENTS, WARPS = 16_384, 8


@triton.jit
def _attend_kernel(
    q, q_image, q_head, k, k_image, k_head, v, v_image, v_head, keys, values, steps, y, H, T, scale,
    C: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Step one head of one image. `steps` counts the new position; the cache has room for T positions."""
    place = tl.program_id(0).to(tl.int64)
    image, head = place // H, place % H
    slot = tl.load(steps) - 1
    features, channels, first = tl.arange(0, C), tl.arange(0, V), place * T
    query = load_row(q, image, head, q_image, q_head, C) * scale
    key = load_row(k, image, head, k_image, k_head, C)
    value = load_row(v, image, head, v_image, v_head, V)
    tl.store(keys + (first + slot) * C + features, key.to(keys.dtype.element_ty))
    tl.store(values + (first + slot) * V + channels, value.to(values.dtype.element_ty))
    # The sums so far are relative to the exponential of the highest score. They start with the new position.
    highest = tl.sum(query * key, axis=0)
    weight, total = 1.0, value
    for start in range(0, slot, ROWS):
        rows = start + tl.arange(0, ROWS)
        earlier = rows < slot
        places = (first + rows)[:, None]
        old_keys = tl.load(keys + places * C + features[None, :], mask=earlier[:, None], other=0.0).to(tl.float32)
        old_values = tl.load(values + places * V + channels[None, :], mask=earlier[:, None], other=0.0).to(tl.float32)
        scores = tl.where(earlier, tl.sum(old_keys * query[None, :], axis=1), float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, axis=0))
        kept, weights = tl.exp(highest - raised), tl.exp(scores - raised)
        weight = weight * kept + tl.sum(weights, axis=0)
        total = total * kept + tl.sum(weights[:, None] * old_values, axis=0)
        highest = raised
    tl.store(y + place * V + channels, (total / weight).to(y.dtype.element_ty))


def step(q_t: Tensor, k_t: Tensor, v_t: Tensor, cache: KeyValueCache) -> Tensor:
    """Compute the output for `step` in `cache.py`, and write k_t and v_t to the cache."""
    q_t, k_t, v_t = map(with_dense_rows, (q_t, k_t, v_t))
    batch, heads, capacity, key_width = cache.keys.shape
    value_width = cache.values.shape[3]
    y = v_t.new_empty(batch, heads, value_width)
    inputs = [part for x in (q_t, k_t, v_t) for part in (x, *x.stride()[:2])]
    with torch.cuda.device_of(q_t):
        _attend_kernel[(batch * heads,)](
            *inputs,
            *cache,
            y,
            heads,
            capacity,
            key_width**-0.5,
            C=key_width,
            V=value_width,
            ROWS=BLOCK_ELEMENTS // max(key_width, value_width),
            num_warps=WARPS,
        )
    return y
