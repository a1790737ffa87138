"""Linear attention for CUDA devices, in Triton, as cpu_linear.py defines it: chunks whose sums stay on the chip.

One program processes one head, a chunk of positions at a time. Inside a chunk, products are computed pairwise under a
triangular mask; earlier chunks enter through s and z. If there are too few images and heads to fill the device,
positions are also cut into segments: a first pass sums each segment, and a running sum over segments gives the sums
before each. The main pass also applies the feature map, divides, and converts bfloat16. The backward pass needs the
inputs, the denominators and the sums before each segment. It consists of a forward scan for the queries, and a reverse
scan, which carries the gradients of s and z, for keys and values.

Importing this file needs Triton; see `native/gpu.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linformer_cli.attention.tensors import Context
from linformer_cli.native.constants import COMPILED_MAPS
from .cpu_calls import empty_like_projection, require_sums_fit, with_dense_rows

CHUNK = 64
WANTED_PROGRAMS = 256  # about two programs per multiprocessor of a large device
# By default, Triton compiles separate kernels for the number 1, for multiples of 16 and for all other numbers.
LENGTHS = ("T", "segments", "chunks")
# H, T, the number of segments, and the number of chunks per segment.
Sizes = tuple[int, int, int, int]
ELU: tl.constexpr = tl.constexpr(COMPILED_MAPS["elu"])
RELU: tl.constexpr = tl.constexpr(COMPILED_MAPS["relu"])


@triton.jit
def phi(x, MAP: tl.constexpr):
    """Return the features of x under feature map number `MAP`; NaN stays NaN."""
    if MAP == ELU:
        return tl.where(x < 0.0, tl.exp(tl.minimum(x, 0.0)), x + 1.0)
    else:
        tl.static_assert(MAP == RELU)
        return tl.where(x < 0.0, 0.0, x)


@triton.jit
def slope(features, MAP: tl.constexpr):
    """Return the derivative of the map, computed from the map's result."""
    if MAP == ELU:
        return tl.minimum(features, 1.0)
    else:
        tl.static_assert(MAP == RELU)
        return tl.where(features > 0.0, 1.0, 0.0)


