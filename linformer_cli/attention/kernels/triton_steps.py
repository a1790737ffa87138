"""Steps of linear and softmax attention for CUDA graphs, in Triton. Importing this file needs Triton.

A step of linear attention computes feature map, update, output and normaliser in one pass over a `FoldedState`. A step
of softmax attention reads its cache once (online softmax).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linformer_cli.native.constants import COMPILED_MAPS
from .cpu_calls import with_dense_rows
from .triton_linear import phi

# The number of elements of a block of keys. A batch of one image has few programs, so each of them must have many loads
# in flight.
BLOCK_ELEMENTS, WARPS = 16_384, 8


@triton.jit
def _load_row(x, image, head, image_stride, head_stride, WIDTH: tl.constexpr):
    """One head of x [B, H, WIDTH], in float32."""
    start = x + image.to(tl.int64) * image_stride + head.to(tl.int64) * head_stride
    return tl.load(start + tl.arange(0, WIDTH)).to(tl.float32)


@triton.jit
def _step_folded_kernel(
    q, q_image, q_head, k, k_image, k_head, v, v_image, v_head, s, z, keys, values, steps, y, H,
    MAP: tl.constexpr, C: tl.constexpr, V: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Step one head of one image. Pairs 0 .. slot - 1 are pending; the new pair joins them, or s absorbs all pairs."""
    place = tl.program_id(0).to(tl.int64)
    image, head = place // H, place % H
    slot = tl.load(steps) % FOLD
    features, channels = tl.arange(0, C), tl.arange(0, V)
    query = phi(_load_row(q, image, head, q_image, q_head, C), MAP)
    raw_key = _load_row(k, image, head, k_image, k_head, C)
    value = _load_row(v, image, head, v_image, v_head, V)
    key = phi(raw_key, MAP)
    s_places = place * C * V + features[:, None] * V + channels[None, :]
    sums = tl.load(s + s_places)
    weights = tl.load(z + place * C + features) + key
    numerator = tl.sum(query[:, None] * sums, axis=0) + tl.sum(query * key, axis=0) * value
    first = place * (FOLD - 1)
    if FOLD > 1:
        rows = tl.arange(0, FOLD)
        pending = (rows < slot)[:, None]
        old_keys = tl.load(keys + (first + rows)[:, None] * C + features[None, :], mask=pending, other=0.0)
        old_values = tl.load(values + (first + rows)[:, None] * V + channels[None, :], mask=pending, other=0.0)
        scores = tl.sum(phi(old_keys.to(tl.float32), MAP) * query[None, :], axis=1)
        numerator += tl.sum(scores[:, None] * old_values.to(tl.float32), axis=0)  # values are 0 where none is pending
    weight = tl.sum(query * weights, axis=0)
    nothing = weight == 0.0
    quotient = tl.where(nothing, 0.0, numerator / tl.where(nothing, 1.0, weight))
    tl.store(y + place * V + channels, quotient.to(y.dtype.element_ty))
    # Several threads may load the same number; all of them must have loaded it before any thread writes.
    tl.debug_barrier()
    tl.store(z + place * C + features, weights)
    if slot == FOLD - 1:
        sums += key[:, None] * value[None, :]
        for row in tl.static_range(FOLD - 1):
            old_key = phi(tl.load(keys + (first + row) * C + features).to(tl.float32), MAP)
            old_value = tl.load(values + (first + row) * V + channels).to(tl.float32)
            sums += old_key[:, None] * old_value[None, :]
        tl.store(s + s_places, sums)
    else:
        tl.store(keys + (first + slot) * C + features, raw_key.to(keys.dtype.element_ty))
        tl.store(values + (first + slot) * V + channels, value.to(values.dtype.element_ty))


def step_folded(q_t: Tensor, k_t: Tensor, v_t: Tensor, state: tuple[Tensor, ...], feature_map: str) -> Tensor:
    """The output [B, H, V] of linear attention; updates the tensors of a `FoldedState` in place."""
    q_t, k_t, v_t = map(with_dense_rows, (q_t, k_t, v_t))
    batch, heads, key_width = q_t.shape
    value_width = v_t.shape[-1]
    y = v_t.new_empty(batch, heads, value_width)
    inputs = [part for x in (q_t, k_t, v_t) for part in (x, *x.stride()[:2])]
    with torch.cuda.device_of(q_t):
        _step_folded_kernel[(batch * heads,)](
            *inputs,
            *state,
            y,
            heads,
            MAP=COMPILED_MAPS[feature_map],
            C=key_width,
            V=value_width,
            FOLD=state[2].shape[2] + 1,
            # 32 elements of s per thread.
            num_warps=max(1, key_width * value_width // 1024),
            enable_fp_fusion=True,
        )
    return y


@triton.jit
def _step_cache_kernel(
    q, q_image, q_head, k, k_image, k_head, v, v_image, v_head, keys, values, steps, y, H, T, scale,
    C: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Step one head of one image. `steps` counts the positions before it; the cache has room for T positions."""
    place = tl.program_id(0).to(tl.int64)
    image, head = place // H, place % H
    slot = tl.load(steps)
    features, channels, first = tl.arange(0, C), tl.arange(0, V), place * T
    query = _load_row(q, image, head, q_image, q_head, C) * scale
    key = _load_row(k, image, head, k_image, k_head, C)
    value = _load_row(v, image, head, v_image, v_head, V)
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


def step_cache(q_t: Tensor, k_t: Tensor, v_t: Tensor, cache: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The output [B, H, V] of softmax attention; writes k_t and v_t to the tensors of a `FixedCache`."""
    q_t, k_t, v_t = map(with_dense_rows, (q_t, k_t, v_t))
    keys, values, _ = cache
    batch, heads, capacity, key_width = keys.shape
    value_width = values.shape[3]
    y = v_t.new_empty(batch, heads, value_width)
    inputs = [part for x in (q_t, k_t, v_t) for part in (x, *x.stride()[:2])]
    with torch.cuda.device_of(q_t):
        _step_cache_kernel[(batch * heads,)](
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
