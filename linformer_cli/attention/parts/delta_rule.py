"""The delta rule: before a position adds its value to the state, it erases what the state holds for its key.

    p_t = a_t * s_{t-1},    u_t = beta_t (v_t - d_t^T p_t),    s_t = p_t + k_t u_t^T,    y_t = q_t s_t

s [K, V] maps keys to values. The decay a_t is one number, or one number per row of s. The vector d_t reads the value
to be erased. In the plain delta rule, d_t is k_t.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from linformer_cli.attention.kernels.registry import DELTA_RULE, kernel_for

from .chunks import cut_chunks
from .decayed_sums import decay_weights, pairwise_products, sum_logs


class DeltaState(NamedTuple):
    """s [B, H, K, V], the matrix that maps a key to its value."""

    s: Tensor


class Updates(NamedTuple):
    """What T positions do to the state.

    k is [B, H, T, K], v [B, H, T, V], beta [B, H, T, 1], log a [B, H, T, 1 or K], and d [B, H, T, K] (None: k). beta
    and log a may have length 1 in B or H.
    """

    k: Tensor
    v: Tensor
    beta: Tensor
    log_a: Tensor
    d: Tensor | None = None


def delta_sums(q: Tensor, updates: Updates, carried: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    """y [B, H, T, V] and the last s [B, H, K, V], for q [B, H, T, K].

    `carried` is s before these positions (None: 0). `chunk` must be a power of two if a_t has one number per row.

    Let S be the state before a chunk, and c_t the sum of log a from the start of the chunk up to t, for each row. Let
    w(x_t, j) = sum over rows n of x_tn k_jn e^(c_tn - c_jn). The u_t of the chunk solve one unit lower triangular
    system,

        u_t + beta_t sum over j < t of w(d_t, j) u_j = beta_t v_t - beta_t (d_t * e^(c_t))^T S

    The systems of all chunks are solved in one call. Solving for the two terms on the right separately gives W and E S,
    where E does not depend on S. If the u_t are the rows of U, then U = W - E S. The state then advances by one product
    with a matrix [K, K] and one sum per chunk. Only these operations are sequential. No exponential exceeds 1.

    If d is k, keys have length at most 1 and beta is at most 2, then no entry of the system's inverse exceeds 2.
    """
    if follow_delta_rule := kernel_for(DELTA_RULE, q):
        return follow_delta_rule(q, *updates, carried)
    batch, heads, length = q.shape[:3]
    per_row = updates.log_a.shape[-1] > 1
    chunk = min(chunk, 1 << (length - 1).bit_length() if per_row else length)

    def cut(x: Tensor) -> Tensor:
        """x [B, H, T, N] as [B H, chunks, chunk, N]; in the padding, beta = 0 writes nothing and log a = 0 keeps s."""
        return cut_chunks(x, chunk).flatten(0, 1)

    q, k, v, beta, log_a = (cut(x) for x in (q, *updates[:4]))
    erase = beta * (k if updates.d is None else cut(updates.d))
    if per_row:
        # `sum_logs` is not used, because float64 is slow with one sum per row.
        c = log_a.cumsum(dim=2)
        products, system = pairwise_products(q, k, c), pairwise_products(erase, k, c)
        since, until = c.exp(), (c[:, :, -1:] - c).exp()
    else:
        c = sum_logs(log_a, dim=2)
        weights = decay_weights(c.squeeze(-1), q.dtype)
        keys = k.transpose(-1, -2)
        products, system = q @ keys * weights, erase @ keys * weights
        since, until = c.to(q.dtype).exp(), (c[:, :, -1:] - c).to(q.dtype).exp()
    # The solver reads the matrix only below the diagonal.
    right = torch.cat([beta * v, erase * since], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, erased = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    faded = (k * until).transpose(-1, -2)
    moves = (since[:, :, -1] * torch.ones_like(k[:, :, -1])).diag_embed() - faded @ erased
    s = q.new_zeros(batch * heads, k.shape[-1], v.shape[-1]) if carried is None else carried.flatten(0, 1)
    states = []
    for move, part in zip(moves.unbind(1), (faded @ written).unbind(1), strict=True):
        states.append(s)
        s = torch.baddbmm(part, move, s)
    before = torch.stack(states, dim=1)
    y = products @ (written - erased @ before) + (q * since) @ before
    return y.reshape(batch, heads, -1, v.shape[-1])[:, :, :length], s.unflatten(0, (batch, heads))


def delta_step(q: Tensor, updates: Updates, s: Tensor) -> Tensor:
    """y [B, H, 1, V] of one position (T = 1); updates s [B, H, K, V] in place."""
    k, v, beta, log_a, d = updates
    s.mul_(log_a.exp().transpose(-1, -2))
    # q and d read the state before the update. The contribution of the update to the output is added afterwards.
    read, held = (torch.cat([q, k if d is None else d], dim=-2) @ s).split(1, dim=-2)
    u = beta * (v - held)
    s.addcmul_(k.transpose(-1, -2), u)
    return torch.addcmul(read, (q * k).sum(-1, keepdim=True), u)
