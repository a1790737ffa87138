"""The quick answer: images per second of a model's own attention beside softmax with and without a cache."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from linformer_cli.errors import DisagreementError
from linformer_cli.evaluation.agreement import measure_agreement
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.runtime import describe_environment, measure_peak_memory

from .cases import WARM_UP_STEPS, Case, build_rerun_case, build_step_case
from .timing import Timing, measure_interleaved

# How much of the sequence is compared before anything is timed.
CHECKED_POSITIONS = 96


@dataclass(frozen=True)
class BenchReport:
    """`rows` as plain records, and what they depend on."""

    rows: list[dict[str, Any]]
    settings: dict[str, Any]
    environment: dict[str, Any]


def build_softmax_twin(model: PixelModel) -> PixelModel:
    """Softmax of the same size with random weights: time does not depend on their values."""
    config = model.config.model_copy(update={"attention": "softmax", "attention_options": {}})
    return PixelModel(config).to(device=model.device, dtype=model.dtype).eval()


def run_sampling_bench(
    model: PixelModel, batches: Sequence[int], repeats: int, precision: str, rerun: bool = True
) -> BenchReport:
    """Time sampling of `model`, of its softmax twin with a cache, and of the twin re-run at every value.

    Raises `DisagreementError` before any timing where the two executions of a mechanism disagree.
    """
    device = str(model.device)
    models = [model] if model.config.attention == "softmax" else [model, build_softmax_twin(model)]
    for candidate in models:
        require_agreement(candidate)
    rows = []
    for batch in batches:
        cases = [build_step_case(candidate, batch) for candidate in models]
        if rerun:
            cases.append(build_rerun_case(models[-1], batch))
        works = [functools.partial(case.work, case.steps) for case in cases]
        timings = measure_interleaved(works, [case.warm_up for case in cases], repeats, device)
        positions = model.config.image.positions
        rows += [
            _describe(case, timing, positions, precision, device) for case, timing in zip(cases, timings, strict=True)
        ]
    settings = {
        "repeats": repeats,
        "warm_up_steps": WARM_UP_STEPS,
        "interleaved": True,
        "image": model.config.image.model_dump(),
        "layers": model.config.layers,
        "heads": model.config.heads,
        "width": model.config.width,
        "parameters": model.parameter_count(),
        "peak_memory_bytes": measure_peak_memory(device),
    }
    return BenchReport(rows, settings, describe_environment())


def require_agreement(model: PixelModel) -> None:
    """Raises `DisagreementError` where the two executions of the model's mechanism disagree: it is not timed then."""
    agreement = measure_agreement(model, positions=CHECKED_POSITIONS)
    if not agreement.passed:
        raise DisagreementError(
            f"'{model.config.attention}' is not timed: {agreement.describe_failure()}; see lintx check"
        )


def _describe(case: Case, timing: Timing, positions: int, precision: str, device: str) -> dict[str, Any]:
    """One record. A figure for whole images that was not measured on whole images stands under `extrapolated`."""
    first, third = (case.batch / seconds for seconds in reversed(timing.quartiles))
    rate = case.batch / timing.median
    figures: dict[str, Any] = {
        "images_per_second": rate,
        "images_per_second_quartiles": [first, third],
        "seconds_per_image": timing.median / case.batch,
    }
    if not case.is_whole(positions):
        share = case.steps / positions
        figures = {
            "extrapolated": {
                "images_per_second": rate * share,
                "images_per_second_quartiles": [first * share, third * share],
                "seconds_per_image": timing.median / case.batch / share,
                "timed_positions": case.steps,
                "of_positions": positions,
            }
        }
    return {
        "attention": case.attention,
        "engine": case.engine,
        "precision": precision,
        "device": device,
        "batch": case.batch,
        **figures,
        "state_bytes": case.state_bytes,
        "state_bytes_per_image": case.state_bytes // case.batch,
        "repeats": len(timing.samples),
        "samples_seconds": list(timing.samples),
    }
