"""Tests of the timed work of sampling: whole images, steps around the middle of an image, and prefixes of a re-run."""

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch
from interruptions import stop_after

from linformer_cli.bench.measure import sampling_work
from linformer_cli.bench.measure.peak_memory import measure_peak
from linformer_cli.bench.measure.sampling_work import (
    LAST_STEPS,
    SHARES,
    MiddleSteps,
    RerunPrefixes,
    SamplingSetup,
    build_last_steps,
    place_state,
)
from linformer_cli.errors import Interrupted
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.sampling import decode
from linformer_cli.sampling.choose import UniformStreams
from linformer_cli.sampling.decode import WARM_UP_STEPS, WholeImages
from linformer_cli.sampling.engines.cuda import CudaEngine, Graphs


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Records the position and the batch size of every step."""
    taken: list[tuple[int, int]] = []
    step = PixelModel.step

    def watched(self: PixelModel, tokens_t: torch.Tensor, state: Any) -> Any:
        taken.append((int(state.embedding.position), len(tokens_t)))
        return step(self, tokens_t, state)

    monkeypatch.setattr(PixelModel, "step", watched)
    return taken


def test_whole_images_are_drawn_after_a_few_steps(build_tiny_model, steps, clock) -> None:
    work = WholeImages(build_tiny_model(), 3, "reference")
    assert work.time_sample() == 2.0 and work.steps == 64
    whole = [(position, 3) for position in range(64)]
    assert steps == whole[: WARM_UP_STEPS // 2] * 2 + whole


def test_every_sample_draws_different_images(build_tiny_model, monkeypatch, clock) -> None:
    begun: list[list[int]] = []

    def record(seed: int, indices: Sequence[int]) -> UniformStreams:
        begun.append(list(indices))
        return UniformStreams(seed, indices)

    monkeypatch.setattr(decode, "UniformStreams", record)
    work = WholeImages(build_tiny_model(), 2)
    for _ in range(2):
        work.time_sample()
    assert begun == [[0, 1]] * 3 + [[2, 3]] * 3  # each sample has two warm-ups with the same images


def test_timed_steps_lie_around_the_middle(build_tiny_model, steps, clock) -> None:
    work = MiddleSteps(build_tiny_model(attention="softmax"), 3, "reference", 5)
    for _ in range(2):
        work.time_sample()
    # Four untimed steps lead to five timed steps in the middle. Every sample starts from the same state.
    assert steps == [(position, 3) for position in range(25, 34)] * 2
    steps.clear()
    MiddleSteps(build_tiny_model(), 1, "reference", 59).time_sample()
    assert steps[0] == (1, 1) and steps[-1] == (63, 1)  # there is room for the untimed steps


def test_no_graph_is_recorded_in_the_timed_steps(build_tiny_model, monkeypatch) -> None:
    """A graph is recorded in its second run."""
    events: list[Hashable] = []

    def run(graphs: Graphs, name: Hashable, work: Callable[[], None]) -> None:
        events.append(name)
        work()

    def time_work(work: Callable[[], object], device: str) -> float:
        events.append("timing")
        work()
        return 1.0

    monkeypatch.setattr(CudaEngine, "refusal", lambda model, products=None: None)
    monkeypatch.setattr(Graphs, "run", run)
    for module in (sampling_work, decode):
        monkeypatch.setattr(module, "time_work", time_work)
    for work in (MiddleSteps(build_tiny_model(), 2, "cuda", 5), WholeImages(build_tiny_model(), 2, "cuda")):
        events.clear()
        work.time_sample()
        before, timed = events[: events.index("timing")], events[events.index("timing") + 1 :]
        assert len(timed) in (5, 64)
        assert all(before.count(name) >= 2 for name in timed)


def test_the_prefixes_of_a_rerun_are_half_the_image_on_average(build_tiny_model, monkeypatch, clock) -> None:
    shapes = []
    attend = PixelModel.attend

    def watched(self: PixelModel, tokens: torch.Tensor, state: Any = None) -> Any:
        assert state is None
        shapes.append(tuple(tokens.shape))
        return attend(self, tokens, state)

    monkeypatch.setattr(PixelModel, "attend", watched)
    work = RerunPrefixes(build_tiny_model(), 3)
    assert work.time_sample() == 2.0 and work.steps == 4
    assert shapes == [(3, 8), (3, 8), (3, 24), (3, 40), (3, 56)]  # the first is the warm-up
    assert sum(SHARES) / len(SHARES) == 0.5


@pytest.mark.parametrize(
    "build", [WholeImages, lambda *given, **rest: MiddleSteps(*given, "auto", 4, **rest), RerunPrefixes]
)
def test_the_work_can_be_stopped_between_steps(build_tiny_model, build) -> None:
    with pytest.raises(Interrupted):
        build(build_tiny_model(attention="softmax"), 1, check=stop_after(2)).time_sample()


@pytest.mark.parametrize("attention", ["linear", "softmax", "lsh", "longformer", "lstm"])
def test_a_placed_state_equals_the_state_after_stepping(build_tiny_model, attention) -> None:
    model = build_tiny_model(attention=attention, dtype=torch.float64)
    placed = place_state(model, 20)
    state = model.init_state(1)
    for _ in range(20):
        _, state = model.step(torch.zeros(1, dtype=torch.int64), state)
    token = torch.full((1,), 3)
    expected, _ = model.step(token, state)
    found, _ = model.step(token, placed)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("engine", "attention"), [("reference", "linear"), ("reference", "softmax"), ("rerun", "softmax")]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_last_steps_use_the_whole_batch(build_tiny_model, monkeypatch, engine, attention, precision) -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []
    for name in ("step", "attend"):
        right = getattr(PixelModel, name)

        def watched(self, tokens, *rest, name=name, right=right):
            seen.append((name, tuple(tokens.shape)))
            return right(self, tokens, *rest)

        monkeypatch.setattr(PixelModel, name, watched)
    work = build_last_steps(SamplingSetup(build_tiny_model(attention=attention).config, 3, engine, precision))
    seen.clear()
    work()
    assert seen == ([("attend", (3, 64))] if engine == "rerun" else [("step", (3,))] * LAST_STEPS)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the growth of a process is exact only on Linux")
def test_the_peak_of_sampling_covers_the_state_of_the_batch(build_tiny_model) -> None:
    model = build_tiny_model(attention="softmax", heads=8, head_width=32)
    found = measure_peak(build_last_steps, SamplingSetup(model.config, 256, "reference", "fp32"), 60)
    state = model.state_bytes(256)  # 2 layers x 64 positions x 512 floats x 256 images
    assert state <= found.bytes < 1.5 * state
