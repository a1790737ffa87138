"""Tests of the optional parts of attention layers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import loop_over
from tolerances import FLOAT64, assert_agree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from linformer_cli.attention.base import measure_state_bytes, state_tensors
from linformer_cli.attention.catalogue import CATALOGUE
from linformer_cli.config import NetworkConfig
from linformer_cli.documents import parse_config
from linformer_cli.errors import UsageError
from linformer_cli.model.attention_layer import AttentionLayer
from linformer_cli.model.mixers import build_blocks, default_state_bytes
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.native.library import reference_only

ALL = {"short_convolution": 4, "normalise_keys": True, "norm_heads": True, "output_gate": True}
PARTS = {
    "convolution": {"short_convolution": 3},
    "keys": {"normalise_keys": True},
    "heads": {"norm_heads": True},
    "gate": {"output_gate": True},
    "all": ALL,
}
# No mechanism here has an output gate of its own. `lsh` shares queries and keys.
MECHANISMS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "linear": {"chunk": 7},
    "deltanet": {"chunk": 7},
    "gla": {"chunk": 8, "output_gate": False},
    "lsh": {"rounds": 1, "buckets": 2, "window": 30},
    "performer": {"features": 16},
    "long_short": {"window": 7, "chunk": 5, "rank": 1},
}
BuildModel = Callable[..., PixelModel]


def build_layer(build_model: BuildModel, attention: str, **changes: Any) -> AttentionLayer:
    model = build_model(attention=attention, attention_options=MECHANISMS[attention], layers=1, **changes)
    (block,) = model.typed_blocks
    return block.attention


def has_parts(layer: AttentionLayer) -> bool:
    kept = layer.convolution is not None, layer.norm_weight is not None
    return any((*kept, layer.normalise_keys, layer.widths[3] > 0))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@loop_over("attention", MECHANISMS)
@loop_over("parts", PARTS)
def test_steps_and_blocks_agree_however_a_sequence_is_cut(build_model, attention: str, parts: str) -> None:
    layer, x = build_layer(build_model, attention, **PARTS[parts]), draw(3, 20, 16)
    assert has_parts(layer)
    whole, end = layer.attend(x, None)
    for cut in (1, 2, 9):
        first, state = layer.attend(x[:, :cut], None)
        second, after = layer.attend(x[:, cut:], state)
        assert_agree(torch.cat([first, second], dim=1), whole, FLOAT64)
    state, outputs = layer.init_state(3, 20, x.device, x.dtype), []
    for x_t in x.unbind(dim=1):
        with torch.no_grad():
            y_t, state = layer.step(x_t, state)
        outputs.append(y_t)
    assert_agree(torch.stack(outputs, dim=1), whole, FLOAT64)
    size = measure_state_bytes(layer.init_state(3, 20, torch.device("meta"), torch.float64))
    assert {measure_state_bytes(held) for held in (end, after, state)} == {size}
    # Outside training, a state holds no view of the projections.
    with torch.no_grad():
        _, end = layer.attend(x, None)
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in state_tensors(end)}
    assert sum(storages.values()) == size


@pytest.mark.parametrize("attention", ["softmax", "deltanet", "performer"])
def test_no_output_depends_on_a_later_input(build_model, attention: str) -> None:
    layer, x = build_layer(build_model, attention, **ALL), draw(2, 12, 16).requires_grad_()
    y, _ = layer.attend(x, None)
    for t in (0, 5, 11):
        (gradient,) = torch.autograd.grad(y[:, t].sum(), x, retain_graph=True)
        assert (gradient[:, t + 1 :] == 0).all()
        assert (gradient[:, max(0, t - 3) : t + 1].abs().amax(dim=(0, 2)) > 0).all()


@loop_over("attention", ["linear", "softmax", "lsh"])
@loop_over("parts", [{}, {"output_gate": True}, {"short_convolution": 3}])
def test_gradients_of_the_projection_are_joined_in_order(build_model, attention: str, parts: dict[str, Any]) -> None:
    layer, x = build_layer(build_model, attention, **parts), draw(2, 12, 16)
    of_y = draw(2, 12, 16).flip(1)
    with reference_only():
        expected = torch.autograd.grad(layer.attend(x, None)[0], layer.input.weight, of_y)[0]
    start = layer.input.weight.detach().clone()
    difference, step = draw(*start.shape), 1e-5
    sums = []
    for sign in (1, -1):
        layer.input.weight.data = start + sign * step * difference
        sums.append((layer.attend(x, None)[0] * of_y).sum().detach())
    layer.input.weight.data = start
    found = torch.autograd.grad(layer.attend(x, None)[0], layer.input.weight, of_y)[0]
    assert_agree(found, expected, FLOAT64)
    assert_agree((found * difference).sum(), (sums[0] - sums[1]) / (2 * step), 1e-6)


def test_a_state_passes_on_gradients(build_model) -> None:
    layer, x = build_layer(build_model, "linear", **ALL), draw(2, 12, 16).requires_grad_()
    whole = torch.autograd.grad(layer.attend(x, None)[0][:, 7:].square().sum(), x)
    _, state = layer.attend(x[:, :7], None)
    cut = torch.autograd.grad(layer.attend(x[:, 7:], state)[0].square().sum(), x)
    assert_agree(cut[0], whole[0], FLOAT64)


@pytest.mark.parametrize("attention", ["linear", "deltanet"])
def test_the_convolution_equals_its_definition(build_model, attention: str) -> None:
    layer, x = build_layer(build_model, attention, short_convolution=3), draw(2, 9, 16)
    weight, projected = layer.convolution.weight, x @ layer.input.weight.T + layer.input.bias
    inputs, recent = layer.project(x)
    for name, found in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
        rows = layer.input_rows[name]
        for t in range(9):
            expected = torch.zeros(2, 12, dtype=torch.float64)
            for back in range(min(t, 2) + 1):
                expected += weight[2 - back, rows] * projected[:, t - back, rows]
            assert_agree(found[:, t].flatten(1), expected, FLOAT64)
    assert_agree(recent, projected[:, -2:, :36], FLOAT64)
    if attention == "deltanet":
        assert_agree(inputs.extra.flatten(2), projected[..., 36:], FLOAT64)


def test_keys_heads_and_gate_equal_their_definitions(build_model) -> None:
    parts = {"normalise_keys": True, "norm_heads": True, "output_gate": True}
    layer, x = build_layer(build_model, "softmax", **parts), draw(2, 9, 16)
    q, k, v, gate = (x @ layer.input.weight.T + layer.input.bias).split(12, dim=-1)
    q, k, v = (part.unflatten(-1, (2, 6)).transpose(1, 2) for part in (q, k, v))
    q, k = (part / (part.norm(dim=-1, keepdim=True).square() + 1e-6).sqrt() for part in (q, k))
    scores = (q @ k.transpose(-1, -2) / 6**0.5).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    y = (scores.softmax(dim=-1) @ v).transpose(1, 2)
    y = (y / (y.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * layer.norm_weight).flatten(2)
    y = y * gate * gate.sigmoid()
    assert_agree(layer.attend(x, None)[0], y @ layer.output.weight.T + layer.output.bias, FLOAT64)


def test_vectors_of_zeros_have_finite_gradients(build_model) -> None:
    layer = build_layer(build_model, "linear", **ALL)
    for parameter in (layer.input.weight, layer.input.bias):
        parameter.data.zero_()
    y, _ = layer.attend(draw(2, 5, 16), None)
    y.sum().backward()
    assert bool(y.isfinite().all())
    assert all(bool(parameter.grad.isfinite().all()) for parameter in layer.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("attention", ["gau", "flash", "single_head", "lstm"])
def test_blocks_without_an_attention_layer_refuse_parts(raises_one_line, build_config, attention: str) -> None:
    config = build_config(attention, short_convolution=4, norm_heads=True)
    with raises_one_line(UsageError, f"'{attention}'", "drop short_convolution and norm_heads"):
        build_blocks(config)


@loop_over("attention", [name for name, kind in CATALOGUE.items() if not kind.gated and not kind.shared_key_value])
def test_every_other_mechanism_takes_all_parts_except_a_second_output_gate(raises_one_line, build_config, attention):
    config = build_config(attention, **ALL)
    if "output_gate" in CATALOGUE[attention].options_type.model_fields:
        with raises_one_line(UsageError, f"'{attention}' has its own output gate", "output_gate=false"):
            build_blocks(config)
        config = config.model_copy(update={"attention_options": {"output_gate": False}})
    assert all(has_parts(block.attention) for block in build_blocks(config))  # type: ignore[attr-defined]


def test_a_convolution_of_width_1_is_refused(raises_one_line) -> None:
    with raises_one_line(UsageError, "short_convolution must be 0 (none) or at least 2, found 1"):
        parse_config(NetworkConfig, {"short_convolution": 1}, "model")


def test_listed_state_bytes_count_the_convolution(build_config) -> None:
    config = build_config("linear", short_convolution=4)
    (block, *_) = build_blocks(config)
    shape = block.inner.shape
    found = default_state_bytes("linear", config, shape)
    assert found == block.state_bytes(1, shape.positions, torch.float32)
    plain = default_state_bytes("linear", config.model_copy(update={"short_convolution": 0}), shape)
    assert found - plain == 3 * 3 * 12 * 4
    for other in ("gau", "single_head"):
        assert default_state_bytes(other, config, shape) > 0


def test_on_a_gpu_every_image_of_a_projection_starts_at_a_multiple_of_16_bytes(build_model) -> None:
    """torch's fused softmax needs this. The tensors have a device and strides but no contents."""
    layer, fake = build_layer(build_model, "long_short", dtype=torch.float32), FakeTensorMode()
    assert layer.input.weight.shape[0] % 4 != 0
    with fake, torch.no_grad(), reference_only():
        for module in layer.modules():
            for tensors in (module._parameters, module._buffers):
                tensors.update({name: fake.from_tensor(x).to("cuda") for name, x in tensors.items() if x is not None})
        inputs, _ = layer.project(torch.empty(3, layer.input.weight.shape[1], device="cuda"))
    for part in inputs[:3]:
        assert part.stride(0) * part.element_size() % 16 == 0
