"""Tests of look-ahead in the engine `cuda-fused`, in Triton's interpreter."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import first_fast, loop_over
from machine import NO_TRITON, TRITON_DEVICE
from sampling.ahead_on_cpu import step_ahead
from sampling.cases import CHANGES, draw_tokens
from sampling.test_look_ahead import sharpen
from tolerances import assert_agree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from waiting import KernelCounter, OnlyOn, Recorder

from linformer_cli.attention.base import fork_state
from linformer_cli.attention.kernels import registry
from linformer_cli.attention.parts.folded_sums import AheadState
from linformer_cli.config import ImageShape
from linformer_cli.errors import Interrupted, LintxError, UsageError
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.sampling.engines import ReferenceEngine, choose_engine, cuda
from linformer_cli.sampling.engines.ahead import Ahead, AheadEngine
from linformer_cli.sampling.engines.base import Engine
from linformer_cli.sampling.engines.cuda import CudaEngine, FusedCudaEngine, Graphs

pytest.importorskip("triton", reason=NO_TRITON)

COLOUR = ImageShape(height=3, width=2, channels=3, levels=16)  # a row is shorter than a pass
SMALL = ImageShape(height=3, width=5, levels=16)
FLOAT32, BFLOAT16 = 1e-5, 1e-2


@pytest.fixture(autouse=True)
def _with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "has_triton", lambda device: True)


@pytest.fixture(autouse=True, params=[4, pytest.param(AheadEngine.window, marks=pytest.mark.slow)])
def _window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of few positions take less time in the interpreter."""
    monkeypatch.setattr(AheadEngine, "window", request.param)


@pytest.fixture
def build(build_tiny_model) -> Callable[..., PixelModel]:
    """Builds a model that the engine supports, with predictions so confident that many guesses are right."""

    def build(**changes: Any) -> PixelModel:
        sizes = {"head_width": 16, "layers": 1, "image": SMALL, "context": "wide"}
        return sharpen(build_tiny_model(**{**sizes, **changes})).to(TRITON_DEVICE)

    return build


def draw_image(engine: Engine, index: int = 0, filters: Filters | None = None, counts: tuple[int, ...] = ()) -> Tensor:
    """An image, drawn in parts of `counts` values, and what is left."""
    model, filters, streams = engine.model, filters or Filters(), UniformStreams(3, [index])
    tokens = model.start_tokens(engine.batch)
    if engine.batch == 2:
        tokens[0] = 1
    positions, parts = model.config.image.positions, []
    for count in (*counts, positions - sum(counts)):
        parts.append(engine.draw_values(engine.step(tokens), streams, filters, count))
        tokens = parts[-1][0, -1:].long().expand(engine.batch).to(model.device)
    return torch.cat(parts, dim=1)


GUIDED = {"classes": 3, "optional_class": True}
IMAGES: list[tuple[dict[str, Any], Filters]] = [
    ({**GUIDED, "embedding": "paper", "context": "previous", "norm": "post"}, Filters(guidance=2.0)),
    ({"image": COLOUR, "head": "mixture", "activation": "relu"}, Filters(temperature=0.7)),
    ({"context": "hashed", "layers": 2, "classes": 3, "norm_heads": True, "output_gate": True}, Filters(top_k=3)),
    ({"attention_options": {"feature_map": "relu"}, "normalise_keys": True}, Filters(top_p=0.9)),
    ({"context": "neighbours", "feed_forward_kind": "boom"}, Filters()),
    (CHANGES["palette"], Filters()),
    ({"image": ImageShape(height=1, width=11, levels=16), "embedding": "none", "context": "recent"}, Filters()),
    ({"image": ImageShape(height=8, width=8, levels=16), "context": "previous"}, Filters()),
]


@pytest.mark.parametrize(("changes", "filters"), first_fast(IMAGES, count=2))
def test_images_match_those_without_look_ahead(build, changes, filters) -> None:
    model = build(**changes)
    batch, positions = filters.rows_per_image, model.config.image.positions
    engine, plain = AheadEngine(model, batch), ReferenceEngine(model, batch)
    found = draw_image(engine, filters=filters)
    assert torch.equal(found, draw_image(plain, filters=filters)) and len(found.unique()) > 1
    assert 0 < engine.look_aheads < positions - 1 and not plain.look_aheads


