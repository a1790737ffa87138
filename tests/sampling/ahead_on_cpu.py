"""`lintx` with engines that count on a CPU how many values a pass of look-ahead on a GPU keeps.

    python tests/sampling/ahead_on_cpu.py sample mnist-deep -n 20 --batch 1 --engine ahead-16 --device cpu --json

`ahead-16` is `cuda-fused:look-ahead=16`. Which values it keeps is decided by the engine's own kernel, in Triton's
interpreter; the rest of a pass is plain torch. `ahead-4` and `ahead-8` have passes of 4 and 8 positions.
"""

import os

import torch
from torch import Tensor

from linformer_cli.__main__ import main
from linformer_cli.attention.base import AttentionShape
from linformer_cli.attention.kernels import registry
from linformer_cli.attention.kernels.registry import Operation
from linformer_cli.attention.linear import LinearAttention, LinearOptions, LinearState
from linformer_cli.attention.parts import folded_sums
from linformer_cli.attention.parts.folded_sums import AheadState
from linformer_cli.model import blocks
from linformer_cli.sampling.engines import ENGINES
from linformer_cli.sampling.engines.ahead import AheadEngine


def step_ahead(q_t: Tensor, k_t: Tensor, v_t: Tensor, state: AheadState, feature_map: str) -> Tensor:
    """What the kernel of this name computes, by the parallel form of linear attention."""
    images, heads, width, _ = state.s.shape
    shape = AttentionShape(heads=heads, key_width=width, value_width=v_t.shape[-1], positions=784, row=28)
    attention = LinearAttention(LinearOptions.model_validate({"feature_map": feature_map}), shape)
    if kept := int(state.steps[0]):
        keys, values = state.keys[:, :, :kept], state.values[:, :, :kept]
        _, after = attention.attend(keys, keys, values, LinearState(state.s, state.z))
        state.s.copy_(after.s)
        state.z.copy_(after.z)
    q, k, v = (x.unflatten(0, (images, -1)).transpose(1, 2) for x in (q_t, k_t, v_t))
    y, _ = attention.attend(q, k, v, LinearState(state.s, state.z))
    state.keys[:, :, : k.shape[2]] = k
    state.values[:, :, : v.shape[2]] = v
    return y.transpose(1, 2).flatten(0, 1)


class CpuAheadEngine(AheadEngine):
    @classmethod
    def refusal(cls, model: object, products: torch.dtype | None = None) -> str | None:
        return None


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    registry.has_triton = lambda device: True
    blocks.PROJECTION = Operation()
    folded_sums.AHEAD_STEP = Operation(load_triton=lambda: step_ahead)
    for window in (4, 8, 16):
        name = f"ahead-{window}"
        ENGINES[name] = type(f"Ahead{window}", (CpuAheadEngine,), {"name": name, "window": window})
    main()
