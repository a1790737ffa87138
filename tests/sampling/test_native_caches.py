"""Tests the caches of programs with bfloat16 or int8 products: keys and values are stored as bfloat16."""

from collections.abc import Callable

import pytest
import torch
from attention.inputs import mark_variants
from loops import loop_over
from machine import needs_library
from sampling.cases import open_runner
from sampling.test_native_mechanisms import POSITIONS, VARIANTS, every_variant
from torch import Tensor
from torch.nn import functional

from linformer_cli.attention.base import Attention, AttentionShape
from linformer_cli.attention.catalogue import find_attention, fit_attention
from linformer_cli.config import ImageShape
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.native.program import Builder, MixInputs
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.sampling.engines.native import NativeEngine

pytestmark = needs_library

# The mechanisms that keep keys and values for later positions.
WITH_CACHE = (
    *("bigbird", "flash", "gau", "linformer", "logsparse", "long_short", "longformer", "lsh", "probsparse"),
    *("single_head", "softmax", "sparse"),
)
CACHED = {key: variant for key, variant in VARIANTS.items() if variant[0] in WITH_CACHE}
every_cached = pytest.mark.parametrize(
    "variant", mark_variants({key: key for key in CACHED}, lambda key: CACHED[key][0])
)
every_rounded = loop_over("products", [torch.bfloat16, torch.int8])


def build_attention(variant: str, key_width: int = 20) -> Attention:
    """Return a mechanism for two heads and 70 positions, with parameters that all differ."""
    name, options = VARIANTS[variant]
    shape = AttentionShape(2, key_width, 20, POSITIONS, 10)
    torch.manual_seed(5)
    attention = fit_attention(name, find_attention(name).options_type(**options), shape, 40)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return attention


class Step:
    """The program of an attention mechanism alone; its inputs are q, k, v and extra, side by side."""

    def __init__(self, attention: Attention, products: torch.dtype, batch: int) -> None:
        shape = attention.shape
        heads, key_width, value_width = shape.heads_and_widths
        sizes = [heads * key_width, heads * key_width, heads * value_width, heads * attention.extra_per_head]
        if attention.shared_query_key:
            sizes[0] = 0
        columns = tuple(sum(sizes[:n]) for n in range(4))
        builder = Builder(products, sum(sizes))
        self.batch, self.width = batch, sum(sizes)
        output = builder.scratch("output", heads * value_width)
        attention.emit(MixInputs(builder, builder.x, output, (columns[0], *columns[1:]), shape.heads_and_widths))
        self.runner = open_runner(builder, output, batch, POSITIONS)
        self.input, self.output = (self.runner.view(n, batch, torch.float32) for n in (builder.x, output))

    def __call__(self, inputs: Tensor) -> Tensor:
        self.input.copy_(inputs)
        self.runner.call("read", torch.zeros(self.batch, dtype=torch.int64))
        return self.output.clone()


def draw_inputs(step: Step, batch: int) -> Tensor:
    """Return the inputs [T, batch, width] of all positions."""
    return torch.randn(POSITIONS, batch, step.width, generator=torch.Generator().manual_seed(8))


@every_cached
@every_rounded
def test_a_cache_in_bfloat16_gives_nearly_the_same_outputs(variant: str, products: torch.dtype) -> None:
    attention = build_attention(variant)
    steps = [Step(attention, dtype, 2) for dtype in (products, torch.float32)]
    found, expected = (torch.stack([step(inputs) for inputs in draw_inputs(step, 2)]) for step in steps)
    error = float((found - expected).abs().max() / expected.abs().max())
    assert 0 < error < 0.02


@every_rounded
@pytest.mark.parametrize("key_width", [16, 20])
def test_softmax_reads_keys_and_values_rounded_to_the_nearest(products: torch.dtype, key_width: int) -> None:
    step = Step(build_attention("softmax", key_width), products, 3)
    inputs = draw_inputs(step, 3)
    found = torch.stack([step(now) for now in inputs])
    q, k, v = inputs.split([2 * key_width, 2 * key_width, 40], dim=2)
    q, keys, values = (part.unflatten(2, (2, -1)).permute(1, 2, 0, 3) for part in (q, k, v))
    y = functional.scaled_dot_product_attention(q, keys.bfloat16().float(), values.bfloat16().float(), is_causal=True)
    torch.testing.assert_close(found, y.permute(2, 0, 1, 3).flatten(2), rtol=0, atol=1e-5)


