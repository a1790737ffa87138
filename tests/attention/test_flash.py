"""Tests particular to mixed-chunk attention; test_gau.py covers what it shares with `gau`."""

from typing import Any

import pytest
import torch
from attention.arguments import build_one
from attention.cases.gau import fill_parameters
from tolerances import FLOAT64, assert_agree
from torch import Tensor

from linformer_cli.attention.base import AttentionShape
from linformer_cli.attention.flash import FlashAttention
from linformer_cli.model.mixers import build_attention


def build(dtype: torch.dtype = torch.float64, **options: Any) -> FlashAttention:
    mechanism = build_one("flash", heads=1, **options)
    fill_parameters(options.get("chunk", 256))(mechanism)
    return mechanism.to(dtype)


def draw(length: int, batch: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    z, v = (
        torch.randn(batch, 1, length, width, generator=generator, dtype=torch.float64).to(dtype) for width in (6, 5)
    )
    return z, z, v


@pytest.mark.parametrize("scale", ["length", "width"])
def test_one_chunk_equals_a_gated_attention_unit(scale: str) -> None:
    flash, inputs = build(chunk=50, scale=scale), draw(50)
    gau = build_attention("gau", {"scale": scale}, AttentionShape(1, 6, 5, positions=50, row=5)).double()
    ours = {key: tensor for key, tensor in flash.state_dict().items() if not key.startswith("linear_")}
    gau.load_state_dict(ours)
    assert_agree(flash.attend(*inputs)[0], gau.attend(*inputs)[0], FLOAT64)


def test_chunks_are_counted_from_the_start_of_the_image() -> None:
    """Only the linear part sees earlier chunks; without it, the first position of a chunk sees only itself."""
    mechanism, (z, _, v) = build(chunk=16), draw(40)
    for part in mechanism.linear_query.parameters():
        part.data.zero_()
    _, state = mechanism.attend(*(part[:, :, :9] for part in (z, z, v)))
    y, _ = mechanism.attend(*(part[:, :, 9:] for part in (z, z, v)), state)
    for place in (16, 32):
        alone, _ = mechanism.attend(*(part[:, :, place : place + 1] for part in (z, z, v)))
        assert_agree(y[:, :, place - 9], alone[:, :, 0], FLOAT64)
    second, _ = mechanism.attend(*(part[:, :, 16:18] for part in (z, z, v)))
    assert_agree(y[:, :, 17 - 9], second[:, :, 1], FLOAT64)
