"""Tests the native engine's step for every mechanism and part of a layer: from any state, in any batch, ahead."""

import importlib
from collections.abc import Callable

import pytest
import torch
from attention.inputs import mark_variants
from loops import loop_over
from machine import needs_library
from sampling.cases import LAYER_PARTS, draw_tokens, step_native
from tolerances import assert_agree

from linformer_cli.attention.base import fork_state
from linformer_cli.attention.catalogue import CATALOGUE
from linformer_cli.config import ImageShape
from linformer_cli.model.mixers import BASELINES
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.sampling.engines.native import NativeEngine

pytestmark = needs_library

TOLERANCE = 1e-4
# This is more than the number of cache rows that `average_rows` (ops/parts/cache.h) takes at once.
POSITIONS, DRAWN = 70, 60
# The variants are the contract cases of every mechanism, and the baselines with their default options.
VARIANTS = {
    key: (case.attention, {option: value for option, value in case.options.items() if value is not None})
    for name in CATALOGUE
    for key, case in importlib.import_module(f"attention.cases.{name}").CASES.items()
} | {name: (name, {}) for name in BASELINES}
VARIANTS["deltanet-negative-ungated"] = ("deltanet", {"gate": False, "negative_eigenvalues": True})
# With these chunks, one look-ahead covers several chunks.
VARIANTS["flash-short-chunk"] = ("flash", {"chunk": 3, "z_width": 5})
VARIANTS["gau-odd-width"] = ("gau", {"z_width": 5})
VARIANTS["mamba-without-rotation"] = ("mamba", {"rotation": False, "rate": "head"})
# With so few iterations, the result depends on where they start.
VARIANTS["mesa-few-iterations"] = ("mesa", {"iterations": 3})
# With two buckets and this window, a query sees about half of all earlier positions.
VARIANTS["lsh-two-buckets"] = ("lsh", {"buckets": 2, "window": 100})
VARIANTS["lstm-odd-width"] = ("lstm", {"hidden": 7})
# In these variants, a step needs the output of the previous step, so the engine draws their values one by one.
WITHOUT_LOOKING_AHEAD = ("lstm", "lstm-odd-width")
every_variant = pytest.mark.parametrize(
    "variant", mark_variants({key: key for key in VARIANTS}, lambda key: VARIANTS[key][0])
)
every_model = pytest.mark.parametrize(
    "variant", [*mark_variants({key: key for key in VARIANTS}, lambda key: VARIANTS[key][0]), *LAYER_PARTS]
)


