"""Tests of 8-bit integer products: sums are exact, and every instruction set gives the same bits."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from loops import first_fast, loop_over
from machine import needs_library
from numpy.typing import NDArray
from sampling.cases import CHANGES, LAYER_PARTS, draw_tokens, open_runner, step_native
from sampling.test_native_mechanisms import VARIANTS, every_model, every_variant
from torch import Tensor

from linformer_cli.checkpoint import load_weights, read_checkpoint
from linformer_cli.checkpoint_files import shipped_checkpoints
from linformer_cli.config import ImageShape
from linformer_cli.data.sequence import values_to_images
from linformer_cli.evaluation.bits import measure_nats, stepped_nats
from linformer_cli.model.compile_step import compile_step
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.native.build import PACKAGE, this_machine
from linformer_cli.native.constants import FORMATS
from linformer_cli.native.program import Builder
from linformer_cli.sampling.decode import Sampler
from linformer_cli.sampling.engines import NATIVE, EngineCache
from linformer_cli.sampling.engines.native import NativeEngine

pytestmark = needs_library

# Every set multiplies in a different way. These sets are compared with the set that is used by default.
every_other = pytest.mark.parametrize(
    "instruction_set", [one.name for one in this_machine().instruction_sets[:-1]], indirect=True
)


def multiply(
    weight: Tensor, bias: Tensor, x: Tensor, activation: str = "none", sensitive: bool = False
) -> NDArray[np.float32]:
    """Return the native engine's products [N, rows] of weight [rows, columns] and x [N, columns], plus the bias."""
    builder = Builder(torch.int8, x.shape[1])
    output = builder.project_by(weight, bias, builder.x, "output", activation, sensitive)
    runner = open_runner(builder, output, len(x))
    runner.view(builder.x, len(x), torch.float32).copy_(x)
    runner.call("read", torch.zeros(len(x), dtype=torch.int64))
    return runner.view(output, len(x), torch.float32)[:, : len(weight)].numpy()


