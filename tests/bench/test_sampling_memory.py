"""Tests of the peak memory of sampling: it covers the state but not the memory of the caller."""

import sys

import pytest
import torch

from linformer_cli.bench.measure import sampling_memory
from linformer_cli.bench.measure.sampling_memory import SamplingSetup, build_last_steps, measure_sampling_memory
from linformer_cli.model.pixel_model import PixelModel


def setup(model: PixelModel, batch: int, engine: str = "reference", precision: str = "fp32") -> SamplingSetup:
    return SamplingSetup(model.config.model_dump(), batch, engine, precision)


@pytest.mark.skipif(sys.platform != "linux", reason="the growth of a process is exact only on Linux")
def test_the_peak_covers_the_state_of_the_batch(build_tiny_model) -> None:
    model = build_tiny_model(attention="softmax", heads=8, head_width=32)
    found = measure_sampling_memory(setup(model, 256), 60)
    state = model.state_bytes(256)  # 2 layers x 64 positions x 512 floats x 256 images
    assert state <= found < 1.5 * state


def test_reusing_freed_memory_does_not_hide_the_state(build_tiny_model, monkeypatch) -> None:
    answers = iter([{"peak_bytes": 5, "state_bytes": 9}, {"peak_bytes": 12, "state_bytes": 9}])
    asked = []
    monkeypatch.setattr(sampling_memory, "run_fresh", lambda *given: asked.append(given) or next(answers))
    given = setup(build_tiny_model(), 2)
    assert [measure_sampling_memory(given, 7.0) for _ in range(2)] == [9, 12]
    (module, told, limit), _ = asked
    assert module.endswith("sampling_memory") and SamplingSetup(**told) == given and limit == 7.0


@pytest.mark.parametrize(
    ("engine", "attention"), [("reference", "linear"), ("reference", "softmax"), ("rerun", "softmax")]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_last_steps_use_the_whole_batch(build_tiny_model, monkeypatch, engine, attention, precision) -> None:
    model = build_tiny_model(attention=attention)
    seen: list[tuple[str, tuple[int, ...]]] = []
    for name in ("step", "attend"):
        right = getattr(PixelModel, name)

        def watched(self, tokens, *rest, name=name, right=right):
            seen.append((name, tuple(tokens.shape)))
            return right(self, tokens, *rest)

        monkeypatch.setattr(PixelModel, name, watched)
    work, state_bytes = build_last_steps(setup(model, 3, engine, precision))
    seen.clear()
    work()
    if engine == "rerun":
        assert seen == [("attend", (3, 64))] and state_bytes == 0
    else:
        assert seen == [("step", (3,))] * sampling_memory.STEPS
        assert state_bytes == model.to(getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[precision])).state_bytes(
            3
        )
