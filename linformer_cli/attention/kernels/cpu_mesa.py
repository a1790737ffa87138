"""The compiled solver of the mesa layer for CPUs (mesa.cpp). The reference form is in attention/mesa.py."""

import torch
from torch import Tensor

from .cpu_calls import Kernels, require_fit, with_dense_rows

_KERNELS = Kernels("attention/kernels/mesa.cpp", "MesaCall", "BHTK")


def solve(
    right: Tensor,
    keys: Tensor,
    written: Tensor,
    log_decay: Tensor,
    carried: Tensor | None,
    penalty: Tensor,
    iterations: int,
) -> Tensor:
    """x [B, H, T, K] with (h_t + Lambda) x_t near `right`, without gradients. h_t is the decayed sum of written keys^T.

    `right`, `keys` and `written` are [B, H, T, K], `log_decay` is [B, H, T], `carried` is h before these positions
    (None: 0), and `penalty` is the diagonal of Lambda [H, K]. All tensors are float32, or all float64. Raises
    what `require_fit` raises.
    """
    log_decay = log_decay.unsqueeze(-1)
    require_fit(right, keys, written, carried, log_decay, penalty.unsqueeze(1).expand_as(right))
    right, keys, written, log_decay = map(with_dense_rows, (right, keys, written, log_decay))
    x = with_dense_rows(torch.empty_like(right))
    views = {"right": right, "keys": keys, "written": written, "log_decay": log_decay, "x": x}
    states = {"carried": None if carried is None else carried.contiguous(), "penalty": penalty.contiguous()}
    _KERNELS.run("lintx_mesa_solve", right, iterations=iterations, **views, **states)
    return x
