"""Images per second of sampling: mechanisms x batch sizes x networks, softmax with and without a cache among them."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.report.benchmarks import find_speed
from linformer_cli.sampling.engines import AUTO, ENGINES, NATIVE, choose_engine
from linformer_cli.system.device import synchronize
from linformer_cli.system.environment import describe_environment
from linformer_cli.system.memory import measure_free_memory, measure_peak_memory
from linformer_cli.units import format_bytes, format_duration

from .cases import (
    RERUN,
    SHARES,
    STEPWISE,
    WARM_UP_STEPS,
    Case,
    Check,
    build_middle_case,
    build_rerun_case,
    build_step_case,
    find_engine,
    is_interrupted,
    name_method,
)
from .ceilings import Ceilings
from .fresh_process import PassFailed
from .groups import CHECKED_LAYERS, CHECKED_POSITIONS, BenchReport, compare_with_softmax, measure_groups
from .memory import refuse_misfits
from .operations import WHAT_IS_COUNTED, count_product_flops, count_rerun_positions, list_products, state_traffic_bytes
from .published import find_published
from .sampling_memory import METHOD, SamplingSetup, measure_sampling_memory
from .subjects import Subject
from .timing import Timing, measure_interleaved
from .trained import TrainedRun

# Steps that tell how long an image would take.
_PROBED_STEPS = 2


@dataclass(frozen=True)
class SamplingPlan:
    """How sampling is timed.

    `limit_seconds` bounds what all repeats of one row may take: a longer image is timed around its middle only, and a
    longer re-run, which cannot be cut, is left out, by `rerun_limit_seconds` where that is given. None times whole
    images whatever they take. `engines` step, each in rows of its own.

    `earlier` has the rows that the same plan gave before: the same work is timed again and their samples count too.
    What they left out stays left out. `spare_bytes` have to be free beside the state: others take them between calls.
    """

    batches: Sequence[int]
    repeats: int
    rerun: bool = True
    limit_seconds: float | None = None
    memory: bool = False
    runs: Sequence[TrainedRun] = ()
    engines: Sequence[str] = (AUTO,)
    earlier: Sequence[dict[str, Any]] = ()
    rerun_limit_seconds: float | None = None
    spare_bytes: int = 0


def run_sampling_bench(
    subjects: Sequence[Subject],
    plan: SamplingPlan,
    precision: str,
    ceilings: Ceilings | None = None,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
    check: Check = None,
    checked: bool = False,
) -> BenchReport:
    """Time sampling of every subject at every batch size; `softmax` with a cache, and re-run at every value.

    Subjects of one preset and batch size are timed in turn, preset by preset; `report` is told each row as it is made,
    and `check` is called between steps and may raise: `Interrupted` ends it with what was measured. With `ceilings`,
    every row says what share of the machine's it reaches.

    Raises `DisagreementError` before any timing where the two executions of a mechanism disagree, which `checked`
    says has been seen to.
    """
    rows, ended = measure_groups(
        subjects,
        plan.batches,
        lambda group, batch: _measure_group(group, batch, plan, precision, ceilings, check),
        report,
        check,
        checked,
    )
    settings = {
        "repeats": plan.repeats,
        "warm_up_steps": WARM_UP_STEPS,
        "interleaved": True,
        "limit_seconds": plan.limit_seconds,
        "checked": f"the first {CHECKED_POSITIONS} positions, of untrained models {CHECKED_LAYERS} layers",
        "peak_memory": METHOD if plan.memory else None,
        "product_share": WHAT_IS_COUNTED,
        "copy_share": "the state as read and written by one step, against copying memory; see docs/bench.md",
        "networks": [_describe_network(subject) for subject in subjects],
        "peak_memory_bytes": measure_peak_memory(str(subjects[0].model.device)) if subjects else 0,
    }
    described = None if ceilings is None else ceilings.describe()
    return BenchReport(rows, ended, settings, describe_environment(), described)


def _describe_network(subject: Subject) -> dict[str, Any]:
    config = subject.model.config
    return {
        "name": subject.name,
        "preset": subject.preset,
        "image": config.image.model_dump(),
        "layers": config.layers,
        "heads": config.heads,
        "width": config.width,
        "parameters": subject.model.parameter_count(),
        "product_flops_per_position": count_product_flops(subject.model),
    }


@dataclass(frozen=True)
class _Row:
    """A case that is to be timed, or why it is left out."""

    subject: Subject
    engine: str
    case: Case | None
    left_out: str | None = None
    earlier_samples: Sequence[float] = ()


def _measure_group(
    group: Sequence[Subject],
    batch: int,
    plan: SamplingPlan,
    precision: str,
    ceilings: Ceilings | None,
    check: Check,
) -> list[dict[str, Any]]:
    # The same plan gives the same rows in the same order.
    earlier = (row for row in plan.earlier if (row["preset"], row["batch"]) == (group[0].preset, batch))
    planned = []
    for subject in group:
        # `auto` may be one of the others.
        wanted = [choose_timed_engine(subject, name) for name in plan.engines]
        if subject.model.config.attention == "softmax" and plan.rerun:
            wanted.append(RERUN)
        planned += [
            _plan_row(subject, batch, plan, engine, check, next(earlier, None)) for engine in dict.fromkeys(wanted)
        ]
    cases = [row.case for row in planned if row.case is not None]
    device = str(group[0].model.device)
    works = [functools.partial(case.work, case.steps) for case in cases]
    found = iter(measure_interleaved(works, [case.warm_up for case in cases], plan.repeats, device) if cases else ())
    timings = [next(found).after(row.earlier_samples) if row.case else None for row in planned]
    rows = [_describe(row, batch, timing, precision) for row, timing in zip(planned, timings, strict=True)]
    compare_with_softmax(
        rows, lambda row: find_speed(row).get("images_per_second"), [row.subject.model.config for row in planned]
    )
    del cases, works
    planned = [replace(row, case=None) for row in planned]  # the states that they hold are no longer needed
    for row, record in zip(planned, rows, strict=True):
        model = row.subject.model
        record |= row.subject.find_run(plan.runs)
        record["published"] = find_published(
            row.subject.preset, model.config.attention, model.config.attention_options, row.engine
        )
        record["peak_memory_bytes"] = (
            measure_row_memory(model, record, plan.limit_seconds)
            if plan.memory and record["samples_seconds"] and not is_interrupted(check)
            else None
        )
        record |= _describe_shares(record, model, ceilings)
    return rows


def choose_timed_engine(subject: Subject, engine: str) -> str:
    """What `engine` is for a model: without looking ahead in an untrained one, as that depends on the weights."""
    chosen = choose_engine(AUTO, subject.model).value if engine == AUTO else engine
    return chosen if subject.trained else _without_looking_ahead(chosen)


def _without_looking_ahead(engine: str) -> str:
    return STEPWISE if engine == NATIVE else engine


def _plan_row(
    subject: Subject, batch: int, plan: SamplingPlan, engine: str, check: Check, earlier: dict[str, Any] | None
) -> _Row:
    if earlier is not None:
        return _plan_again(subject, batch, plan, engine, check, earlier)
    try:
        with refuse_misfits():
            if engine == RERUN:
                return _plan_rerun(subject, batch, plan, check)
            return _plan_steps(subject, batch, plan, engine, check)
    except PassFailed as reason:
        return _Row(subject, engine, None, str(reason))


def _plan_again(
    subject: Subject, batch: int, plan: SamplingPlan, engine: str, check: Check, earlier: dict[str, Any]
) -> _Row:
    """The work that an earlier row timed, or its reason why none."""
    if earlier["left_out"]:
        return _Row(subject, earlier["engine"], None, earlier["left_out"])
    model, samples = subject.model, earlier["samples_seconds"]
    if engine == RERUN:
        case = build_rerun_case(model, batch, check)
    elif "extrapolated" in earlier:
        steps = earlier["extrapolated"]["timed_positions"]
        case = build_middle_case(model, batch, steps, plan.repeats, check, _without_looking_ahead(engine))
    else:
        case = build_step_case(model, batch, check, engine, first_image=batch * len(samples))
    return _Row(subject, earlier["engine"], case, earlier_samples=samples)


def _plan_steps(subject: Subject, batch: int, plan: SamplingPlan, engine: str, check: Check) -> _Row:
    """Whole images, or some steps around the middle, or a state that does not fit."""
    model = subject.model
    positions, method = model.config.image.positions, name_method(model, engine)
    if (refusal := ENGINES[find_engine(engine)].refusal(model)) is not None:
        return _Row(subject, engine, None, f"{engine}: {refusal}")
    needed, free = model.state_bytes(batch), measure_free_memory(str(model.device))
    if free is not None and 1.2 * needed + plan.spare_bytes > free:
        reason = f"the state would need {format_bytes(needed)}, {format_bytes(free)} are free"
        return _Row(subject, method, None, reason)
    if plan.limit_seconds is not None and positions > 2 * _PROBED_STEPS:
        # Behind a prefix that is none of the model's there is nothing to look ahead in.
        partly = _without_looking_ahead(engine)
        probe = build_middle_case(model, batch, _PROBED_STEPS, 2, check, partly)
        per_step = _time_second(probe, str(model.device)) / _PROBED_STEPS
        del probe
        steps = int(plan.limit_seconds / (per_step * plan.repeats))
        if steps < positions and partly != engine and partly in plan.engines:
            limit = format_duration(plan.limit_seconds)
            return _Row(subject, engine, None, f"an image takes longer than the limit of {limit}; see {partly}")
        if steps < positions and plan.repeats + 1 < positions:
            steps = max(1, min(steps, (positions - 1) // (plan.repeats + 1)))
            case = build_middle_case(model, batch, steps, plan.repeats, check, partly)
            return _Row(subject, case.engine, case)
    return _Row(subject, method, build_step_case(model, batch, check, engine))


def _plan_rerun(subject: Subject, batch: int, plan: SamplingPlan, check: Check) -> _Row:
    case = build_rerun_case(subject.model, batch, check)
    limit = plan.rerun_limit_seconds or plan.limit_seconds
    if limit is not None:
        # The first prefix is the shortest: all of them take at least as much longer as they are longer together.
        first = _time_second(case, str(subject.model.device), 1, warm_up=False)
        seconds = first * sum(SHARES) / SHARES[0] * plan.repeats
        if seconds > 2 * limit:
            reason = f"would take about {format_duration(seconds)}, the limit is {format_duration(limit)}"
            return _Row(subject, RERUN, None, reason)
    return _Row(subject, RERUN, case)


def _time_second(case: Case, device: str, steps: int = _PROBED_STEPS, warm_up: bool = True) -> float:
    if warm_up:
        case.work(steps)
    synchronize(device)
    began = time.perf_counter()
    case.work(steps)
    synchronize(device)
    return time.perf_counter() - began


def _describe(row: _Row, batch: int, timing: Timing | None, precision: str) -> dict[str, Any]:
    """One record. A figure for whole images that was not measured on whole images stands under `extrapolated`."""
    model, case = row.subject.model, row.case
    figures: dict[str, Any] = {}
    if case is not None and timing is not None:
        first, third = (batch / seconds for seconds in reversed(timing.quartiles))
        rate, positions = batch / timing.median, model.config.image.positions
        figures = {
            "images_per_second": rate,
            "images_per_second_quartiles": [first, third],
            "seconds_per_image": timing.median / batch,
        }
        if not case.is_whole(positions):
            share = case.steps / positions
            figures = {
                "extrapolated": {
                    "images_per_second": rate * share,
                    "images_per_second_quartiles": [first * share, third * share],
                    "seconds_per_image": timing.median / batch / share,
                    "timed_positions": case.steps,
                    "of_positions": positions,
                }
            }
    state = 0 if row.engine == RERUN else model.state_bytes(batch)
    return {
        "name": row.subject.name,
        "preset": row.subject.preset,
        "attention": model.config.attention,
        "attention_options": model.config.attention_options,
        "engine": row.engine,
        "precision": precision,
        "device": str(model.device),
        "batch": batch,
        "positions": model.config.image.positions,
        **figures,
        "state_bytes": state,
        "state_bytes_per_image": state // batch,
        "repeats": 0 if timing is None else len(timing.samples),
        "samples_seconds": [] if timing is None else list(timing.samples),
        "left_out": row.left_out,
    }


def measure_row_memory(model: PixelModel, record: dict[str, Any], limit_seconds: float | None) -> int | None:
    """Peak bytes of what the row `record` of this model timed; None where that could not be had."""
    setup = SamplingSetup(
        model.config.model_dump(), record["batch"], record["engine"], record["precision"], record["device"]
    )
    try:
        return measure_sampling_memory(setup, limit_seconds or 60.0)
    except PassFailed:
        return None


def _describe_shares(record: dict[str, Any], model: PixelModel, ceilings: Ceilings | None) -> dict[str, Any]:
    """The share of the matrix products that the machine can do, and of the memory that it can copy, in that time."""
    shares: dict[str, Any] = dict.fromkeys(("product_gigaflops", "product_share", "state_gigabytes", "copy_share"))
    speed = find_speed(record).get("images_per_second")
    if ceilings is None or speed is None:
        return shares
    batch, positions = record["batch"], model.config.image.positions
    rerun = record["engine"] == RERUN
    read = count_rerun_positions(positions) if rerun else positions
    rate = speed * read * count_product_flops(model) / 1e9
    rows = batch * max(1, positions // 2) if rerun else batch
    by_precision = {kind: ceilings.product(list_products(model), rows, kind) for kind in ("fp32", "bf16")}
    if record["engine"] == NATIVE and batch == 1:
        # How many values a look-ahead multiplies the weights with, and reads and writes the state for, is not known.
        # The ceilings are measured all the same, for the report.
        return shares
    ceiling = by_precision[record["precision"]]
    shares |= {"product_gigaflops": rate, "product_share": rate / ceiling.gigaflops}
    traffic = None if rerun else state_traffic_bytes(model, batch)
    if traffic is not None:
        moved = speed / batch * positions * traffic / 1e9
        shares |= {"state_gigabytes": moved, "copy_share": moved / ceilings.copy.gigabytes_per_second}
    return shares
