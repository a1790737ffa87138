"""One softmax over several sets of keys, such as windows and global positions, computed set by set.

The result for one set of keys is a part [..., V + 2]. Let m be the largest score of a query in the set. The columns of
the part are the sum of exp(score - m) v_j, the sum of exp(score - m), and m.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from linformer_cli.attention.parts.recomputed import SCORES_KEPT, run_within
from linformer_cli.attention.tensors import find_padding


def weigh(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """The part [..., R, V + 2] of scaled queries [..., R, K] for keys [..., S, K] and values [..., S, V].

    `hidden` is True for the keys that a query does not see. A query may see no key.
    """
    scores = q.shape[2:-1].numel() * k.shape[-2]
    return run_within(SCORES_KEPT, scores, functools.partial(weigh_once, hidden), q, k, v)


def weigh_once(hidden: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`weigh` without the recomputation in the backward pass."""
    scores = q @ k.transpose(-1, -2)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    # The maximum of no keys is minus infinity, which would give NaN.
    top = scores.detach().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = (scores - top).exp()
    return torch.cat([weights @ v, weights.sum(dim=-1, keepdim=True), top], dim=-1)


def join(parts: Sequence[Tensor]) -> Tensor:
    """Outputs [..., V] of the softmax over all sets of keys; 0 for a query that sees no key."""
    tops = torch.stack([part[..., -1:].detach() for part in parts])
    scales = (tops - tops.amax(dim=0)).exp()
    sums = torch.stack([part[..., :-1] * scale for part, scale in zip(parts, scales, strict=True)]).sum(dim=0)
    total = sums[..., -1:]
    y: Tensor = sums[..., :-1] / total.masked_fill(total == 0, 1)
    return y


def join_globals(part: Tensor, q: Tensor, k: Tensor, v: Tensor, count: int, lengths: Tensor | None) -> Tensor:
    """Outputs [B, H, T, V] for the `part` [B, H, T, V + 2] of other keys, with the first `count` positions global.

    All queries see the global keys, and the queries of global positions see all keys. The part must not contain global
    keys.
    """
    if count == 0:
        return join([part])
    hidden = None if lengths is None else find_padding(lengths, q.shape[2])[:, None, None]
    to_first = weigh(q, k[:, :, :count], v[:, :, :count], None if hidden is None else hidden[..., :count])
    from_first = join([weigh(q[:, :, :count], k, v, hidden)])
    return torch.cat([from_first, join([part, to_first])[:, :, count:]], dim=2)
