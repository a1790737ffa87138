"""Look-ahead for CUDA graphs, in Triton: kernels that have not run on a GPU. Importing this file needs Triton.

A pass computes several positions of one image from guesses. How many of them it keeps is known on the device only, so
the next pass adds their keys and values to the sums (`step_ahead`), and a last kernel compares the drawn values with
the guesses and prepares the next pass (`keep_rows`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_linear import phi
from .triton_steps import launch_linear, load_row


@triton.jit
def _step_ahead_kernel(
    q, q_image, q_head, k, k_image, k_head, v, v_image, v_head, s, z, keys, values, kept, y, H,
    MAP: tl.constexpr, C: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Step one head of one image by `ROWS` positions; the state has room for the pairs of `ROOM` positions."""
    place = tl.program_id(0).to(tl.int64)
    image, head, count = place // H, place % H, tl.load(kept + place // H)
    features, channels, rows = tl.arange(0, C), tl.arange(0, V), tl.arange(0, ROWS)
    s_places = place * C * V + features[:, None] * V + channels[None, :]
    sums, weights = tl.load(s + s_places), tl.load(z + place * C + features)
    for row in tl.static_range(ROOM):
        # Pairs that are not kept may be NaN.
        key = phi(tl.load(keys + (place * ROOM + row) * C + features).to(tl.float32), MAP)
        value = tl.load(values + (place * ROOM + row) * V + channels).to(tl.float32)
        sums += tl.where(row < count, key[:, None] * value[None, :], 0.0)
        weights += tl.where(row < count, key, 0.0)
    # Several threads may load the same number; all of them must have loaded it before any thread writes.
    tl.debug_barrier()
    tl.store(s + s_places, sums)
    tl.store(z + place * C + features, weights)
    y_t = tl.zeros((ROWS, V), dtype=tl.float32)
    for row in tl.static_range(ROWS):
        position = image * ROWS + row
        key = phi(load_row(k, position, head, k_image, k_head, C), MAP)
        query = phi(load_row(q, position, head, q_image, q_head, C), MAP)
        sums += key[:, None] * load_row(v, position, head, v_image, v_head, V)[None, :]
        weights += key
        weight = tl.sum(query * weights, axis=0)
        nothing = weight == 0.0
        quotient = tl.where(nothing, 0.0, tl.sum(query[:, None] * sums, axis=0) / tl.where(nothing, 1.0, weight))
        y_t = tl.where((rows == row)[:, None], quotient[None, :], y_t)
    positions = image * ROWS + rows
    places = (positions * H + head)[:, None] * V + channels[None, :]
    tl.store(y + places, y_t.to(y.dtype.element_ty))
    key = tl.load(k + positions[:, None] * k_image + head * k_head + features[None, :])
    value = tl.load(v + positions[:, None] * v_image + head * v_head + channels[None, :])
    pairs = (place * ROOM + rows)[:, None]
    tl.store(keys + pairs * C + features[None, :], key)
    tl.store(values + pairs * V + channels[None, :], value)


def step_ahead(q_t: Tensor, k_t: Tensor, v_t: Tensor, state: tuple[Tensor, ...], feature_map: str) -> Tensor:
    """Return outputs [B n, H, V] at n adjacent positions of each of the B images of an `AheadState`; updates it."""
    sizes = {"ROWS": len(q_t) // len(state[0]), "ROOM": state[2].shape[2]}  # with 16 elements of s per thread
    return launch_linear(_step_ahead_kernel, q_t, k_t, v_t, state, feature_map, 512, **sizes)


@triton.jit
def _keep_rows_kernel(
    drawn, finite, tokens, numbers, line, uniforms, counts, recent, place, kept, reach, above,
    IMAGES: tl.constexpr, ROWS: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """See `keep_rows`. `REACH` is a power of 2, at least `reach`."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, REACH)
    known, guessed, end = tl.load(counts), tl.load(counts + 1), tl.load(counts + 2)
    position, fine = tl.load(place), tl.load(counts + 3)
    values = tl.load(drawn + rows)
    guesses = tl.load(tokens + rows + 1, mask=rows < ROWS - 1, other=-1)
    ok = tl.load(finite + rows) != 0
    # The first row is right, and the rows up to the first wrong guess. A later row with NaN is computed again.
    right = tl.min(tl.where(values == guesses, ROWS, rows + 1), axis=0)
    right = tl.minimum(right, tl.min(tl.where(ok | (rows == 0), ROWS, rows), axis=0))
    right = tl.minimum(right.to(tl.int64), end - known)
    damaged = (tl.sum(tl.where(ok | (rows > 0), 0, 1), axis=0) > 0) & (known < end)
    tl.store(line + known + rows, values)
    for image in tl.static_range(IMAGES):
        old = columns + right
        from_recent = tl.load(recent + image * reach + old, mask=old < reach, other=0)
        read = (old >= reach) & (columns < reach)
        from_tokens = tl.load(tokens + image * ROWS + old - reach, mask=read, other=0)
        tl.debug_barrier()
        shifted = tl.where(read, from_tokens.to(tl.int16), from_recent)
        tl.store(recent + image * reach + columns, shifted, mask=columns < reach)
    guessed, known = tl.maximum(guessed, known + ROWS), known + right
    tl.debug_barrier()
    # Beyond the guesses so far, the guess is the value one row up, and in the first row the last value before.
    places = known - 1 + rows
    up = places - above * tl.maximum((places - guessed + above) // above, 0)
    following = tl.load(line + tl.where(up < 0, guessed - 1, up))
    for image in tl.static_range(IMAGES):
        tl.store(tokens + image * ROWS + rows, following)
        tl.store(kept + image, right)
    tl.store(numbers + rows, tl.load(uniforms + known + rows))
    tl.store(counts, known)
    tl.store(counts + 1, guessed)
    tl.store(counts + 3, tl.where(damaged, 0, fine))
    tl.store(place, position + right)


def keep_rows(drawn: Tensor, finite: Tensor, ahead: tuple[Tensor, ...], above: int) -> None:
    """Keep the values `drawn` int64 [W] up to the first that differs from its guess, and guess the next ones.

    `finite` bool [W] tells which predictions are. The guess for a value is what an earlier pass drew after a wrong
    guess, or else the value `above` values before. Updates the tensors of an `Ahead` in place.
    """
    tokens, *_, recent, _, _ = ahead
    (images, window), reach = tokens.shape, recent.shape[1]
    sizes = {"IMAGES": images, "ROWS": window, "REACH": triton.next_power_of_2(reach)}
    with torch.cuda.device_of(drawn):
        _keep_rows_kernel[(1,)](drawn, finite, *ahead, reach, above, **sizes, num_warps=1)
