"""Tests of single-head attention and of the layer around it; test_contract.py covers the rest."""

from typing import Any

import pytest
import torch
from attention.cases.single_head import fill_parameters, single_head
from attention.inputs import Inputs
from tolerances import FLOAT64, assert_agree
from torch import nn

from linformer_cli.attention.base import AttentionShape
from linformer_cli.attention.catalogue import fit_attention
from linformer_cli.bench.measure.ceilings import list_products
from linformer_cli.config import ImageShape, ModelConfig
from linformer_cli.model.blocks import TransformerBlock
from linformer_cli.model.linear_layers import Linear
from linformer_cli.model.mixers import build_attention, build_blocks, parse_options


def build_block(**changes: Any) -> TransformerBlock:
    torch.manual_seed(3)
    sizes = {"layers": 1, "width": 16, "heads": 2, "head_width": 6, "feed_forward": 24, **changes}
    config = ModelConfig(attention="single_head", image=ImageShape(height=4, width=5), **sizes)
    (block,) = build_blocks(config)
    block.double()
    fill_parameters(block)
    return block


def test_a_model_has_one_head_as_wide_as_the_model() -> None:
    shape = AttentionShape(heads=4, key_width=32, value_width=32, positions=784, row=28, layer=3)
    fitted = fit_attention("single_head", parse_options("single_head", {}), shape, width=96).shape
    assert fitted == AttentionShape(heads=1, key_width=96, value_width=96, positions=784, row=28, layer=3)


@pytest.mark.parametrize("sizes", [(2, 6, 6), (1, 6, 5)])
def test_several_heads_or_values_with_another_width_than_keys_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="one head whose keys are its values"):
        build_attention("single_head", {}, AttentionShape(*sizes, positions=784, row=28))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_only_queries_have_a_matrix(norm: str) -> None:
    """The attention branch of a block equals the definition with the input of the branch as key and value."""
    block, x = build_block(norm=norm), torch.randn(2, 15, 16, dtype=torch.float64)
    layer, inner = block.attention, block.inner
    memory = block.attention_norm(x) if norm == "pre" else x
    q = memory @ layer.input.weight.T + layer.input.bias
    inputs = Inputs(q.unsqueeze(1), memory.unsqueeze(1), memory.unsqueeze(1))
    y = single_head(inputs, dict(inner.named_parameters())).squeeze(1)
    block.feed_forward.output.weight.data.zero_()
    block.feed_forward.output.bias.data.zero_()
    expected = x + y
    if norm == "post":
        expected = block.feed_forward_norm(block.attention_norm(expected))
    assert_agree(block.attend(x, None)[0], expected, FLOAT64)
    matrices = [part for part in block.attention.modules() if type(part) in (nn.Linear, Linear)]
    assert matrices == [layer.input]


def test_the_state_holds_one_vector_per_position() -> None:
    """Softmax attention of the same width holds two."""
    shape = AttentionShape(1, 16, 16, positions=20, row=5)
    single, softmax = (
        build_attention(name, {}, shape).state_bytes(3, 20, torch.float32) for name in ("single_head", "softmax")
    )
    assert single - 8 == (softmax - 8) / 2


def test_the_value_gate_does_not_depend_on_the_position() -> None:
    """A step does not multiply by the gate's matrix. If the gate's weights and bias are 0, attention is off."""
    block, x = build_block(), torch.randn(2, 15, 16, dtype=torch.float64)
    assert list_products(block) == [(16, 16), (16, 24), (24, 16)]
    for end in block.branch_ends():
        end.weight.data.zero_()
        end.bias.data.zero_()
    assert torch.equal(block.attend(x, None)[0], x)


def test_autocast_rounds_neither_the_gates_nor_the_norm() -> None:
    """The gates and the norm use float32, so rounding a query to bfloat16 is the only rounding."""
    mechanism = build_attention("single_head", {}, AttentionShape(1, 16, 16, positions=20, row=5))
    q, k = torch.randn(1, 1, 9, 16).bfloat16(), torch.randn(1, 1, 9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = mechanism.attend(q, k, k)
    assert_agree(found, mechanism.attend(q.float(), k, k)[0], 1e-6)
