"""Gated DeltaNet-2 (Hatamizadeh 2026, arXiv 2605.22791): a delta rule with separate gates to erase and to write."""

from typing import Literal

from .base import AttentionShape, setting
from .parts.chunks import PowerOfTwoChunk
from .parts.delta_rule import GatedDeltaAttention, GatedDeltaOptions


class Gdn2Options(GatedDeltaOptions):
    decay: Literal["channel", "head", "none"] = setting(
        "channel", "a decay gate for each key dimension, one for each head, or none"
    )
    erase: Literal["channel", "head"] = setting("channel", "an erase gate for each key dimension, or one for each head")
    write: Literal["channel", "head", "tied"] = setting(
        "channel", "a write gate for each value dimension, one for each head, or 'tied': the head's erase gate"
    )
    chunk: PowerOfTwoChunk = 32

    def check(self) -> None:
        if self.write == "tied" and self.erase != "head":
            raise ValueError("write 'tied' needs erase 'head', found erase 'channel'")


class Gdn2Attention(GatedDeltaAttention[Gdn2Options]):
    """y_t = q_t s_t / rms(q_t s_t), where s_t = (I - k_t (b_t * k_t)^T) diag(a_t) s_{t-1} + k_t (w_t * v_t)^T.

    Queries and keys are silu(q) and silu(k), scaled to length 1. The erase gate b_t has K numbers and selects which key
    dimensions read the value to be erased. The write gate w_t has V numbers and selects which value dimensions are
    written. The decay a_t = sigmoid(x_t + bias) has K numbers. b_t, w_t and a_t are sigmoids of extra scalars; the bias
    is learned for each head and key dimension. With `negative_eigenvalues`, b_t is twice the sigmoid (Grazzi 2024,
    arXiv 2411.12537).

    With `erase = head` and `write = tied`, both gates are one number, which gives Kimi Delta Attention (arXiv
    2510.26692). If also `decay = head`, this is `deltanet`.

    The source's layer also has a short convolution of queries, keys and values, weights in the norm, and an output
    gate. The network settings `short_convolution`, `norm_heads` and `output_gate` add them. Unlike the source, we use
    no activation of values, a different form of a, and no bottleneck in the projection of the decay gates.
    """

    name = "gdn2"
    source = "Hatamizadeh 2026, arXiv 2605.22791"
    method = "delta rule, separate erase and write gates"

    def __init__(self, options: Gdn2Options, shape: AttentionShape) -> None:
        keys = {"channel": shape.key_width, "head": 1, "none": 0}
        values = {"channel": shape.value_width, "head": 1, "tied": 0}
        gates = {"erase": keys[options.erase], "write": values[options.write], "decay": keys[options.decay]}
        super().__init__(options, shape, gates)
