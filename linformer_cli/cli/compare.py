"""`lintx compare`: trains mechanisms under the same conditions and shows them in one table."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from linformer_cli.config import LARGEST_STEP, LOOK_SETTINGS, DataConfig, TrainConfig
from linformer_cli.errors import Interrupted, LintxError, UsageError
from linformer_cli.probe import choose_precision
from linformer_cli.system.device import choose_device
from linformer_cli.system.memory import is_out_of_memory
from linformer_cli.system.signals import StopRequest
from . import options
from .config_options import Fields, count, option, with_fields
from .display import TrainingDisplay
from .output import info, warn
from .reports import run_and_show
from .session import load_training_images

if TYPE_CHECKING:
    from linformer_cli.comparison.entries import Conditions, Entry, Plan
    from linformer_cli.comparison.results import ComparisonReport
    from linformer_cli.data.images import ImageSet


# The default of --images.
_IMAGES = 16_000


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    names: options.Variants = None
    runs: Path = option(Path("runs/comparison"), "Folder that holds one run for each mechanism.", metavar="FOLDER")
    images: int | None = option(
        None, f"Training images for each mechanism; default {_IMAGES}.", min=1, max=LARGEST_STEP
    )
    seeds: int = count(1, "Runs of each mechanism, with the seeds from --seed on; the table has means and groups.")
    match_parameters: bool = option(
        False,
        "Give all models as many parameters as the first, by their feed-forward width.",
        "--match-parameters",
    )
    data: str | None = option(None, "Data set, as for lintx train.", metavar="NAME")
    data_dir: options.DataDir = None
    pictures: Annotated[dict[str, Any], Fields(DataConfig, "Pictures", only=LOOK_SETTINGS, help="As for lintx train.")]
    window_length: options.WindowLength = None
    preset: str | None = option(None, "The network; default mnist-small, or bytes-small for bytes.")
    config: Path | None = option(None, "TOML file with [model], [data], [train] for all runs.", metavar="FILE")
    evaluate_images: int | None = count(None, "Number of validation images; default 2000.")
    batch: int = count(64, "Images sampled at once when sampling is timed.")
    repeats: int = count(3, "Timed repeats after one warm-up; 0 measures no speeds.", min=0)
    train: bool = option(True, "Train and time, or only show existing results.")
    retime: bool = option(False, "Discard earlier times and measure them again.", "--retime")
    style: options.Style = "table"
    json: options.Json = False
    plot: Path | None = option(
        None, "Also plot bits/dim against images/s and state bytes (.png or .svg).", metavar="FILE"
    )
    training: Annotated[
        dict[str, Any], Fields(TrainConfig, "Training", only=("max_time", "seed", "device", "precision"))
    ]


@with_fields
def compare(asked: CompareOptions) -> None:
    """Train and compare mechanisms.

    Examples:

    - `lintx compare --data mnist --images 16000 --runs runs/comparison`
    - `lintx compare --attention softmax,linear,linear:feature_map=relu --max-time 20m --match-parameters`
    - `lintx compare --data mnist --runs runs/comparison --no-train --format md --plot comparison.png`

    All runs have the same network except for the attention, the same settings, and the same images in the same order.
    The table shows final validation bits/dim, their difference from the first row on the same images, parameters,
    state, and images/s of training and sampling. Repeating the command continues: finished work is not done again.
    Ctrl-C saves the current run and shows the table.
    """
    _check_options(asked)

    from linformer_cli.comparison.entries import plan_entries
    from linformer_cli.comparison.figures import forget_speeds
    from linformer_cli.comparison.results import ComparisonReport, describe_entries

    plan, conditions = _plan(asked)
    entries, sets = plan_entries(
        options.choose_variants(asked.names, baselines=True), plan, lambda settings: load_training_images(settings.data)
    )
    train = entries[0].config.train
    if asked.train and train.steps is not None and 4 * train.warmup_steps > train.steps and not train.warmup_share:
        warn(f"the learning rate warms up for {train.warmup_steps} steps, a run has {train.steps}; give more --images")
    for entry in entries if asked.retime else []:
        forget_speeds(entry)

    def run(stop: StopRequest) -> "ComparisonReport":
        failures: dict[str, str] = {}
        if asked.train:
            _work(entries, sets, conditions, failures, stop)
        rows = describe_entries(entries, conditions, failures)
        settings = {key: getattr(plan, key) for key in ("images", "max_time", "seeds")}
        settings |= {key: getattr(asked, key) for key in ("batch", "repeats")}
        settings |= {key: getattr(entries[0].config, key) for key in ("data", "train")}
        return ComparisonReport(rows=rows, settings=settings, failures=failures)

    run_and_show(asked.style, asked.json, run, {"plot": asked.plot})


def _check_options(asked: CompareOptions) -> None:
    if asked.retime and not (asked.train and asked.repeats):
        other = "--repeats 0" if asked.train else "--no-train"
        raise UsageError(f"--retime measures and {other} does not; drop one of them")
    if asked.images is not None and "max_time" in asked.training:
        raise UsageError("--images and --max-time both set the length of training; drop one of them")
    options.require_plots(asked.plot)


def _plan(asked: CompareOptions) -> "tuple[Plan, Conditions]":
    from linformer_cli.comparison.entries import DEFAULT_PRESET, Conditions, Plan, choose_training
    from linformer_cli.training.settings import Given, merge_settings

    training = dict(asked.training)
    max_time = training.pop("max_time", None)
    chosen = choose_training(
        asked.config, training | options.without_none({"evaluate_images": asked.evaluate_images}), info
    )
    of_data = {"name": asked.data, "data_dir": asked.data_dir, **asked.pictures}
    data = options.without_none({**of_data, "length": asked.window_length})
    place = choose_device(chosen.device)
    network = merge_settings(Given(asked.preset, data=data), asked.config, images_preset=DEFAULT_PRESET).network
    kind = choose_precision(chosen.precision, place.value, network.width, network.feed_forward)
    info(f"device {place.value} ({place.reason}), precision {kind.value} ({kind.reason})")
    plan = Plan(
        asked.runs,
        _IMAGES if asked.images is None and max_time is None else asked.images,
        max_time,
        asked.match_parameters,
        asked.config,
        asked.preset,
        data,
        chosen.model_dump(include={"evaluate_images", "seed", "device"}) | {"precision": kind.value},
        asked.seeds,
    )
    return plan, Conditions(place.value, kind.value, asked.batch, asked.repeats)


def _work(
    entries: "list[Entry]",
    images: "tuple[ImageSet, ImageSet]",
    conditions: "Conditions",
    failures: dict[str, str],
    stop: StopRequest,
) -> None:
    """Do the remaining work until `stop` is set. Note errors in `failures`."""
    from linformer_cli.comparison.entries import draw_samples, train_entry
    from linformer_cli.comparison.figures import measure_bits, time_sampling_once, time_training_once

    check = stop.raise_if_set
    with contextlib.suppress(Interrupted):
        for entry in entries:
            with _noting(entry, failures):
                if entry.finished is None:
                    info(f"{entry.variant.label}: training in {entry.folder.path}")
                    with TrainingDisplay(words=entry.config.data.words) as display:
                        train_entry(entry, images, conditions, display, stop)
        done = [entry for entry in entries if entry.variant.label not in failures and entry.finished is not None]
        for entry in done:
            check()
            with _noting(entry, failures):
                if draw_samples(entry, conditions.device, check):
                    info(f"wrote {entry.samples_file}")
                measure_bits(entry, images[1], conditions.device, check)
        for _ in range(conditions.repeats):
            for entry in done:
                check()
                if entry.is_timed and entry.variant.label not in failures:
                    with _noting(entry, failures):
                        time_training_once(entry, images, conditions)
                        time_sampling_once(entry, conditions, check)


@contextlib.contextmanager
def _noting(entry: "Entry", failures: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except Interrupted:
        raise
    except Exception as error:
        if not isinstance(error, LintxError) and not is_out_of_memory(error):
            raise
        failures[entry.variant.label] = str(error) if isinstance(error, LintxError) else "out of memory"
        info(f"{entry.variant.label}: {failures[entry.variant.label]}")
