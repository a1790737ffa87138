"""Compares the layers around a mechanism with torch's layers, and checks the inputs of the mechanism."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import loop_over
from machine import needs_library
from tolerances import FLOAT64, assert_agree
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.attention.base import measure_state_bytes, state_tensors
from linformer_cli.attention.catalogue import CATALOGUE
from linformer_cli.attention.softmax import SoftmaxAttention
from linformer_cli.config import ImageShape, ModelConfig
from linformer_cli.model.blocks import AttentionLayer, Block
from linformer_cli.model.dropout import Rounded, Vectors
from linformer_cli.model.lstm import LstmState
from linformer_cli.model.mixers import build_blocks, list_mixers
from linformer_cli.presets import PRESETS

BuildConfig = Callable[..., ModelConfig]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def build_block(config: ModelConfig) -> Block:
    torch.manual_seed(1)
    block = build_first(config).double().eval()
    for parameter in block.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return block


def build_first(config: ModelConfig) -> Block:
    return build_blocks(config.model_copy(update={"layers": 1}))[0]


def build_attention_layer(config: ModelConfig) -> AttentionLayer:
    """Build the attention layer of the last block."""
    block = build_blocks(config)[-1]
    return block.attention


def future_mask(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def test_softmax_with_projections_equals_multi_head_attention(build_config: BuildConfig) -> None:
    torch.manual_seed(1)
    layer = build_attention_layer(build_config("softmax", heads=4, width=24, head_width=6)).double()
    reference = nn.MultiheadAttention(24, 4, batch_first=True).double()
    reference.in_proj_weight.data, reference.in_proj_bias.data = layer.input.weight.data, layer.input.bias.data
    reference.out_proj.load_state_dict(layer.output.state_dict())
    x = draw(2, 15, 24)
    y, _ = layer.attend(x, None)
    expected, _ = reference(x, x, x, attn_mask=future_mask(15), need_weights=False)
    assert_agree(y, expected, FLOAT64)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_a_block_equals_torchs_transformer_layer(build_config: BuildConfig, norm: str, activation: str) -> None:
    block = build_block(
        build_config("softmax", heads=4, width=24, head_width=6, feed_forward=40, norm=norm, activation=activation)
    )
    reference = nn.TransformerEncoderLayer(
        24, 4, 40, dropout=0.0, activation=activation, batch_first=True, norm_first=norm == "pre"
    ).double()
    attention = block.attention
    reference.self_attn.in_proj_weight.data = attention.input.weight.data
    reference.self_attn.in_proj_bias.data = attention.input.bias.data
    reference.self_attn.out_proj.load_state_dict(attention.output.state_dict())
    reference.linear1.load_state_dict(block.feed_forward.input.state_dict())
    reference.linear2.load_state_dict(block.feed_forward.output.state_dict())
    reference.norm1.load_state_dict(block.attention_norm.state_dict())
    reference.norm2.load_state_dict(block.feed_forward_norm.state_dict())
    x = draw(2, 15, 24)
    assert_agree(block.attend(x, None)[0], reference(x, src_mask=future_mask(15)), FLOAT64)


@loop_over("attention", ["softmax", "linear", "gau", "flash", "lstm", "none"])
@loop_over("norm", ["pre", "post"])
def test_steps_and_blocks_of_a_layer_agree(build_config: BuildConfig, attention: str, norm: str) -> None:
    block = build_block(build_config(attention, norm=norm))
    x = draw(3, 20, 16)
    whole, _ = block.attend(x, None)
    first, state = block.attend(x[:, :9], None)
    second, _ = block.attend(x[:, 9:], state)
    assert_agree(torch.cat([first, second], dim=1), whole, FLOAT64)
    start = block.init_state(3, 20, x.device, x.dtype)
    assert_agree(block.attend(x, start)[0], whole, FLOAT64)
    state, outputs = start, []
    for x_t in x.unbind(dim=1):
        y_t, state = block.step(x_t, state)
        assert not y_t.requires_grad
        outputs.append(y_t)
    assert_agree(torch.stack(outputs, dim=1), whole, FLOAT64)
    for held in (start, state, block.attend(x, None)[1], block.attend(x[:, 9:], block.attend(x[:, :9], start)[1])[1]):
        assert measure_state_bytes(held) == block.state_bytes(3, 20, torch.float64)


@loop_over("attention", list_mixers())
def test_a_state_holds_no_view_of_the_projections(build_config: BuildConfig, attention: str) -> None:
    """Queries, keys and values are views of one tensor. A view in a state would keep the whole tensor in memory."""
    block = build_block(build_config(attention))
    for batch in (1, 3):
        with torch.no_grad():
            _, state = block.attend(draw(batch, 20, 16), None)
        storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in state_tensors(state)}
        assert sum(storages.values()) == block.state_bytes(batch, 20, torch.float64)


class ShowAttention(SoftmaxAttention):
    """Records its inputs and returns the values times the sum of the extra scalars."""

    shared_query_key = True
    extra_per_head = 2
    given: list[Any]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: Any = None, extra: Tensor | None = None) -> Any:
        self.given = [q, k, v, extra]
        return v * extra.sum(dim=-1, keepdim=True), state

    def step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: Any, extra_t: Tensor | None = None) -> Any:
        self.given = [q_t, k_t, v_t, extra_t]
        return v_t * extra_t.sum(dim=-1, keepdim=True), state


def test_extra_scalars_and_shared_keys_are_projected_as_declared(build_config, monkeypatch) -> None:
    monkeypatch.setitem(CATALOGUE, "softmax", ShowAttention)
    torch.manual_seed(1)
    layer = build_attention_layer(build_config("softmax", heads=3, width=16, head_width=6, layers=6)).double()
    inner = layer.inner
    assert inner.shape.layer == 5
    assert (inner.shape.positions, inner.shape.row) == (20, 5)
    assert layer.input.out_features == 3 * (6 + 6 + 2)
    x = draw(2, 7, 16)
    y, _ = layer.attend(x, None)
    q, k, v, extra = inner.given
    assert torch.equal(q, k)
    assert k.shape == v.shape == (2, 3, 7, 6)
    assert extra.shape == (2, 3, 7, 2)
    # Compute keys, values and extra scalars of head 1 directly from the rows of the projection.
    for found, rows in ((k, slice(6, 12)), (v, slice(18 + 6, 18 + 12)), (extra, slice(36 + 2, 36 + 4))):
        expected = x @ layer.input.weight[rows].T + layer.input.bias[rows]
        assert_agree(found[:, 1], expected, FLOAT64)
    y_t, _ = layer.step(x[:, 3], None)
    assert [part.shape for part in inner.given] == [(2, 3, 6), (2, 3, 6), (2, 3, 6), (2, 3, 2)]
    assert_agree(y_t, y[:, 3], FLOAT64)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_dropout_acts_on_both_branches_and_only_in_training(build_config: BuildConfig, norm: str) -> None:
    x = draw(2, 15, 16)
    block = build_block(build_config(norm=norm, dropout=0.5))
    plain = build_block(build_config(norm=norm))
    assert torch.equal(block.attend(x, None)[0], plain.attend(x, None)[0])
    block.train()
    for silent in (block.attention.output, block.feed_forward.output):
        # With one branch set to zero, two passes can differ only by dropout in the other branch.
        kept = {name: value.clone() for name, value in silent.state_dict().items()}
        nn.init.zeros_(silent.weight)
        nn.init.zeros_(silent.bias)
        torch.manual_seed(5)
        first, second = block.attend(x, None)[0], block.attend(x, None)[0]
        assert (first - second).abs().max() > 1e-3
        silent.load_state_dict(kept)
    assert_the_residual_stream_is_kept(block, x)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_boom_sums_the_chunks_of_its_hidden_vector(build_config: BuildConfig, activation: str) -> None:
    config = build_config(feed_forward_kind="boom", feed_forward=48, activation=activation)
    block, x = build_block(config), draw(2, 15, 16)
    layer = block.feed_forward
    chunks = zip(layer.input.weight.split(16), layer.input.bias.split(16), strict=True)
    expected = sum(getattr(functional, activation)(x @ weight.T + bias) for weight, bias in chunks)
    assert_agree(layer(x), expected, FLOAT64)
    assert [name for name, _ in layer.named_parameters()] == ["input.weight", "input.bias"]
    for end in block.branch_ends():
        nn.init.zeros_(end.weight)
        nn.init.zeros_(end.bias)
    assert torch.equal(block.attend(x, None)[0], x)


# The gated block.


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_gated_block_matches_its_formula(build_config: BuildConfig, norm: str) -> None:
    block = build_block(build_config("gau", norm=norm))
    x = draw(2, 15, 16)
    normed = block.norm(x) if norm == "pre" else x
    u, v, z = functional.silu(normed @ block.input.weight.T + block.input.bias).split([32, 32, 6], dim=-1)
    query, key = (z * part.scale + part.offset for part in (block.attention.query, block.attention.key))
    distances = torch.arange(15).unsqueeze(1) - torch.arange(15)
    scores = query @ key.transpose(1, 2) / 20 + block.attention.bias[distances.clamp(min=0)]
    weights = scores.clamp(min=0).square().tril()
    y = x + (u * (weights @ v)) @ block.output.weight.T + block.output.bias
    assert_agree(block.attend(x, None)[0], y if norm == "pre" else block.norm(y), FLOAT64)


@loop_over("attention", ["gau", "flash", "lstm", "none"])
@loop_over("norm", ["pre", "post"])
def test_dropout_acts_on_the_only_branch(build_config: BuildConfig, attention: str, norm: str) -> None:
    block, x = build_block(build_config(attention, norm=norm, dropout=0.5)), draw(2, 15, 16)
    plain = build_block(build_config(attention, norm=norm))
    assert torch.equal(block.attend(x, None)[0], plain.attend(x, None)[0])
    block.train()
    assert (block.attend(x, None)[0] - block.attend(x, None)[0]).abs().max() > 1e-3
    assert_the_residual_stream_is_kept(block, x)


def assert_the_residual_stream_is_kept(block: Block, x: Tensor) -> None:
    """With all branches set to zero, dropout changes nothing."""
    for end in block.branch_ends():
        nn.init.zeros_(end.weight)
        nn.init.zeros_(end.bias)
    assert torch.equal(block.attend(x, None)[0], block.attend(x, None)[0])


@needs_library
@pytest.mark.parametrize(("attention", "dtype"), [("linear", torch.bfloat16), ("single_head", torch.float32)])
def test_products_read_the_rounded_copies_of_norms(build_config: BuildConfig, attention: str, dtype) -> None:
    """The mechanism of `single_head` has its block's input as keys and values, and its output is float32."""
    x: Vectors = draw(2, 15, 16).float()
    found = []
    with torch.autocast("cpu", torch.bfloat16):
        for block in build_blocks(build_config(attention, layers=2, norm="post")):
            for linear in (block.attention.input, block.feed_forward.input):
                linear.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].dtype))
            x, _ = block.attend(x, None)
    assert found == [torch.float32, dtype, dtype, dtype]  # no norm comes before the first
    assert isinstance(x, Rounded)


