"""Tests of sequences drawn without end: engines agree beyond T values, parts do not matter, and bounds are refused."""

import itertools
from typing import Any

import pytest
import torch
from loops import loop_over

from linformer_cli.attention.catalogue import CATALOGUE
from linformer_cli.config import ImageShape, ModelConfig
from linformer_cli.errors import UsageError
from linformer_cli.evaluation.bits import block_nats
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.native.library import NoLibrary, load_library
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.sampling.decode import Sampler, Stream
from linformer_cli.sampling.engines import NATIVE, REFERENCE, build_engine

POSITIONS = 40
UNBOUNDED = [name for name, mechanism in CATALOGUE.items() if mechanism.memory == "constant"]


def build(attention: str = "linear", **changes: Any) -> PixelModel:
    sizes = {"layers": 2, "heads": 2, "width": 16, "head_width": 8, "feed_forward": 24}
    network = {"attention": attention, "context": "recent", "embedding": "none", **sizes, **changes}
    torch.manual_seed(5)
    model = PixelModel(ModelConfig(**network, image=ImageShape(height=1, width=POSITIONS))).eval()
    with torch.no_grad():
        model.head.projection.weight.mul_(20)  # so that the draws depend on the bytes before them
    return model


def require_library() -> None:
    try:
        load_library()
    except NoLibrary as error:
        pytest.skip(str(error))


def draw(model: PixelModel, count: int, prompt: bytes = b"", engine: str = REFERENCE) -> bytes:
    values = torch.tensor(list(prompt), dtype=torch.int64)
    return b"".join(Stream(Sampler(model, 3, engine=engine), values, count).draw())


@pytest.mark.slow
@loop_over("attention", [*UNBOUNDED, "lstm"])
@torch.no_grad()
def test_native_and_the_parallel_form_equal_the_step_beyond_the_length_of_training(attention: str) -> None:
    require_library()
    model = build(attention)
    assert model.find_bound() is None
    values = torch.randint(256, (2, 2 * POSITIONS + 5), generator=torch.Generator().manual_seed(1))
    tokens = model.shift_values(values)
    native, plain = (build_engine(name, model, 2) for name in (NATIVE, REFERENCE))
    nats = torch.empty(values.shape)
    for place, token in enumerate(tokens.unbind(dim=1)):
        expected = plain.step(token)
        torch.testing.assert_close(native.step(token), expected, rtol=1e-3, atol=2e-3)
        nats[:, place] = -model.head.log_likelihood(expected, values[:, place])
    assert native.state_bytes < 1.1 * model.state_bytes(2) + 200
    torch.testing.assert_close(block_nats(model, values, None), nats, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("context", ["previous", "recent"])
@pytest.mark.parametrize("engine", [NATIVE, REFERENCE])
def test_a_stream_goes_on_as_its_prefix_began(context: str, engine: str) -> None:
    if engine == NATIVE:
        require_library()
    model = build(context=context)
    endless = Stream(Sampler(model, 3, engine=engine), torch.empty(0, dtype=torch.int64)).draw()
    whole = b"".join(itertools.islice(endless, 6))
    assert len(whole) == 6 * 32 > 4 * POSITIONS
    assert whole == draw(model, len(whole), engine=REFERENCE)
    assert draw(model, 50, engine=engine) == whole[:50]


def test_look_ahead_does_not_change_a_stream() -> None:
    require_library()
    model = build()
    first, streams = model.start_tokens(1), UniformStreams(3, [0])
    engine = build_engine(NATIVE, model, 1, look_ahead=False)
    plain = engine.draw_values(engine.step(first), streams, Filters(), 3 * POSITIONS)
    assert draw(model, 3 * POSITIONS, engine=NATIVE) == plain.numpy().tobytes()


@pytest.mark.parametrize("known", [1, POSITIONS - 1, POSITIONS, 2 * POSITIONS + 3])
def test_a_prompt_is_read_as_if_it_had_been_drawn(known: int) -> None:
    model, prompt = build("gla"), bytes(range(100, 100 + 2 * POSITIONS + 3))[:known]
    engine = build_engine(REFERENCE, model, 1)
    for token in [0, *prompt]:
        parameters = engine.step(torch.tensor([token]))
    expected = engine.draw_values(parameters, UniformStreams(3, [0]), Filters(), 70)
    assert draw(model, 70, prompt) == expected.numpy().tobytes()


def test_a_bounded_model_draws_one_window(raises_one_line) -> None:
    for changes, reason in (
        ({"attention": "softmax"}, "'softmax' needs positions, or memory"),
        ({"attention": "retention", "attention_options": {"distance": "plane"}}, "'retention' needs"),
        ({"embedding": "grid"}, "embedding 'grid'"),
        ({"context": "neighbours"}, "context 'neighbours'"),
    ):
        model = build(**changes)
        assert len(draw(model, POSITIONS - 3, b"abc")) == POSITIONS - 3
        assert draw(model, 0, bytes(POSITIONS)) == b""
        with raises_one_line(UsageError, "at most 40 values", "41", reason):
            draw(model, POSITIONS - 2, b"abc")
        with raises_one_line(UsageError, "without end"):
            Stream(Sampler(model), torch.empty(0, dtype=torch.int64))