@pytest.mark.slow
def test_images_match_those_of_the_same_kernels_without_look_ahead(build) -> None:
    model = build(layers=2)
    engines = AheadEngine(model, 1), FusedCudaEngine(model, 1), AheadEngine(model, 1, look_ahead=False)
    images = [draw_image(engine) for engine in engines]
    assert torch.equal(images[0], images[1]) and torch.equal(images[0], images[2])
    assert [engine.look_aheads > 0 for engine in engines] == [True, False, False]


def test_an_image_can_be_drawn_in_parts_and_again(build) -> None:
    """Between the parts are single steps, which add what the last pass kept to the sums."""
    model = build()
    engine, plain = AheadEngine(model, 1), ReferenceEngine(model, 1)
    for index, counts in ((0, (1, 2, 7)), (1, ())):
        assert torch.equal(draw_image(engine, index, counts=counts), draw_image(plain, index))
        engine.start()
        plain.start()


def test_the_engine_continues_from_a_state_of_attend(build) -> None:
    model, images, streams = build(), [], lambda: UniformStreams(3, [0])
    tokens = draw_tokens(model, 1)[:, :4]
    with torch.no_grad():
        parameters, state = model.attend(tokens)
    for kind in (AheadEngine, ReferenceEngine):
        engine = kind(model, 1, fork_state(state))
        images.append(engine.draw_values(parameters[:, -1], streams(), Filters(), 12))
    assert torch.equal(*images)
    with pytest.raises(ValueError, match="have already been drawn"):
        AheadEngine(model, 1, state).draw_values(parameters[:, -1], streams(), Filters(), 13)


def test_replayed_passes_draw_the_same_images(build, monkeypatch) -> None:
    """Later passes replay the recorded operations and kernels, which know nothing of the numbers on the host."""
    recorded = Recorder.replace_graphs(monkeypatch)
    load = registry._triton
    monkeypatch.setattr(registry, "_triton", lambda module: Recorder.watch(load(module)))
    model = build()
    engine, plain = AheadEngine(model, 1), ReferenceEngine(model, 1)
    engine._graphs = Graphs(torch.device("cuda"))
    for index in range(2):
        assert torch.equal(draw_image(engine, index), draw_image(plain, index))
        engine.start()
        plain.start()
    assert len(recorded) == 1 + 1  # the first step, and all passes


def test_a_pass_has_no_more_kernels_than_a_step_and_never_waits_for_the_host(build, monkeypatch) -> None:
    """The tensors have a device but no contents, so reading a number or mixing devices fails."""
    model, fake, launched = build().cpu(), FakeTensorMode(), []

    class Kernels:
        def __getattr__(self, name: str) -> Callable[..., Tensor | None]:
            def launch(*arguments: Any) -> Tensor | None:
                launched.append(name)
                if name == "keep_rows":
                    return None
                if name == "project":
                    return torch.empty(len(arguments[0].x), arguments[1].out_features, device="cuda")
                return torch.empty_like(arguments[2])

            return launch

    monkeypatch.setattr(registry, "_triton", lambda module: Kernels())
    counts = []
    with fake, torch.no_grad():
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                moved = {name: fake.from_tensor(x).to("cuda") for name, x in tensors.items() if x is not None}
                tensors.update(moved)
        ahead, plain = AheadEngine(model, 1), FusedCudaEngine(model, 1)
        plain.take_step()  # reads the start token

        def step() -> None:
            plain.take_step()
            plain.draw_next(Filters())

        for work in (lambda: ahead.take_pass(Filters()), step):
            launched.clear()
            with OnlyOn("cuda"), KernelCounter() as counter:
                work()
            counts.append(counter.kernels + len(launched))
    assert launched == ["project", "step_folded", "project", "project", "project"]
    assert counts[0] <= counts[1]