# The baselines.


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_none_is_a_transformer_block_whose_attention_adds_nothing(build_config: BuildConfig, norm: str) -> None:
    block, other = (build_block(build_config(name, norm=norm)) for name in ("none", "softmax"))
    block.load_state_dict(other.state_dict(), strict=False)
    nn.init.zeros_(other.attention.output.weight)
    nn.init.zeros_(other.attention.output.bias)
    x = draw(2, 15, 16)
    # With `post` norm, the norm after the attention branch remains.
    expected, _ = other.attend(x, None)
    assert_agree(block.attend(x if norm == "pre" else other.attention_norm(x), None)[0], expected, FLOAT64)


def test_an_lstm_uses_float32_for_sequences(build_config: BuildConfig, monkeypatch) -> None:
    """Only GPUs can round float32 products to TF32. On other machines, the test checks only the setting."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    block, found = build_block(build_config("lstm")), []
    block.lstm.register_forward_hook(lambda *_: found.append(torch.backends.cudnn.allow_tf32))
    block.attend(draw(1, 3, 16), None)
    assert found == [False]
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_an_lstm_block_equals_torchs_cell_between_norm_and_projection(build_config: BuildConfig, norm: str) -> None:
    block = build_block(build_config("lstm", norm=norm))
    cell = nn.LSTMCell(16, block.hidden).double()
    cell.load_state_dict({key.removesuffix("_l0"): value for key, value in block.lstm.state_dict().items()})
    x, memory = draw(2, 15, 16), None
    found, _ = block.attend(x, None)
    for place in range(15):
        x_t = x[:, place]
        memory = cell(block.norm(x_t) if norm == "pre" else x_t, memory)
        y_t = x_t + block.output(memory[0])
        assert_agree(found[:, place], y_t if norm == "pre" else block.norm(y_t), FLOAT64)


@loop_over("kind", ["dense", "boom"])
@loop_over("preset", ["tiny", "mnist-small", "mnist-paper"])
def test_an_lstm_block_has_about_as_many_parameters_as_a_transformer_block(preset: str, kind: str) -> None:
    image = ImageShape(height=28, width=28)
    changes = {"attention": "softmax", "feed_forward_kind": kind}
    config = ModelConfig(**{**PRESETS[preset].model_dump(), **changes}, image=image)
    wanted = count_parameters(build_first(config))
    found = build_first(config.model_copy(update={"attention": "lstm"}))
    distance = abs(count_parameters(found) - wanted)
    assert distance < 0.03 * wanted
    for hidden in (found.hidden - 1, found.hidden + 1):
        other = config.model_copy(update={"attention": "lstm", "attention_options": {"hidden": hidden}})
        assert distance <= abs(count_parameters(build_first(other)) - wanted)


def test_the_forget_gate_of_an_lstm_starts_open(build_config: BuildConfig) -> None:
    block = build_first(build_config("lstm", attention_options={"hidden": 9}))
    _, _, first, second = block.lstm.all_weights[0]
    assert (first + second).tolist() == [0.0] * 9 + [1.0] * 9 + [0.0] * 18


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_state_of_an_lstm_has_the_type_of_its_weights(build_config: BuildConfig, dtype: torch.dtype) -> None:
    block, x = build_block(build_config("lstm")).to(dtype), draw(2, 15, 16).to(dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        _, state = block.attend(x, None)
        _, state = block.attend(x[:, :3].bfloat16() if dtype == torch.float32 else x[:, :3], state)
        y_t, state = block.step(x[:, 0], state)
    assert isinstance(state, LstmState)
    assert {tensor.dtype for tensor in state} == {dtype}
    assert bool(torch.isfinite(y_t).all())
