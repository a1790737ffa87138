"""Tests particular to Gated DeltaNet-2; test_contract.py covers what all mechanisms share."""

import functools
from typing import Any

import torch
from attention.arguments import build_one, draw_parts
from tolerances import assert_agree

from linformer_cli.attention.base import AttentionShape
from linformer_cli.errors import UsageError
from linformer_cli.model.mixers import build_attention, parse_options

SHAPE = AttentionShape(heads=2, key_width=4, value_width=5, positions=784, row=28)
KDA = {"erase": "head", "write": "tied"}


build = functools.partial(build_one, "gdn2", key_width=4)


def draw(extra: int, length: int = 40) -> list[Any]:
    return draw_parts(length, widths=(4, 4, 5, extra))


def test_one_gate_of_each_kind_equals_deltanet() -> None:
    """Gated DeltaNet is a setting of this mechanism, with the same parameters."""
    for decay, gate in (("head", True), ("none", False)):
        deltanet = build_attention("deltanet", {"gate": gate, "negative_eigenvalues": True}, SHAPE).double()
        ours = build(decay=decay, **KDA, negative_eigenvalues=True)
        ours.load_state_dict(deltanet.state_dict())
        inputs = draw(2 if gate else 1)
        (y, state), (expected, expected_state) = ours.attend(*inputs), deltanet.attend(*inputs)
        assert torch.equal(y, expected)
        assert torch.equal(state.s, expected_state.s)


def test_initial_memories_of_a_head_range_from_an_image_to_a_row() -> None:
    """With a memory of n positions, a value has decayed to 1/e after n positions."""
    bias = build().gate_bias
    assert bias is not None and bias.shape == (2, 4)
    memories = 1 / (-bias).sigmoid() - 1
    assert_agree(memories[0], 784 * (28 / 784) ** (torch.arange(4, dtype=torch.float64) / 3), 1e-5)
    assert torch.equal(memories[0], memories[1])


def test_the_gradient_of_an_erase_gate_fades_where_the_decay_is_closed() -> None:
    """There, the gate reads a state of nearly 0. A difference of larger terms would leave rounding errors of 1e-7."""
    for decay in ("channel", "head"):
        attention = build_one("gdn2", torch.float32, key_width=4, decay=decay)
        erase, write = attention.gates["erase"], attention.gates["write"]
        *inputs, extra = draw_parts(200, torch.float32, widths=(4, 4, 5, attention.extra_per_head))
        extra[:, :, 100:110, erase + write :] = -60
        y, _ = attention.attend(*inputs, extra.requires_grad_())
        (gradient,) = torch.autograd.grad((y * torch.arange(5.0)).sum(), extra)
        assert gradient[:, :, :100, :erase].abs().max() > 1e-3
        assert 0 < gradient[:, :, 100:110, :erase].abs().max() < 1e-20


def test_settings_that_contradict_each_other_are_refused(raises_one_line: Any) -> None:
    with raises_one_line(UsageError, "'gdn2'", "write 'tied' needs erase 'head'"):
        parse_options("gdn2", {"write": "tied"})