@loop_over("variant", ["gau-length-relu2", "gau-width-laplace", "gau-odd-width"])
@every_rounded
def test_gau_reads_keys_and_values_rounded_to_the_nearest(variant: str, products: torch.dtype) -> None:
    """The oracle is the mechanism's own step, with a state in bfloat16."""
    attention = build_attention(variant)
    step = Step(attention, products, 3)
    state = attention.init_state(3, POSITIONS, torch.device("cpu"), torch.bfloat16)
    key_width = attention.shape.key_width
    for inputs in draw_inputs(step, 3):
        z, v = inputs.unsqueeze(1).split([key_width, attention.shape.value_width], dim=2)
        expected, state = attention.step(z, z, v, state)
        torch.testing.assert_close(step(inputs), expected.squeeze(1), rtol=0, atol=1e-5)


@every_rounded
def test_caches_keep_every_nan(products: torch.dtype) -> None:
    """Rounding adds to the bits of a number; the sum of these NaNs' bits would be 0 or -0."""
    for bits in (0x7FFFFFFF, -1):
        step = Step(build_attention("softmax"), products, 2)
        inputs = draw_inputs(step, 2)[:3]
        assert step(inputs[0]).isfinite().all()
        inputs[1, 0, 80] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)  # the first value of head 0
        for position in (1, 2):
            found = step(inputs[position])
            assert found[0, 0].isnan() and found[0, 1:].isfinite().all() and found[1].isfinite().all()


@pytest.fixture
def build(build_tiny_model: Callable[..., PixelModel]) -> Callable[[str], PixelModel]:
    """Provides tiny models of a variant, with rows of 10 pixels."""

    def build_variant(variant: str) -> PixelModel:
        attention, options = VARIANTS[variant]
        image = ImageShape(height=POSITIONS // 10, width=10, levels=16)
        return build_tiny_model(attention=attention, attention_options=options, image=image, head_width=20)

    return build_variant


@every_variant
def test_only_caches_are_bfloat16(build, variant: str) -> None:
    """The reported bytes of the state are those of its memory."""
    model = build(variant)
    whole = NativeEngine(model, 2)
    assert all(state.dtype != torch.bfloat16 for state in whole.states)
    engine = NativeEngine(model, 2, products=torch.int8)
    count = sum(state.dtype == torch.bfloat16 for state in engine.states)
    each = 1 if variant == "single_head" else 2  # the keys of single_head are its values
    assert count == (each * len(model.blocks) if variant in CACHED else 0)
    assert engine.state_bytes == sum(state.nbytes for state in engine.states) + torch.int64.itemsize
    assert (engine.state_bytes < whole.state_bytes) == (variant in CACHED)


@every_cached
def test_looking_ahead_gives_the_same_image_and_state(build, variant: str) -> None:
    """Positions of one look-ahead pass see each other's keys and values, which must be rounded as in a cache."""
    model = build(variant)
    with torch.no_grad():
        model.head.projection.weight *= 6  # so confident that many guesses are right, but not all
    passes = 0
    for index in range(3):
        results = []
        for look_ahead in (True, False):
            engine = NativeEngine(model, 1, look_ahead=look_ahead, products=torch.int8)
            parameters = engine.step(model.start_tokens(1)).clone()
            values = engine.draw_values(parameters, UniformStreams(3, [index]), Filters(), POSITIONS)
            # The ring of recent values, int16, also holds guesses.
            results.append([values, *(state for state in engine.states if state.dtype != torch.int16)])
            passes += engine.look_aheads
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert 0 < passes < 3 * (POSITIONS - 1), "no guess was right"


def test_a_prefix_is_rounded_to_the_nearest(build) -> None:
    model = build("softmax")
    with torch.no_grad():
        state = model.attend(model.start_tokens(2)[:, None].expand(2, 5))[1]
    engine = NativeEngine(model, 2, state, products=torch.int8)
    keys = next(state for state in engine.states if state.dtype == torch.bfloat16)
    expected = state.layers[0].keys.bfloat16()
    assert torch.equal(keys.unflatten(1, (2, POSITIONS, 20))[:, :, :5], expected)
