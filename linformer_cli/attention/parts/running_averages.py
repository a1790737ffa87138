"""Weighted sums, computed in chunks, of running softmax averages: one average for each of m fixed queries.

    l_ti = log sum over j <= t of exp(e_ji)                    the log of the total weight of average i
    b_ti = sum over j <= t of exp(e_ji - l_ti) v_j             average i at position t
    y_t  = sum over i of g_ti b_ti

The b_ti are not stored: y_t is the sum over j <= t of W_tj v_j with W_tj = sum over i of g_ti exp(e_ji - l_ti). The
exponent is never positive, but exp(e_ji) or exp(-l_ti) alone can overflow in float32. Both are therefore taken relative
to a reference a, the l_i of some position from j to t. exp(e_ji - a) and exp(a - l_ti) are at most 1, and terms that
underflow do not matter. For j and t in different chunks, a is the l at the border between them. Inside a chunk, a block
of 2 s positions uses the l in its middle for all pairs with t in the second half and j in the first. Blocks with s = 1,
2, 4 .. cover the triangle, with one matrix product for each s. No result depends on a later maximum.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linformer_cli.attention.tensors import Context
from .chunks import corners, cut_chunks, iter_halves, split_halves

# The log of a weight of 0, far below every score. It is finite, so that differences are not NaN.
NOTHING = -1e30


def read_running_averages(
    gates: Tensor, scores: Tensor, v: Tensor, averages: Tensor, log_weights: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y [B, H, T, V], and b and l at the last position, given g, e [B, H, T, m] and v [B, H, T, V].

    `averages` [B, H, m, V] and `log_weights` [B, H, m] are b and l before these positions, at first 0 and `NOTHING`.
    `chunk`, a power of two, is the number of positions per chunk. Differentiable once with respect to every input.
    """
    length = scores.shape[2]
    chunk = min(chunk, 1 << (length - 1).bit_length())
    chunked = [cut_chunks(x, chunk, value) for x, value in ((gates, 0.0), (scores, NOTHING), (v, 0.0))]
    y, averages, log_weights = _ReadRunningAverages.apply(*chunked, averages, log_weights)
    return y.flatten(2, 3)[:, :, :length], averages, log_weights


