"""Tests that look-ahead draws the same image as stepping, bit for bit, in fewer passes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import loop_over
from machine import needs_library
from sampling.cases import CHANGES, LAYER_PARTS, draw_tokens, sample_values
from sampling.test_native_mechanisms import VARIANTS

from linformer_cli.attention.base import fork_state
from linformer_cli.checkpoint import load_model
from linformer_cli.config import ImageShape
from linformer_cli.errors import Interrupted, LintxError
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.sampling.decode import Sampler
from linformer_cli.sampling.engines import build_engine, choose_engine
from linformer_cli.sampling.engines.native import NativeEngine

pytestmark = needs_library


@pytest.fixture
def draw_both(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[NativeEngine, ...]]:
    """Draws one image with look-ahead of up to `window` positions and by stepping, and returns both engines."""

    def draw(model: PixelModel, window: int, index: int, known: int = 1, left: int = 0) -> tuple[NativeEngine, ...]:
        monkeypatch.setattr(NativeEngine, "window", window)
        tokens, engines, drawn = draw_tokens(model, 1), [], []
        with torch.no_grad():
            parameters, state = model.attend(tokens[:, :known])
        for look_ahead in (True, False):
            engine = NativeEngine(model, 1, fork_state(state, 1), look_ahead)
            streams, count = UniformStreams(3, [index]), model.config.image.positions - known + 1 - left
            drawn.append(engine.draw_values(parameters[:, -1], streams, Filters(), count))
            engines.append(engine)
        assert drawn[0].shape == (1, count) and drawn[0].dtype == torch.uint8
        assert torch.equal(*drawn)
        assert len(torch.unique(drawn[0])) > 1
        return tuple(engines)

    return draw


def sharpen(model: PixelModel) -> PixelModel:
    """Make predictions so confident that many guesses are right, but not all."""
    with torch.no_grad():
        model.head.projection.weight *= 12
    return model


MECHANISMS = {name: {"attention": name, "attention_options": options} for name, options in VARIANTS.values()}
OTHERS = CHANGES | LAYER_PARTS


@loop_over(
    "changes, head",
    [*((changes, "categorical") for changes in (MECHANISMS | OTHERS).values())]
    + [(changes, "mixture") for name, changes in OTHERS.items() if "palette" not in name],
)
def test_a_guided_image_matches_stepping(build_tiny_model, changes: dict[str, Any], head: str) -> None:
    """It has two rows, each with its own state: with the class and without."""
    model = sharpen(build_tiny_model(**{**changes, "classes": 3, "optional_class": True, "head": head}))
    tokens, filters, images = torch.tensor([1, 3]), Filters(guidance=2.0), []
    for look_ahead in (True, False):
        engine = NativeEngine(model, 2, None, look_ahead)
        parameters, streams = engine.step(tokens), UniformStreams(3, [0])
        images.append(engine.draw_values(parameters, streams, filters, model.config.image.positions))
        assert (0 < engine.look_aheads < 60) == (look_ahead and NativeEngine(model, 1).program.window > 1)
    assert torch.equal(*images)


@loop_over("changes", OTHERS.values())
@loop_over("dtype", [torch.float32, torch.bfloat16])
def test_the_image_matches_stepping(build_tiny_model, draw_both, changes: dict[str, Any], dtype) -> None:
    model = sharpen(build_tiny_model(**changes)).to(dtype)
    for index in range(2):
        draw_both(model, 16, index)


@loop_over("window", [2, 3, 16, 100])
@loop_over("known", [1, 2, 23, 60])
def test_the_image_matches_stepping_for_any_window_and_start(build_tiny_model, draw_both, window, known) -> None:
    model = sharpen(build_tiny_model(context="hashed", classes=3))
    ahead, stepwise = draw_both(model, window, 5, known)
    assert 0 < ahead.look_aheads < model.config.image.positions - known and not stepwise.look_aheads


def test_a_confident_model_needs_far_fewer_passes(build_tiny_model, draw_both) -> None:
    model = build_tiny_model(image=ImageShape(height=16, width=16, levels=16))
    with torch.no_grad():
        model.head.projection.bias[3] = 100.0
        model.head.projection.bias[5] = 100.0 - 4.0  # drawn occasionally
    ahead, _ = draw_both(model, 16, 0)
    assert ahead.look_aheads < 256 / 8
    alone = NativeEngine(model, 1)
    alone.draw_values(alone.step(model.start_tokens(1)), UniformStreams(0, [0]), Filters(), 256)
    # The start token takes a separate pass.
    assert sample_values(model, [0], engine="native").passes == 1 + alone.look_aheads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_final_state_matches_stepping(build_tiny_model, draw_both, dtype) -> None:
    """Some of the widths are odd."""
    model = build_tiny_model(layers=3, width=21, head_width=7, heads=3, feed_forward=29, context="hashed")
    model = sharpen(model).to(dtype)
    ahead, stepwise = draw_both(model, 7, 2, known=20, left=1)
    # The first state is the ring buffer of recent values. With look-ahead, this buffer is longer.
    for one, other in zip(ahead.states[1:], stepwise.states[1:], strict=True):
        assert torch.equal(one, other)
    token = torch.tensor([3])
    # The last value drawn has not been read yet.
    assert torch.equal(ahead.step(token), stepwise.step(token))


@pytest.mark.smoke
def test_single_images_match_those_drawn_in_a_batch(build_tiny_model) -> None:
    model = sharpen(build_tiny_model(classes=3))
    together = sample_values(model, range(20), seed=2, engine="native").values
    alone = torch.cat([sample_values(model, [index], seed=2, engine="native").values for index in range(20)])
    assert torch.equal(alone, together)


@pytest.mark.parametrize("head", ["categorical", "mixture"])
def test_filtered_images_match_those_drawn_in_a_batch(build_tiny_model, head) -> None:
    model, filters = build_tiny_model(head=head), Filters(0.3, 9, 0.95)
    together = sample_values(model, range(20), filters=filters, engine="native").values
    alone = [sample_values(model, [index], filters=filters, engine="native") for index in range(20)]
    assert torch.equal(torch.cat([drawn.values for drawn in alone]), together)
    assert all(drawn.passes < together.shape[1] for drawn in alone)


def test_before_step_can_stop_the_look_ahead(build_tiny_model) -> None:
    asked = []

    def ask() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise Interrupted("enough", 2)

    model = build_tiny_model(image=ImageShape(height=28, width=28, levels=16))
    with pytest.raises(Interrupted):
        sample_values(model, [0], engine="native", before_step=ask)
    assert len(asked) == 2


def test_nan_is_reported(build_tiny_model, raises_one_line) -> None:
    model = build_tiny_model()
    engine = NativeEngine(model, 1)
    parameters = engine.step(model.start_tokens(1)).clone()
    for state in engine.states:
        if state.is_floating_point():
            state.fill_(torch.nan)
    for first in (parameters, torch.full_like(parameters, torch.nan)):
        with raises_one_line(LintxError, "damaged"):
            engine.draw_values(first, UniformStreams(0, [0]), Filters(), 64)


@pytest.mark.parametrize("look_ahead", [True, False])
def test_nan_in_the_middle_of_a_pass_is_reported(build_tiny_model, raises_one_line, look_ahead) -> None:
    """All values are 15, so all guesses are right. In the last pass, the last four of seven predictions are NaN."""
    model = build_tiny_model(image=ImageShape(height=16, width=4, levels=16))
    model.head.projection.bias.data[15] = 1e4
    model.embedding.row.weight.data[15] = torch.nan
    engine = NativeEngine(model, 1, look_ahead=look_ahead)
    with raises_one_line(LintxError, "damaged"):
        engine.draw_values(engine.step(model.start_tokens(1)), UniformStreams(0, [0]), Filters(), 64)
    model.embedding.row.weight.data[15] = 0
    engine = NativeEngine(model, 1, look_ahead=look_ahead)
    values = engine.draw_values(engine.step(model.start_tokens(1)), UniformStreams(0, [0]), Filters(), 64)
    assert values.eq(15).all() and engine.look_aheads == (8 if look_ahead else 0)


@pytest.mark.parametrize("look_ahead", [True, False])
def test_look_ahead_can_be_turned_off(build_tiny_model, look_ahead) -> None:
    model = build_tiny_model()
    assert choose_engine("auto", model).value == "native"
    engine = build_engine("auto", model, 1, look_ahead=look_ahead)
    engine.draw_values(engine.step(model.start_tokens(1)), UniformStreams(0, [0]), Filters(), 64)
    assert bool(engine.look_aheads) == look_ahead


@pytest.mark.slow
def test_images_of_a_shipped_model_match_stepping(share) -> None:
    """The images are drawn in bfloat16. All 400 images have 313,600 values."""
    model = load_model("mnist-deep", dtype=torch.bfloat16)
    passes, images, count = 0, [], max(round(400 * share), 30)
    for index in range(count):
        drawn = sample_values(model, [index], engine="native")
        images.append(drawn.values)
        passes += drawn.passes
    together = torch.cat([part.values for part in Sampler(model, engine="native").iter_batches(range(count), 200)])
    assert torch.equal(torch.cat(images), together)
    assert len(torch.unique(together, dim=0)) == count
    assert 2 * passes < together.numel()