@pytest.fixture
def build(build_tiny_model: Callable[..., PixelModel]) -> Callable[..., PixelModel]:
    """Provides tiny models of a variant, with rows of 10 pixels and with parameters that all differ."""

    def build_variant(variant: str, **changes: object) -> PixelModel:
        attention, options = VARIANTS.get(variant, ("linear", {}))
        image = ImageShape(height=POSITIONS // 10, width=10, levels=16)
        # Each head has one vector of 16 lanes and a remainder.
        shared = {"attention": attention, "attention_options": options, "image": image, "head_width": 20}
        model = build_tiny_model(**shared | LAYER_PARTS.get(variant, {}) | changes)
        generator = torch.Generator().manual_seed(12)
        with torch.no_grad():
            for name, parameter in model.blocks.named_parameters():
                if parameter.dim() == 1 or "convolution" in name or "norm_weight" in name:
                    parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        assert NativeEngine.refusal(model) is None
        return model

    return build_variant


@pytest.mark.smoke
@every_model
@pytest.mark.parametrize(("known", "batch"), [(0, 1), (29, 3)])
def test_steps_match_the_parallel_form(build, variant: str, known: int, batch: int) -> None:
    """The steps begin at the start of an image or after a prefix that was read in parallel."""
    model = build(variant)
    tokens = draw_tokens(model, batch, POSITIONS)
    with torch.no_grad():
        state = fork_state(model.attend(tokens[:1, :known])[1], batch) if known else None
        expected, _ = model.attend(tokens[:, known:], None if state is None else fork_state(state))
    native = NativeEngine(model, batch, state, look_ahead=False)
    for token, parameters in zip(tokens[:, known:].unbind(dim=1), expected.unbind(dim=1), strict=True):
        assert_agree(native.step(token), parameters, TOLERANCE)


@every_variant
@loop_over("head_width", [3, 41])
def test_heads_may_have_any_width(build, variant: str, head_width: int) -> None:
    """The widths are not a whole number of vectors."""
    model = build(variant, head_width=head_width)
    tokens = draw_tokens(model, 2)[:, :25]
    native, expected = NativeEngine(model, 2), model.attend(tokens)[0].detach()
    for token, parameters in zip(tokens.unbind(dim=1), expected.unbind(dim=1), strict=True):
        assert_agree(native.step(token), parameters, TOLERANCE)


@every_model
def test_looking_ahead_draws_the_same_image(build, variant: str) -> None:
    model = build(variant)
    with torch.no_grad():
        model.head.projection.weight *= 6  # makes many guesses right, but not all
    passes = 0
    for index in range(3):
        values, last = [], []
        for look_ahead in (True, False):
            engine = NativeEngine(model, 1, look_ahead=look_ahead)
            parameters = engine.step(model.start_tokens(1)).clone()
            values.append(engine.draw_values(parameters, UniformStreams(3, [index]), Filters(), DRAWN))
            passes += engine.look_aheads
            last.append(engine.step(torch.tensor([3])).clone())
        assert torch.equal(*values) and torch.equal(*last)
        assert len(torch.unique(values[0])) > 1
    if variant in WITHOUT_LOOKING_AHEAD:
        assert passes == 0
    else:
        assert 0 < passes < 3 * (DRAWN - 1), "no guess was right"


@every_model
def test_outputs_have_the_same_bits_in_any_batch(build, variant: str) -> None:
    model = build(variant)
    tokens = draw_tokens(model, 7, POSITIONS)
    expected = step_native(model, tokens)
    for batch, threads in ((7, 3), (1, 1)):  # three threads divide seven images
        assert torch.equal(step_native(model, tokens[:batch], threads), expected[:batch])


@every_model
def test_given_values_are_read_once_for_adjacent_images(build, variant: str) -> None:
    """Two sequences are continued by three images each, with the bits of images that read them themselves."""
    model = build(variant)
    tokens, rest = draw_tokens(model, 2, POSITIONS)[:, :25], draw_tokens(model, 6, POSITIONS)[:, 25:40]
    reader, stepper = (NativeEngine(model, 6, products=torch.int8) for _ in range(2))
    parameters = reader.read(tokens)
    for token in tokens.repeat_interleave(3, dim=0).unbind(dim=1):
        expected = stepper.step(token)
    assert torch.equal(parameters, expected)
    for token in rest.unbind(dim=1):
        assert torch.equal(reader.step(token), stepper.step(token))


@every_model
def test_a_restarted_engine_has_forgotten_its_last_images(build, variant: str) -> None:
    """The test also compares the size of the state with what the engine and the model report."""
    model = build(variant)
    native = NativeEngine(model, 2)
    tokens = draw_tokens(model, 2, POSITIONS)
    first = [native.step(token).clone() for token in tokens.unbind(dim=1)]
    native.start()
    for token, expected in zip(tokens.unbind(dim=1), first, strict=True):
        assert torch.equal(native.step(token), expected)
    assert native.state_bytes == sum(state.nbytes for state in native.states) + torch.int64.itemsize
    # The engine may also keep a reordered copy of some values, so up to 5 % more is allowed. The state of `none` is so
    # small that the engine's counters weigh more.
    assert variant == "none" or native.state_bytes <= 1.05 * model.state_bytes(2)


@every_model
def test_nan_stays_nan(build, variant: str) -> None:
    """If NaN were lost, a damaged model would draw plausible values."""
    model = build(variant)
    with torch.no_grad():
        for parameter in model.blocks[0].parameters():
            parameter.fill_(torch.nan)
    for batch in (1, 7):
        native = NativeEngine(model, batch)
        for token in draw_tokens(model, batch)[:, :3].unbind(dim=1):
            output = native.step(token)
        assert bool(torch.isnan(output).any(dim=1).all())


@pytest.mark.parametrize("part", ["convolution.weight", "norm_weight", "input.weight"])
def test_nan_in_a_part_of_a_layer_stays_nan(build, part: str) -> None:
    model = build("all parts")
    with torch.no_grad():
        model.get_parameter(f"blocks.0.attention.{part}").fill_(torch.nan)
    native = NativeEngine(model, 2)
    for token in draw_tokens(model, 2)[:, :3].unbind(dim=1):
        assert bool(torch.isnan(native.step(token)).all())