def _accumulate_logs(scores: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return l [B, H, N, L, m], and l before every chunk and after the last one [B, H, N + 1, m]."""
    logs = scores.clone(memory_format=torch.contiguous_format)
    for size in iter_halves(scores.shape[3]):
        first, second = split_halves(logs, size)
        torch.logaddexp(second, first[..., -1:, :], out=second)
    borders = torch.cat([before.unsqueeze(2), logs[:, :, :, -1]], dim=2).logcumsumexp(dim=2)
    torch.logaddexp(logs, borders[:, :, :-1].unsqueeze(3), out=logs)
    # The l at a border is the reference for the chunks on both sides, so both must use the same numbers, bit for bit.
    borders[:, :, 1:] = logs[:, :, :, -1]
    return logs, borders


def _accumulate(sums: Tensor, logs: Tensor) -> Tensor:
    """Turn `sums` [B, H, N, m, V], relative to exp(logs [B, H, N, m]), into running sums in place."""
    decays = (logs[:, :, :-1] - logs[:, :, 1:]).exp_().unsqueeze(-1)
    for place in range(1, sums.shape[2]):
        sums[:, :, place].addcmul_(sums[:, :, place - 1], decays[:, :, place - 1])
    return sums


class _ReadRunningAverages(torch.autograd.Function):
    """y [B, H, N, L, V] and the last averages and log weights, for chunked inputs [B, H, N, L, ...].

    Let d_t be the gradient of y_t. The gradient of g_ti is h_ti = b_ti . d_t, and that of e_ji the sum over t >= j of
    g_ti exp(e_ji - l_ti) (v_j . d_t - h_ti), a sum like those of the forward pass, in reverse. Autograd would keep the
    factors of every block size.
    """

    @staticmethod
    def forward(
        ctx: Context, gates: Tensor, scores: Tensor, v: Tensor, averages: Tensor, log_weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        logs, borders = _accumulate_logs(scores, log_weights)
        weights = _diagonal_weights(gates, (scores - logs).exp_())
        for size in iter_halves(scores.shape[3]):
            keys, queries = _factors(scores, logs, size)
            corners(weights, size).copy_(queries.mul_(split_halves(gates, size)[1]) @ keys.transpose(-1, -2))
        y = weights @ v
        to_end = (scores - borders[:, :, 1:].unsqueeze(3)).exp_()
        sums = torch.cat([averages.unsqueeze(2), to_end.transpose(-1, -2) @ v], dim=2)
        sums = _accumulate(sums, borders)
        from_start = (borders[:, :, :-1].unsqueeze(3) - logs).exp_().mul_(gates)
        y += from_start @ sums[:, :, :-1]
        ctx.save_for_backward(gates, scores, v, logs, borders, sums)
        # These are copies, because views would keep the sums of all chunks in memory as long as the state lives.
        return y, sums[:, :, -1].clone(), borders[:, :, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        gates, scores, v, logs, borders, sums = ctx.saved_tensors
        grad_y, grad_averages, grad_log_weights = grad_outputs
        # h is computed from the products v_j . d_t and the factors of the forward pass.
        products = grad_y @ v.transpose(-1, -2)
        own_products = products.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        own = (scores - logs).exp_()
        h = own * own_products
        levels = [(size, *_factors(scores, logs, size)) for size in iter_halves(scores.shape[3])]
        for size, keys, queries in levels:
            split_halves(h, size)[1].addcmul_(queries, corners(products, size) @ keys)
        from_start = (borders[:, :, :-1].unsqueeze(3) - logs).exp_()
        h.addcmul_(from_start, grad_y @ sums[:, :, :-1].transpose(-1, -2))
        # The gradient of the average at each border, from later chunks and the final state, and a last column for h.
        from_start *= gates
        asked = torch.cat([from_start.transpose(-1, -2) @ grad_y, (from_start * h).sum(3).unsqueeze(-1)], dim=-1)
        last = (sums[:, :, -1] * grad_averages).sum(-1) - grad_log_weights
        asked = torch.cat([asked, torch.cat([grad_averages, last.unsqueeze(-1)], dim=-1).unsqueeze(2)], dim=2)
        asked = _accumulate(asked.flip(2), -borders.flip(2)).flip(2)
        asked_v, asked_h = asked[..., :-1], asked[..., -1]
        to_end = (scores - borders[:, :, 1:].unsqueeze(3)).exp_()
        grad_scores = (v @ asked_v[:, :, 1:].transpose(-1, -2)).sub_(asked_h[:, :, 1:].unsqueeze(3)).mul_(to_end)
        weights = _diagonal_weights(gates, own)
        grad_scores.addcmul_(own.mul_(gates), own_products - h)
        for size, keys, queries in levels:
            queries *= split_halves(gates, size)[1]
            corners(weights, size).copy_(queries @ keys.transpose(-1, -2))
            pairs = corners(products, size).transpose(-1, -2) @ queries
            pairs -= (queries * split_halves(h, size)[1]).sum(-2, keepdim=True)
            split_halves(grad_scores, size)[0].addcmul_(keys, pairs)
        grad_v = weights.transpose(-1, -2) @ grad_y
        grad_v += to_end @ asked_v[:, :, 1:]
        before = asked[:, :, 0]
        return h, grad_scores, grad_v, before[..., :-1], (sums[:, :, 0] * before[..., :-1]).sum(-1) - before[..., -1]


def _factors(scores: Tensor, logs: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return exp(e - a) of each first half and exp(a - l) of each second half, where a is l in the middle."""
    middle = split_halves(logs, size)[0][..., -1:, :]
    return (split_halves(scores, size)[0] - middle).exp_(), (middle - split_halves(logs, size)[1]).exp_()


def _diagonal_weights(gates: Tensor, own: Tensor) -> Tensor:
    """W [B, H, N, L, L] with only its diagonal set, for `own` [B, H, N, L, m] = exp(e_ti - l_ti)."""
    weights = own.new_zeros(*own.shape[:4], own.shape[3])
    weights.diagonal(dim1=-2, dim2=-1).copy_((own * gates).sum(-1))
    return weights