@loop_over(("dtype", "tolerance"), [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)])
@loop_over(("feature_map", "rows", "kept"), [("elu", 4, 3), ("relu", 1, 4), ("elu", 4, 0)])
def test_the_kernel_adds_what_was_kept_and_steps(feature_map, rows, kept, dtype, tolerance) -> None:
    draw = torch.Generator(TRITON_DEVICE).manual_seed(0)

    def random_like(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=TRITON_DEVICE)

    s, z = random_like(2, 3, 16, 32), random_like(2, 3, 16).abs() + 1
    keys, values = (random_like(2, 3, 4, width).to(dtype) for width in (16, 32))
    keys[:, :, kept:], values[:, :, kept:] = torch.nan, torch.nan  # rows after a wrong guess
    state = AheadState(s, z, keys, values, torch.full((2,), kept, device=TRITON_DEVICE))
    inputs = [part.unflatten(-1, (3, -1)) for part in random_like(2 * rows, 192).to(dtype).split((48, 48, 96), dim=-1)]
    expected = fork_state(state)
    wanted = step_ahead(*inputs, expected, feature_map)
    found = registry.AHEAD_STEP.load_triton()(*inputs, state, feature_map)
    assert found.dtype == dtype and found.shape == (2 * rows, 3, 32)
    assert_agree(found.float(), wanted.float(), tolerance)
    for ours, theirs in zip(state, expected, strict=True):
        assert_agree(ours.float().nan_to_num(9), theirs.float().nan_to_num(9), FLOAT32)


def test_a_wrong_guess_with_nan_does_not_reach_the_rows_before_it() -> None:
    zeros = torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 16), *torch.zeros(2, 1, 1, 4, 16)
    state = AheadState(*(part.to(TRITON_DEVICE) for part in (*zeros, torch.zeros(1, dtype=torch.int64))))
    x = torch.ones(4, 1, 16, device=TRITON_DEVICE)
    x[2] = torch.nan
    y = registry.AHEAD_STEP.load_triton()(x, x, x, state, "elu")
    assert torch.equal(y.isfinite().all(dim=-1).flatten().cpu(), torch.tensor([True, True, False, False]))


class Line:
    """What `keep_rows` does to the line of values and guesses, written as in `draw_ahead` of native/runner.cpp."""

    def __init__(self, first: int, window: int, end: int, above: int) -> None:
        self.values, self.window, self.end, self.above = [first] + [0] * (end + window), window, end, above
        self.known = self.guessed = 1
        self.fine = True
        self.guess()

    def guess(self) -> None:
        for index in range(max(self.guessed, self.known), self.known + self.window - 1):
            self.values[index] = self.values[index - (1 if index < self.above else self.above)]
        self.tokens = self.values[self.known - 1 : self.known - 1 + self.window]

    def keep(self, drawn: list[int], finite: list[bool]) -> int:
        right, sure = 0, True
        for row, value in enumerate(drawn):
            self.fine &= row > 0 or finite[row] or self.known == self.end
            sure &= row == 0 or finite[row]
            guess, self.values[self.known + row] = self.values[self.known + row], value
            right += sure
            sure &= value == guess
        right = min(right, self.end - self.known)
        self.guessed = max(self.guessed, self.known + self.window)
        self.known += right
        self.guess()
        return right


