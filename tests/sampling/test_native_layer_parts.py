"""Tests the native engine's step of attention layers with optional parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import loop_over
from machine import HAS_LIBRARY, NO_LIBRARY
from sampling.cases import LAYER_PARTS, draw_tokens
from tolerances import assert_agree

from linformer_cli.attention.base import fork_state
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.native.build import this_machine
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.sampling.engines import ReferenceEngine
from linformer_cli.sampling.engines.native import NativeEngine

pytestmark = pytest.mark.skipif(not HAS_LIBRARY, reason=NO_LIBRARY)

TOLERANCE = 1e-4
every_case = pytest.mark.parametrize("case", LAYER_PARTS)


@pytest.fixture
def build(build_tiny_model: Callable[..., PixelModel]) -> Callable[[str], PixelModel]:
    """Provides tiny models of a case, in which all weights of the parts differ."""

    def build_case(case: str) -> PixelModel:
        model, generator = build_tiny_model(**LAYER_PARTS[case]), torch.Generator().manual_seed(12)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "convolution" in name or "norm_weight" in name:
                    parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        return model

    return build_case


@every_case
@loop_over(("known", "batch"), [(0, 1), (2, 3), (23, 3)])
def test_steps_match_the_reference_engine(build, case: str, known: int, batch: int) -> None:
    """The steps begin at the start of an image or after a prefix that was read in parallel."""
    model = build(case)
    tokens = draw_tokens(model, batch)
    with torch.no_grad():
        state = model.attend(tokens[:1, :known])[1] if known else None
    engines = [
        kind(model, batch, None if state is None else fork_state(state, batch), look_ahead=False)
        for kind in (NativeEngine, ReferenceEngine)
    ]
    for token in tokens[:, known:].unbind(dim=1):
        native, plain = (engine.step(token) for engine in engines)
        assert_agree(native, plain, TOLERANCE)
    # The model also counts positions, and the engine keeps a reordered copy of some values.
    assert abs(engines[0].state_bytes - model.state_bytes(batch)) < 0.05 * model.state_bytes(batch)


@every_case
@loop_over("products", [torch.float32, torch.int8])
def test_look_ahead_leaves_the_state_of_single_steps(build, case: str, products: torch.dtype) -> None:
    model: PixelModel = build(case)
    with torch.no_grad():
        model.head.projection.weight *= 6  # makes many guesses right, but not all
    engines: list[Any] = []
    for look_ahead in (True, False):
        engine = NativeEngine(model, 1, look_ahead=look_ahead, products=products)
        parameters = engine.step(model.start_tokens(1)).clone()
        values = engine.draw_values(parameters, UniformStreams(3, [0]), Filters(), 50)
        engines.append((engine, values))
    (ahead, found), (stepwise, expected) = engines
    assert torch.equal(found, expected) and 0 < ahead.look_aheads < 49
    assert torch.equal(ahead.step(torch.tensor([3])), stepwise.step(torch.tensor([3])))


@every_case
def test_outputs_have_the_same_bits_in_any_batch(build, case: str) -> None:
    model, outputs = build(case), []
    tokens = draw_tokens(model, 7, 30)
    for batch, threads in ((7, 1), (7, 3), (1, 3)):
        native = NativeEngine(model, batch)
        native.use_threads(threads)
        outputs.append(torch.stack([native.step(token).clone() for token in tokens[:batch].unbind(dim=1)], dim=1))
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0][: len(output)])


@pytest.mark.parametrize("instruction_set", [one.name for one in this_machine().instruction_sets[:-1]], indirect=True)
def test_every_instruction_set_computes_the_same_bits(build, instruction_set, monkeypatch) -> None:
    model = build("all parts of deltanet, odd widths")
    tokens = draw_tokens(model, 3)

    def step_through() -> torch.Tensor:
        engine = NativeEngine(model, 3, products=torch.int8)
        return torch.stack([engine.step(token).clone() for token in tokens.unbind(dim=1)])

    found = step_through()
    monkeypatch.undo()
    assert torch.equal(found, step_through())


@pytest.mark.parametrize("part", ["convolution.weight", "norm_weight", "input.weight"])
def test_nan_stays_nan(build, part: str) -> None:
    """If NaN were lost, a damaged model would draw plausible values."""
    model = build("all parts")
    with torch.no_grad():
        model.get_parameter(f"blocks.0.attention.{part}").fill_(torch.nan)
    native = NativeEngine(model, 2)
    for token in draw_tokens(model, 2)[:, :3].unbind(dim=1):
        assert bool(torch.isnan(native.step(token)).all())
