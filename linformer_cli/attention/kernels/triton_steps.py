"""Steps for CUDA graphs, in Triton. Importing this file needs Triton.

A step of linear attention computes feature map, update, output and normaliser in one pass over a `FoldedState`. A step
of softmax attention reads its cache once (online softmax). `step_sums` is one template for all running sums and delta
rules, and `project` is a product with the norms, the activation and the residual around it. These two and
`step_divided_cache` have not run on a GPU.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from linformer_cli.native.constants import COMPILED_MAPS
from .cpu_calls import with_dense_rows
from .registry import SumsStep, Unnormed
from .triton_linear import phi

# Elements of a block of keys: with a batch of one image, each of few programs must have many loads in flight.
BLOCK_ELEMENTS, WARPS = 16_384, 8
# `step_divided_cache` divides a cache into at most so many programs, with room for at least so many rows each.
PROGRAMS, LEAST_ROWS = 256, 64


@triton.jit
def load_row(x, image, head, image_stride, head_stride, WIDTH: tl.constexpr):
    """Return one head of x [B, H, WIDTH], in float32."""
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
    query = phi(load_row(q, image, head, q_image, q_head, C), MAP)
    raw_key = load_row(k, image, head, k_image, k_head, C)
    value = load_row(v, image, head, v_image, v_head, V)
    key = phi(raw_key, MAP)
    s_places = place * C * V + features[:, None] * V + channels[None, :]
    sums = tl.load(s + s_places).to(tl.float32)
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
        tl.store(s + s_places, sums.to(s.dtype.element_ty))
    else:
        tl.store(keys + (first + slot) * C + features, raw_key.to(keys.dtype.element_ty))
        tl.store(values + (first + slot) * V + channels, value.to(values.dtype.element_ty))


def step_folded(q_t: Tensor, k_t: Tensor, v_t: Tensor, state: tuple[Tensor, ...], feature_map: str) -> Tensor:
    """Return the output [B, H, V] of linear attention; updates the tensors of a `FoldedState` in place."""
    # 32 elements of s per thread.
    return launch_linear(_step_folded_kernel, q_t, k_t, v_t, state, feature_map, 1024, FOLD=state[2].shape[2] + 1)


def launch_linear(
    kernel: Any, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: tuple[Tensor, ...], name: str, share: int, **sizes: int
) -> Tensor:
    """Return the output of a step with the feature map `name`; each warp has `share` elements of s."""
    inputs = [part for x in map(with_dense_rows, (q_t, k_t, v_t)) for part in (x, *x.stride()[:2])]
    images, heads, key_width, value_width = state[0].shape
    y, warps = v_t.new_empty(v_t.shape), max(1, key_width * value_width // share)
    sizes |= {"MAP": COMPILED_MAPS[name], "C": key_width, "V": value_width}
    with torch.cuda.device_of(q_t):
        kernel[(images * heads,)](*inputs, *state, y, heads, **sizes, num_warps=warps, enable_fp_fusion=True)
    return y


@triton.jit
def _step_cache_kernel(
    q, q_image, q_head, k, k_image, k_head, v, v_image, v_head, keys, values, steps, y, H, T, scale,
    C: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Step one head of one image. `steps` counts the positions before it; the cache has room for T positions.

    With several `PARTS`, this program reads one of them, and y [B, H, PARTS, V + 2] is its total, weight and highest
    score.
    """
    place = tl.program_id(0).to(tl.int64)
    image, head = place // H, place % H
    slot = tl.load(steps)
    features, channels, first = tl.arange(0, C), tl.arange(0, V), place * T
    query = load_row(q, image, head, q_image, q_head, C) * scale
    key = load_row(k, image, head, k_image, k_head, C)
    value = load_row(v, image, head, v_image, v_head, V)
    tl.store(keys + (first + slot) * C + features, key.to(keys.dtype.element_ty))
    tl.store(values + (first + slot) * V + channels, value.to(values.dtype.element_ty))
    # The sums so far are relative to the exponential of the highest score. They start with the new position.
    highest = tl.sum(query * key, axis=0)
    weight, total = 1.0, value
    begin, end, part = 0, slot, tl.program_id(1)
    if PARTS > 1:
        share = tl.cdiv(slot, PARTS)
        begin, end = part * share, tl.minimum((part + 1) * share, slot)
        # Only the first part counts the new position, which all of them write to the same place.
        own = part == 0
        highest, weight = tl.where(own, highest, float("-inf")), tl.where(own, 1.0, 0.0)
        total = tl.where(own, value, 0.0)
    for start in range(begin, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        earlier = rows < end
        places = (first + rows)[:, None]
        old_keys = tl.load(keys + places * C + features[None, :], mask=earlier[:, None], other=0.0).to(tl.float32)
        old_values = tl.load(values + places * V + channels[None, :], mask=earlier[:, None], other=0.0).to(tl.float32)
        scores = tl.where(earlier, tl.sum(old_keys * query[None, :], axis=1), float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, axis=0))
        kept, weights = tl.exp(highest - raised), tl.exp(scores - raised)
        weight = weight * kept + tl.sum(weights, axis=0)
        total = total * kept + tl.sum(weights[:, None] * old_values, axis=0)
        highest = raised
    if PARTS > 1:
        found = y + (place * PARTS + part) * (V + 2)
        tl.store(found + channels, total)
        tl.store(found + V, weight)
        tl.store(found + V + 1, highest)
    else:
        tl.store(y + place * V + channels, (total / weight).to(y.dtype.element_ty))