@loop_over(("images", "above", "reach"), [(1, 1, 1), (2, 3, 5), (1, 5, 11), (2, 9, 20)])
def test_values_are_kept_up_to_the_first_wrong_guess(images, above, reach) -> None:
    """Random draws, half of them guessed, a few of them NaN, up to the end of an image and beyond."""
    window, end, drawing = 4, 23, random.Random(above)
    keep = registry.KEPT_ROWS.load_triton()
    line, read = Line(7, window, end, above), [0] * reach
    ahead = Ahead(
        torch.full((images, window), 7),
        torch.zeros(window, dtype=torch.float64),
        torch.zeros(end + window, dtype=torch.int64),
        torch.arange(end + window).double() / 100,
        torch.tensor([1, 1, end, 1]),
        torch.zeros(images, reach, dtype=torch.int16),
        torch.tensor(40),
        torch.zeros(images, dtype=torch.int64),
    )
    ahead = Ahead(*(part.to(TRITON_DEVICE) for part in ahead))
    ahead.line[0] = 7
    passes, kept = 0, 0
    while passes < 40 and (line.known < end or passes % 4):
        guesses = [*line.tokens[1:], 0]
        drawn = [guess if drawing.random() < 0.5 else drawing.randrange(9) for guess in guesses]
        finite = torch.tensor([[row == 0 or drawing.random() < 0.9 for row in range(window)] for _ in range(images)])
        read += line.tokens[: (right := line.keep(drawn, finite.all(dim=0).tolist()))]
        keep(torch.tensor(drawn, device=TRITON_DEVICE), finite.all(dim=0).to(TRITON_DEVICE), ahead, above)
        passes, kept = passes + 1, kept + right
        assert ahead.counts.tolist() == [line.known, line.guessed, end, 1]
        assert ahead.tokens.tolist() == [line.tokens] * images
        assert ahead.line.tolist()[: line.known] == line.values[: line.known]
        assert ahead.recent.tolist() == [read[-reach:]] * images
        assert ahead.kept.tolist() == [right] * images and int(ahead.place) == 40 + kept
        assert ahead.numbers.tolist() == ahead.uniforms[line.known : line.known + window].tolist()
    assert line.known == end and passes < kept
    # A first row with NaN is reported, unless all values have been drawn.
    for known, fine in ((end, 1), (end - 1, 0)):
        ahead.counts[0] = known
        keep(ahead.tokens[0], torch.zeros(window, dtype=torch.bool, device=TRITON_DEVICE), ahead, above)
        assert ahead.counts.tolist()[3] == fine


@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
def test_a_damaged_model_is_reported_after_drawing(build, raises_one_line, damage) -> None:
    model = build(image=ImageShape(height=2, width=2, levels=16))
    with torch.no_grad():
        model.blocks[0].feed_forward.output.bias[0] = damage
    with raises_one_line(LintxError, "its weights are damaged"):
        draw_image(AheadEngine(model, 1))


def test_before_step_can_stop_the_passes(build) -> None:
    asked: list[int] = []

    def stop() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise Interrupted("Stopped", 2)

    model = build()
    engine = AheadEngine(model, 1)
    with pytest.raises(Interrupted):
        engine.draw_values(engine.step(model.start_tokens(1)), UniformStreams(0, [0]), Filters(), 15, stop)
    assert engine.look_aheads == 1


def test_larger_batches_and_two_images_are_drawn_without_look_ahead(build) -> None:
    model = build(image=ImageShape(height=2, width=2, levels=16))
    for batch in (2, 3):
        engine, plain = AheadEngine(model, batch), ReferenceEngine(model, batch)
        images = [
            each.draw_values(each.step(model.start_tokens(batch)), UniformStreams(0, range(batch)), Filters(), 4)
            for each in (engine, plain)
        ]
        assert torch.equal(*images) and not engine.look_aheads


@loop_over(
    "changes",
    [{"attention": "gla"}, {"attention_options": {"feature_map": "poly2"}}, {"head_width": 8}, CHANGES["pixels"]]
    + [{"short_convolution": 4}],
)
def test_other_models_are_refused_in_one_line(build_tiny_model, monkeypatch, raises_one_line, changes) -> None:
    model = build_tiny_model(**{"head_width": 16, **changes})
    monkeypatch.setattr(PixelModel, "device", torch.device("cuda"))
    monkeypatch.setattr(CudaEngine, "refusal", lambda model, products=None: None)
    monkeypatch.setattr(cuda, "triton_refusal", lambda device: None)
    with raises_one_line(UsageError, "engine 'cuda-fused:look-ahead=16'", "its look-ahead needs 'linear' attention"):
        choose_engine(AheadEngine.name, model)
    assert choose_engine(AheadEngine.name, build_tiny_model(head_width=16)).value == AheadEngine.name
    assert choose_engine("auto", build_tiny_model(head_width=32)).value != AheadEngine.name