@triton.jit
def _load_rows(x, head, H, image_stride, head_stride, position_stride, t, inside, WIDTH: tl.constexpr):
    """Rows t of one head of x [B, H, T, WIDTH] in float32, with 0 outside x; `head` counts over all images."""
    start = x + (head // H).to(tl.int64) * image_stride + (head % H).to(tl.int64) * head_stride
    places = t.to(tl.int64)[:, None] * position_stride + tl.arange(0, WIDTH)[None, :]
    return tl.load(start + places, mask=inside[:, None], other=0.0).to(tl.float32)


@triton.jit
def _store_rows(x, rows, head, H, T, t, inside, WIDTH: tl.constexpr):
    """Write rows t of one head of x [B, H, T, WIDTH], with the heads of a position adjacent in memory."""
    row = ((head // H).to(tl.int64) * T + t) * H + head % H
    places = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(x + places, rows.to(x.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _sums_places(index, C: tl.constexpr, V: tl.constexpr):
    """Return the offsets of number `index` of sums [.., C, V]."""
    return index.to(tl.int64) * C * V + tl.arange(0, C)[:, None] * V + tl.arange(0, V)[None, :]


@triton.jit(do_not_specialize=LENGTHS)
def _sum_kernel(
    k, k_image, k_head, k_position, v, v_image, v_head, v_position, s, z, H, T, segments, chunks,
    MAP: tl.constexpr, C: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """s [B, H, segments, C, V] and z [B, H, segments, C] over each segment of `chunks` chunks separately."""
    head, segment = tl.program_id(0), tl.program_id(1)
    total_s, total_z = tl.zeros((C, V), dtype=tl.float32), tl.zeros((C,), dtype=tl.float32)
    for chunk in range(chunks):
        t = (segment * chunks + chunk) * SIZE + tl.arange(0, SIZE)
        inside = t < T
        keys = phi(_load_rows(k, head, H, k_image, k_head, k_position, t, inside, C), MAP)
        keys = tl.where(inside[:, None], keys, 0.0)
        values = _load_rows(v, head, H, v_image, v_head, v_position, t, inside, V)
        total_s += tl.dot(tl.trans(keys), values, input_precision=PRECISION)
        total_z += tl.sum(keys, axis=0)
    index = head * segments + segment
    tl.store(s + _sums_places(index, C, V), total_s)
    tl.store(z + index.to(tl.int64) * C + tl.arange(0, C), total_z)


@triton.jit(do_not_specialize=LENGTHS)
def _forward_kernel(
    q, q_image, q_head, q_position, k, k_image, k_head, k_position, v, v_image, v_head, v_position,
    s, z, y, weights, total_s, total_z, H, T, segments, chunks,
    MAP: tl.constexpr, C: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y, its denominators `weights` and the sums after the last segment, from the sums s, z before each segment."""
    head, segment = tl.program_id(0), tl.program_id(1)
    index = head * segments + segment
    before_s = tl.load(s + _sums_places(index, C, V))
    before_z = tl.load(z + index.to(tl.int64) * C + tl.arange(0, C))
    rows = tl.arange(0, SIZE)
    causal = rows[:, None] >= rows[None, :]
    for chunk in range(chunks):
        t = (segment * chunks + chunk) * SIZE + rows
        inside = t < T
        queries = phi(_load_rows(q, head, H, q_image, q_head, q_position, t, inside, C), MAP)
        keys = phi(_load_rows(k, head, H, k_image, k_head, k_position, t, inside, C), MAP)
        keys = tl.where(inside[:, None], keys, 0.0)
        values = _load_rows(v, head, H, v_image, v_head, v_position, t, inside, V)
        scores = tl.where(causal, tl.dot(queries, tl.trans(keys), input_precision=PRECISION), 0.0)
        numerator = tl.dot(scores, values, input_precision=PRECISION)
        numerator += tl.dot(queries, before_s, input_precision=PRECISION)
        weight = tl.sum(scores, axis=1) + tl.sum(queries * before_z[None, :], axis=1)
        nothing = weight == 0.0
        quotient = tl.where(nothing[:, None], 0.0, numerator / tl.where(nothing, 1.0, weight)[:, None])
        _store_rows(y, quotient, head, H, T, t, inside, V)
        tl.store(weights + head.to(tl.int64) * T + t, weight, mask=inside)
        before_s += tl.dot(tl.trans(keys), values, input_precision=PRECISION)
        before_z += tl.sum(keys, axis=0)
    if segment == segments - 1:
        tl.store(total_s + _sums_places(head, C, V), before_s)
        tl.store(total_z + head.to(tl.int64) * C + tl.arange(0, C), before_z)


@triton.jit(do_not_specialize=LENGTHS)
def _backward_queries_kernel(
    q, q_image, q_head, q_position, k, k_image, k_head, k_position, v, v_image, v_head, v_position,
    g, g_image, g_head, g_position, s, z, weights, grad_q, grad_weights, later_s, later_z, H, T, segments, chunks,
    MAP: tl.constexpr, C: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, of denominators, and of the sums before each segment: later_s and later_z."""
    head, segment = tl.program_id(0), tl.program_id(1)
    index = head * segments + segment
    before_s = tl.load(s + _sums_places(index, C, V))
    before_z = tl.load(z + index.to(tl.int64) * C + tl.arange(0, C))
    sum_s, sum_z = tl.zeros((C, V), dtype=tl.float32), tl.zeros((C,), dtype=tl.float32)
    rows = tl.arange(0, SIZE)
    causal = rows[:, None] >= rows[None, :]
    for chunk in range(chunks):
        t = (segment * chunks + chunk) * SIZE + rows
        inside = t < T
        queries = phi(_load_rows(q, head, H, q_image, q_head, q_position, t, inside, C), MAP)
        keys = phi(_load_rows(k, head, H, k_image, k_head, k_position, t, inside, C), MAP)
        keys = tl.where(inside[:, None], keys, 0.0)
        values = _load_rows(v, head, H, v_image, v_head, v_position, t, inside, V)
        weight = tl.load(weights + head.to(tl.int64) * T + t, mask=inside, other=0.0)
        inverse = tl.where(weight == 0.0, 0.0, 1.0 / tl.where(weight == 0.0, 1.0, weight))
        # The gradient of the numerator.
        gradient = _load_rows(g, head, H, g_image, g_head, g_position, t, inside, V) * inverse[:, None]
        scores = tl.where(causal, tl.dot(queries, tl.trans(keys), input_precision=PRECISION), 0.0)
        numerator = tl.dot(scores, values, input_precision=PRECISION)
        numerator += tl.dot(queries, before_s, input_precision=PRECISION)
        of_weight = -tl.sum(gradient * numerator, axis=1) * inverse
        tl.store(grad_weights + head.to(tl.int64) * T + t, of_weight, mask=inside)
        of_scores = tl.dot(gradient, tl.trans(values), input_precision=PRECISION) + of_weight[:, None]
        of_queries = tl.dot(tl.where(causal, of_scores, 0.0), keys, input_precision=PRECISION)
        of_queries += tl.dot(gradient, tl.trans(before_s), input_precision=PRECISION)
        of_queries += of_weight[:, None] * before_z[None, :]
        _store_rows(grad_q, of_queries * slope(queries, MAP), head, H, T, t, inside, C)
        before_s += tl.dot(tl.trans(keys), values, input_precision=PRECISION)
        before_z += tl.sum(keys, axis=0)
        sum_s += tl.dot(tl.trans(queries), gradient, input_precision=PRECISION)
        sum_z += tl.sum(queries * of_weight[:, None], axis=0)
    tl.store(later_s + _sums_places(index, C, V), sum_s)
    tl.store(later_z + index.to(tl.int64) * C + tl.arange(0, C), sum_z)


@triton.jit(do_not_specialize=LENGTHS)
def _backward_keys_kernel(
    q, q_image, q_head, q_position, k, k_image, k_head, k_position, v, v_image, v_head, v_position,
    g, g_image, g_head, g_position, later_s, later_z, weights, grad_weights, grad_k, grad_v, grad_s, grad_z,
    H, T, segments, chunks,
    MAP: tl.constexpr, C: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of keys, values and the sums before each segment; later_s, later_z are those of the sums after it."""
    head, segment = tl.program_id(0), tl.program_id(1)
    index = head * segments + segment
    after_s = tl.load(later_s + _sums_places(index, C, V))
    after_z = tl.load(later_z + index.to(tl.int64) * C + tl.arange(0, C))
    rows = tl.arange(0, SIZE)
    causal = rows[:, None] >= rows[None, :]
    for chunk in range(chunks):
        t = (segment * chunks + chunks - 1 - chunk) * SIZE + rows
        inside = t < T
        queries = phi(_load_rows(q, head, H, q_image, q_head, q_position, t, inside, C), MAP)
        keys = phi(_load_rows(k, head, H, k_image, k_head, k_position, t, inside, C), MAP)
        values = _load_rows(v, head, H, v_image, v_head, v_position, t, inside, V)
        weight = tl.load(weights + head.to(tl.int64) * T + t, mask=inside, other=0.0)
        of_weight = tl.load(grad_weights + head.to(tl.int64) * T + t, mask=inside, other=0.0)
        inverse = tl.where(weight == 0.0, 0.0, 1.0 / tl.where(weight == 0.0, 1.0, weight))
        # This is 0 in the padding, so that padded queries add nothing.
        gradient = _load_rows(g, head, H, g_image, g_head, g_position, t, inside, V) * inverse[:, None]
        scores = tl.where(causal, tl.dot(queries, tl.trans(keys), input_precision=PRECISION), 0.0)
        of_scores = tl.dot(gradient, tl.trans(values), input_precision=PRECISION) + of_weight[:, None]
        of_scores = tl.where(causal, of_scores, 0.0)
        of_keys = tl.dot(tl.trans(of_scores), queries, input_precision=PRECISION)
        of_keys += tl.dot(values, tl.trans(after_s), input_precision=PRECISION) + after_z[None, :]
        of_values = tl.dot(tl.trans(scores), gradient, input_precision=PRECISION)
        of_values += tl.dot(keys, after_s, input_precision=PRECISION)
        _store_rows(grad_k, of_keys * slope(keys, MAP), head, H, T, t, inside, C)
        _store_rows(grad_v, of_values, head, H, T, t, inside, V)
        after_s += tl.dot(tl.trans(queries), gradient, input_precision=PRECISION)
        after_z += tl.sum(queries * of_weight[:, None], axis=0)
    tl.store(grad_s + _sums_places(index, C, V), after_s)
    tl.store(grad_z + index.to(tl.int64) * C + tl.arange(0, C), after_z)


def attend(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor | None, z: Tensor | None, feature_map: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `attend` of cpu_linear.py returns."""
    require_sums_fit(q, k, v, s, z)
    q, k, v = map(with_dense_rows, (q, k, v))
    s = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3], dtype=torch.float32) if s is None else s.float()
    z = q.new_zeros(*q.shape[:2], q.shape[3], dtype=torch.float32) if z is None else z.float()
    y, total_s, total_z = _LinearAttention.apply(q, k, v, s, z, COMPILED_MAPS[feature_map])
    return y, total_s, total_z


def cut_into_segments(batch: int, heads: int, length: int) -> tuple[int, int]:
    """Return the number of segments, enough to fill the device, and the number of chunks per segment."""
    chunks = -(-length // CHUNK)
    wanted = -(-WANTED_PROGRAMS // (batch * heads))
    per_segment = -(-chunks // wanted)
    return -(-chunks // per_segment), per_segment


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context[tuple[int, Sizes]], q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, feature_map: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, heads, length, features = q.shape
        segments, chunks = cut_into_segments(batch, heads, length)
        sizes = (heads, length, segments, chunks)
        starts_s, starts_z = s.unsqueeze(2), z.unsqueeze(2)
        if segments > 1:
            each_s = s.new_empty(batch, heads, segments, features, v.shape[3])
            each_z = s.new_empty(batch, heads, segments, features)
            _launch(_sum_kernel, q, v, feature_map, sizes, k, *k.stride()[:3], v, *v.stride()[:3], each_s, each_z)
            starts_s = torch.cat([starts_s, each_s[:, :, :-1]], dim=2).cumsum(dim=2)
            starts_z = torch.cat([starts_z, each_z[:, :, :-1]], dim=2).cumsum(dim=2)
        starts_s, starts_z = starts_s.contiguous(), starts_z.contiguous()
        y, weights = empty_like_projection(v), s.new_empty(batch, heads, length)
        total_s, total_z = torch.empty_like(s, memory_format=torch.contiguous_format), z.new_empty(z.shape)
        inputs = [part for x in (q, k, v) for part in (x, *x.stride()[:3])]
        outputs = (starts_s, starts_z, y, weights, total_s, total_z)
        _launch(_forward_kernel, q, v, feature_map, sizes, *inputs, *outputs)
        ctx.save_for_backward(q, k, v, starts_s, starts_z, weights)
        ctx.settings = feature_map, sizes
        ctx.set_materialize_grads(False)
        return y, total_s, total_z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context[tuple[int, Sizes]], *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, starts_s, starts_z, weights = ctx.saved_tensors
        g, of_total_s, of_total_z = gradients
        g = torch.zeros_like(v) if g is None else g
        g = with_dense_rows(g)
        grad_q, grad_k, grad_v = map(empty_like_projection, (q, k, v))
        grad_weights, each_s, each_z = map(torch.empty_like, (weights, starts_s, starts_z))
        inputs = [part for x in (q, k, v, g) for part in (x, *x.stride()[:3])]
        outputs = (starts_s, starts_z, weights, grad_q, grad_weights, each_s, each_z)
        _launch(_backward_queries_kernel, q, v, *ctx.settings, *inputs, *outputs)
        # The gradients of the sums after each segment come from later segments and from the final sums.
        later_s, later_z = _sum_later(each_s, of_total_s), _sum_later(each_z, of_total_z)
        grad_s, grad_z = torch.empty_like(later_s), torch.empty_like(later_z)
        last = (later_s, later_z, weights, grad_weights, grad_k, grad_v, grad_s, grad_z)
        _launch(_backward_keys_kernel, q, v, *ctx.settings, *inputs, *last)
        return grad_q, grad_k, grad_v, grad_s[:, :, 0], grad_z[:, :, 0], None


def _sum_later(each: Tensor, last: Tensor | None) -> Tensor:
    """For each segment of `each` [B, H, segments, ...], the sum over later segments plus `last`."""
    end = torch.zeros_like(each[:, :, :1]) if last is None else last.unsqueeze(2)
    return torch.cat([each[:, :, 1:], end], dim=2).flip(2).cumsum(dim=2).flip(2).contiguous()


def _launch(kernel: triton.JITFunction, q: Tensor, v: Tensor, feature_map: int, sizes: Sizes, *given: object) -> None:
    """Launch one program for each head of every image and each segment."""
    heads, _, segments, _ = sizes
    options = {
        "MAP": feature_map,
        "C": q.shape[3],
        "V": v.shape[3],
        "SIZE": CHUNK,
        # TF32 has three bits more than bfloat16. Three TF32 products keep nearly all bits of a float32 product.
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
        # There is no pipelining, because it would need more shared memory than small GPUs have.
        "num_stages": 1,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    with torch.cuda.device_of(q):
        kernel[(len(q) * heads, segments)](*given, *sizes, **options)