@triton.jit
def _join_parts_kernel(parts, y, V: tl.constexpr, PARTS: tl.constexpr):
    """Return the output of one head of one image from the `parts` that `_step_cache_kernel` wrote."""
    place, channels = tl.program_id(0).to(tl.int64), tl.arange(0, V)
    found = parts + (place * PARTS + tl.arange(0, PARTS)) * (V + 2)
    highest = tl.load(found + V + 1)  # that of the first part is finite
    kept = tl.exp(highest - tl.max(highest, axis=0))
    total = tl.sum(kept[:, None] * tl.load(found[:, None] + channels[None, :]), axis=0)
    weight = tl.sum(kept * tl.load(found + V), axis=0)
    tl.store(y + place * V + channels, (total / weight).to(y.dtype.element_ty))


def step_divided_cache(q_t: Tensor, k_t: Tensor, v_t: Tensor, cache: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """`step_cache`, with the positions of an image divided among several programs if there are few heads and images."""
    batch, heads, room, _ = cache[0].shape
    most = max(1, min(PROGRAMS // (batch * heads), room // LEAST_ROWS))
    return step_cache(q_t, k_t, v_t, cache, parts=1 << most.bit_length() - 1)


def step_cache(q_t: Tensor, k_t: Tensor, v_t: Tensor, cache: tuple[Tensor, Tensor, Tensor], parts: int = 1) -> Tensor:
    """Return the output [B, H, V] of softmax attention; writes k_t and v_t to the tensors of a `FixedCache`.

    `parts`, a power of two, is the number of programs for each head of each image.
    """
    q_t, k_t, v_t = map(with_dense_rows, (q_t, k_t, v_t))
    keys, values, _ = cache
    batch, heads, capacity, key_width = keys.shape
    value_width = values.shape[3]
    y = v_t.new_empty(batch, heads, value_width)
    inputs = [part for x in (q_t, k_t, v_t) for part in (x, *x.stride()[:2])]
    found, rows = y, BLOCK_ELEMENTS // max(key_width, value_width)
    if parts > 1:
        found = keys.new_empty(batch, heads, parts, value_width + 2, dtype=torch.float32)
        rows = min(rows, triton.next_power_of_2(triton.cdiv(capacity, parts)))
    with torch.cuda.device_of(q_t):
        _step_cache_kernel[(batch * heads, parts)](
            *inputs,
            *cache,
            found,
            heads,
            capacity,
            key_width**-0.5,
            C=key_width,
            V=value_width,
            ROWS=rows,
            PARTS=parts,
            num_warps=WARPS,
        )
        if parts > 1:
            _join_parts_kernel[(batch * heads,)](found, y, V=value_width, PARTS=parts, num_warps=1)
    return y


@triton.jit
def _load_vector(x, image, head, image_stride, head_stride, stride, places, inside):
    """Numbers `places` of one head of x [B, H, W] in float32, and 0 outside."""
    start = x + image.to(tl.int64) * image_stride + head.to(tl.int64) * head_stride
    return tl.load(start + places * stride, mask=inside, other=0.0).to(tl.float32)


def _launch(device: torch.device) -> dict[str, bool]:
    """Arguments for a kernel that starts before the previous one ends, where a device can do that (since Hopper)."""
    early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def _await_previous(EARLY: tl.constexpr):
    """Let the next kernel start, which waits here for this one, and wait until the previous kernel has ended."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _unit(x, floor):
    """Return the direction of silu(x)."""
    x *= tl.sigmoid(x)
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + floor)


@triton.jit
def _step_sums_kernel(
    q, q_image, q_head, q_step, k, k_image, k_head, k_step, v, v_image, v_head, v_step,
    decay, decay_image, decay_head, decay_step, bias, bias_image, bias_head, bias_step,
    erase, erase_image, erase_head, erase_step, write, write_image, write_head, write_step,
    read, read_image, read_head, read_step, gate, gate_image, gate_head, gate_step, s, y, H,
    C, V, scale, power, most_erased, most_written, floor, epsilon,
    FEATURES: tl.constexpr, CHANNELS: tl.constexpr, DECAY: tl.constexpr, ERASES: tl.constexpr, READS: tl.constexpr,
    RAW: tl.constexpr, NORMALISED: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Step one head of one image; see `step_sums`."""
    _await_previous(EARLY)
    place = tl.program_id(0).to(tl.int64)
    image, head = place // H, place % H
    features, channels = tl.arange(0, FEATURES), tl.arange(0, CHANNELS)
    inside, within = features < C, channels < V
    query = _load_vector(q, image, head, q_image, q_head, q_step, features, inside)
    key = _load_vector(k, image, head, k_image, k_head, k_step, features, inside)
    value = _load_vector(v, image, head, v_image, v_head, v_step, channels, within)
    if RAW:
        query, key = _unit(query, floor), _unit(key, floor)
    places = s + place * C * V + features[:, None] * V + channels[None, :]
    both = inside[:, None] & within[None, :]
    sums = tl.load(places, mask=both, other=0.0).to(tl.float32)
    if DECAY != "none":
        factor = _load_vector(decay, image, head, decay_image, decay_head, decay_step, features, inside)
        if DECAY == "gate":
            factor += _load_vector(bias, image, head, bias_image, bias_head, bias_step, features, inside)
            factor = (tl.minimum(factor, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(factor)))) * power
        sums *= (factor if DECAY == "factor" else tl.exp(factor))[:, None]
    if ERASES:
        erased = _load_vector(erase, image, head, erase_image, erase_head, erase_step, features, inside)
        written = _load_vector(write, image, head, write_image, write_head, write_step, channels, within)
        if RAW:
            erased, written = most_erased * tl.sigmoid(erased), most_written * tl.sigmoid(written)
        erased *= _load_vector(read, image, head, read_image, read_head, read_step, features, inside) if READS else key
        value = written * value - tl.sum(erased[:, None] * sums, axis=0)
    sums += key[:, None] * value[None, :]
    total = tl.sum((query * scale)[:, None] * sums, axis=0)
    if NORMALISED:
        total *= tl.rsqrt(tl.sum(tl.where(within, total * total, 0.0), axis=0) / V + epsilon)
    if GATED:
        opening = _load_vector(gate, image, head, gate_image, gate_head, gate_step, channels, within)
        total *= opening * tl.sigmoid(opening)
    tl.store(y + place * V + channels, total.to(y.dtype.element_ty), mask=within)
    # Several threads may have loaded the same number; all of them must have loaded it before any thread writes.
    tl.debug_barrier()
    tl.store(places, sums.to(s.dtype.element_ty), mask=both)


def step_sums(s: Tensor, q_t: Tensor, k_t: Tensor, v_t: Tensor, form: SumsStep) -> Tensor:
    """Return what `SumsStep` defines: the output [B, H, V]; updates s [B, H, C, V], which must be dense, in place."""
    batch, heads, features, channels = s.shape
    inputs: list[object] = []
    widths = (features, features, channels, features, features, features, channels, features, channels)
    for x, width in zip((q_t, k_t, v_t, *form[:6]), widths, strict=True):
        inputs += (s, 0, 0, 0) if x is None else (x, *x.expand(batch, heads, width).stride())
    y = v_t.new_empty(batch, heads, channels)
    sizes = triton.next_power_of_2(features), triton.next_power_of_2(channels)
    with torch.cuda.device_of(s):
        _step_sums_kernel[(batch * heads,)](
            *(*inputs, s, y, heads, features, channels, *form[6:12]),
            FEATURES=sizes[0],
            CHANNELS=sizes[1],
            DECAY=form.decay_form if form.decay is not None else "none",
            ERASES=form.erase is not None,
            READS=form.read is not None,
            RAW=form.floor > 0,
            NORMALISED=form.epsilon > 0,
            GATED=form.gate is not None,
            **_launch(s.device),
            # 32 elements of s per thread.
            num_warps=min(max(1, sizes[0] * sizes[1] // 1024), WARPS),
        )
    return y


@triton.jit
def _measure_rows(x, rows, B, K, epsilon, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Mean and reciprocal standard deviation of these rows of x [B, K]."""
    total, square = tl.zeros((ROWS,), dtype=tl.float32), tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, K, SIZE):
        columns = start + tl.arange(0, SIZE)
        inside = (rows < B)[:, None] & (columns < K)[None, :]
        part = tl.load(x + rows[:, None] * K + columns[None, :], mask=inside, other=0.0)
        total += tl.sum(part.to(tl.float32), axis=1)
    mean = total / K
    for start in range(0, K, SIZE):
        columns = start + tl.arange(0, SIZE)
        inside = (rows < B)[:, None] & (columns < K)[None, :]
        part = tl.load(x + rows[:, None] * K + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        part = tl.where(inside, part - mean[:, None], 0.0)
        square += tl.sum(part * part, axis=1)
    return mean, tl.rsqrt(square / K + epsilon)


@triton.jit
def _load_normalised(x, rows, columns, inside, K, mean, scale, gain, shift, NORM: tl.constexpr):
    part = tl.load(x + rows[:, None] * K + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        gains = tl.load(gain + columns, mask=columns < K, other=0.0).to(tl.float32)
        shifts = tl.load(shift + columns, mask=columns < K, other=0.0).to(tl.float32)
        part = (part - mean[:, None]) * scale[:, None] * gains[None, :] + shifts[None, :]
    return part


@triton.jit
def _project_kernel(
    x, x_gain, x_shift, weight, bias, residual, residual_gain, residual_shift, y, B, K, N, epsilon,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, RESIDUAL_NORM: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`ROWS` rows and `COLUMNS` columns of y [B, N]; see `project`."""
    _await_previous(EARLY)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mean, scale = tl.zeros((ROWS,), dtype=tl.float32), tl.zeros((ROWS,), dtype=tl.float32)
    if NORM:
        mean, scale = _measure_rows(x, rows, B, K, epsilon, ROWS, SIZE)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, K, SIZE):
        columns = start + tl.arange(0, SIZE)
        inside = (rows < B)[:, None] & (columns < K)[None, :]
        part = _load_normalised(x, rows, columns, inside, K, mean, scale, x_gain, x_shift, NORM)
        filled = (outputs < N)[:, None] & (columns < K)[None, :]
        weights = tl.load(weight + outputs[:, None] * K + columns[None, :], mask=filled, other=0.0)
        total += tl.dot(part, tl.trans(weights.to(tl.float32)), input_precision=PRECISION)
    total += tl.load(bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION == "relu":
        total = tl.where(total < 0.0, 0.0, total)
    elif ACTIVATION == "gelu":
        total *= 0.5 * (1.0 + tl.erf(total * 0.7071067811865476))
    inside = (rows < B)[:, None] & (outputs < N)[None, :]
    if RESIDUAL:
        if RESIDUAL_NORM:
            mean, scale = _measure_rows(residual, rows, B, N, epsilon, ROWS, SIZE)
        total += _load_normalised(
            residual, rows, outputs, inside, N, mean, scale, residual_gain, residual_shift, RESIDUAL_NORM
        )
    tl.store(y + rows[:, None] * N + outputs[None, :], total.to(y.dtype.element_ty), mask=inside)


def project(x: Unnormed, layer: nn.Linear, activation: str, residual: Unnormed | None) -> Tensor:
    """activation(W norm(x) + b) + norm(residual) [B, N] for x [B, K]; None is absent, and norms have one epsilon."""
    vectors, added = x.x.contiguous(), x.x if residual is None else residual.x.contiguous()
    norms = x.norm, None if residual is None else residual.norm
    y = vectors.new_empty(len(vectors), layer.out_features)
    gains = [(vectors, vectors) if norm is None else (norm.weight, norm.bias) for norm in norms]
    tile = {"ROWS": 16, "COLUMNS": 32, "SIZE": 64}
    grid = triton.cdiv(len(vectors), tile["ROWS"]), triton.cdiv(layer.out_features, tile["COLUMNS"])
    with torch.cuda.device_of(vectors):
        _project_kernel[grid](
            *(vectors, *gains[0], layer.weight, layer.bias, added, *gains[1], y, *vectors.shape, layer.out_features),
            next((norm.eps for norm in norms if norm is not None), 0.0),
            NORM=norms[0] is not None,
            RESIDUAL=residual is not None,
            RESIDUAL_NORM=norms[1] is not None,
            ACTIVATION=activation,
            **tile,
            PRECISION="tf32x3" if y.dtype == torch.float32 else "tf32",
            **_launch(y.device),
            num_warps=4,
        )
    return y