def quantise(rows: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    most = np.abs(rows).max(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(np.rint(rows * (np.float32(127) / most)[:, None])).astype(np.int64), most / np.float32(127)


def expected_products(weight: Tensor, bias: Tensor, x: Tensor) -> NDArray[np.float32]:
    """Compute the products of `multiply` with numpy's integer arithmetic."""
    (w, w_scales), (inputs, scales) = quantise(weight.numpy()), quantise(x.numpy())
    return (inputs @ w.T).astype(np.float32) * (scales[:, None] * w_scales) + bias.numpy()


@pytest.mark.smoke
@loop_over("columns", [1, 3, 4, 5, 31, 64, 257])
@loop_over("rows", [1, 63, 65, 130])
def test_products_equal_integer_products(instruction_set, columns, rows) -> None:
    generator = torch.Generator().manual_seed(rows)
    for batch in (1, 2, 3, 4, 5, 6, 7, 13):
        weight, bias = torch.randn(rows, columns, generator=generator), torch.randn(rows, generator=generator)
        # The weights are multiples of 1/127 of the largest, so that the oracle rounds them in the same way.
        weight = (weight * 50).round().clamp(-126, 126)
        weight[:, 0] = 127
        x = torch.randn(batch, columns, generator=generator) * torch.logspace(-18, 18, batch).unsqueeze(1)
        np.testing.assert_array_equal(multiply(weight, bias, x), expected_products(weight, bias, x))


def test_the_largest_sums_do_not_saturate(instruction_set) -> None:
    signs = torch.tensor([[1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, -1.0, -1.0], [1.0, -1.0, -1.0, 1.0]]).repeat(1, 300)
    bias = torch.zeros(3)
    assert multiply(signs, bias, signs).diagonal().tolist() == pytest.approx([1200] * 3)
    np.testing.assert_array_equal(multiply(signs, bias, signs), expected_products(signs, bias, signs))


def test_inputs_are_rounded_to_the_nearest_integer_and_ties_to_even(instruction_set) -> None:
    x = torch.tensor([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.4999, 126.5, -127]])
    rounded = [127, 0, 2, 2, 0, -2, -2, 0, 126, -127]
    assert multiply(torch.eye(10), torch.zeros(10), x)[0].tolist() == pytest.approx(rounded)


def test_zeros_give_the_bias_and_infinite_inputs_give_nan(instruction_set) -> None:
    """A vector of zeros gives the bias. A vector with NaN or infinity gives NaN."""
    x = torch.zeros(5, 9)
    x[1, 4], x[2, 8], x[3, 0], x[4, 2] = torch.nan, torch.inf, -torch.inf, 1e-40
    weight, bias = torch.ones(3, 9), torch.tensor([0.5, -2.0, 0.0])
    found = multiply(weight, bias, x)
    assert np.isnan(found[1:4]).all()
    assert found[0].tolist() == found[4].tolist() == bias.tolist()
    weight[1, 3] = torch.nan
    weight[2] = 0
    assert np.isnan(multiply(weight, bias, x + 1)[0]).tolist() == [False, True, False]


@loop_over("columns", [1, 5, 96])
@loop_over("rows", [30, 65])
def test_sensitive_products_are_float32_sums_in_a_fixed_order(instruction_set, columns, rows) -> None:
    generator = torch.Generator().manual_seed(rows)
    for batch in (1, 2, 7, 13):
        weight, bias = torch.randn(rows, columns, generator=generator), torch.randn(rows, generator=generator)
        x = torch.randn(batch, columns, generator=generator)
        expected = np.zeros((batch, rows), np.float32)
        for i in range(columns):  # numpy rounds the product, then the sum
            expected += weight[:, i].numpy() * x[:, i : i + 1].numpy()
        np.testing.assert_array_equal(multiply(weight, bias, x, sensitive=True), expected + bias.numpy())


def test_products_of_differences_and_of_a_mixture_head_are_sensitive(build_tiny_model) -> None:
    model = build_tiny_model(**CHANGES["pixels"], head="mixture")
    operations = compile_step(model, products=torch.int8).operations
    columns = [one.integers[0] for one in operations if one.name == "project" and one.integers[3] == FORMATS["exact"]]
    inputs = (model.embedding.surroundings.input, model.channels.numbers, model.head.projection)
    assert columns == [linear.in_features for linear in inputs]


def test_the_engine_uses_no_elementary_functions_of_the_c_library() -> None:
    """The functions of the C library differ between machines; `maths.h` has replacements."""
    folder = PACKAGE / "native"
    for file in (*folder.glob("*.h"), folder / "runner.cpp", *(folder / "ops").glob("*.h")):
        code = re.sub("//.*", "", file.read_text())
        assert not re.findall(r"\b(?:exp2?|expm1|log|log2|log1p|pow|cbrt|sin|cos|tan|tanh|erf)f?\(", code), file


@pytest.fixture
def build(build_tiny_model: Callable[..., PixelModel]) -> Callable[..., PixelModel]:
    """Provides tiny models of a mechanism's variant, with odd widths and a sequence of 60 positions."""

    def build_variant(variant: str, **changes: object) -> PixelModel:
        attention, options = VARIANTS.get(variant, ("linear", {}))
        image = ImageShape(height=6, width=10, levels=16)
        changes = {"attention": attention, "attention_options": options} | LAYER_PARTS.get(variant, {}) | changes
        model = build_tiny_model(image=image, **changes)
        reason = NativeEngine.refusal(model, torch.int8)
        if reason is not None:
            pytest.skip(reason)
        return model

    return build_variant


def step_through(model: PixelModel, batch: int, threads: int = 1) -> Tensor:
    """Return the head's parameters [batch, 60, P] of the first images, computed in int8."""
    return step_native(model, draw_tokens(model, batch), threads, products=torch.int8)


@every_other
@every_model
def test_every_instruction_set_computes_the_same_bits(build, instruction_set, variant, monkeypatch) -> None:
    model = build(variant)
    found = step_through(model, 3)
    monkeypatch.undo()
    expected = step_through(model, 3)
    assert found.isfinite().all() and torch.equal(found, expected)


@every_other
@pytest.mark.parametrize(
    "changes",
    [{}, {"head": "mixture"}, {"activation": "relu", "norm": "post"}, CHANGES["pixels, the paper's embedding"]],
    ids=str,
)
@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_every_instruction_set_draws_the_same_images(
    build_tiny_model, instruction_set, attention, changes, monkeypatch
) -> None:
    """The images are drawn in several batch sizes. Single images are drawn with look-ahead."""
    model = build_tiny_model(attention=attention, **{"context": "wide", **changes})

    def draw(batch: int) -> NDArray[np.uint8]:
        return Sampler(model, 5, engine=NATIVE, products=torch.int8).sample_images(7, batch)

    found = [draw(batch) for batch in (1, 3, 7)]
    monkeypatch.undo()
    expected = draw(7)
    assert len(np.unique(expected)) > 5
    for images in found:
        np.testing.assert_array_equal(images, expected)


@pytest.mark.smoke
@every_variant
def test_results_have_the_same_bits_for_any_batch_and_threads(build, variant) -> None:
    model = build(variant)
    expected = step_through(model, 7)
    for batch, threads in ((1, 1), (1, 3), (3, 1), (7, 3)):
        assert torch.equal(step_through(model, batch, threads), expected[:batch])


@pytest.mark.parametrize("name", first_fast(sorted(shipped_checkpoints(), reverse=True)))
def test_int8_hardly_changes_the_bits_per_dim_of_a_shipped_model(name) -> None:
    """The images are drawn by the model itself; their bits/dim are typical of its data."""
    model = load_weights(read_checkpoint(name))
    values = Sampler(model, engine=NATIVE).sample(range(2)).values
    images = values_to_images(values, model.config.image)
    found = [
        measure_nats(model, images, nats=lambda *given, engines=engines: stepped_nats(engines, *given))
        for engines in (EngineCache(NATIVE, model, products=products) for products in (torch.int8, None))
    ]
    difference, _ = found[0].measure_difference(found[1])
    assert 0 < abs(difference) < 0.002
