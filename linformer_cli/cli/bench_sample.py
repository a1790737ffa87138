"""`lintx bench sample`: images per second of sampling."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from linformer_cli.errors import UsageError
from linformer_cli.presets import PRESETS
from . import options
from .config_options import duration, option, several, sizes, with_fields
from .output import info
from .reports import build_bench, run_and_show

if TYPE_CHECKING:
    from linformer_cli.bench.models import BenchModel, TrainedRun


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    checkpoint: options.CheckpointOption = None
    names: options.BenchVariants = None
    presets: str | None = several(None, f"Untrained networks, separated by commas: {', '.join(PRESETS)}.", "--preset")
    sides: list[int] | None = sizes(
        None, "Side lengths of square images, separated by commas, at which to time --preset networks.", "--image-size"
    )
    batch: list[int] = sizes("1,64", options.BATCHES)
    engine: str = several("auto", "Engines, separated by commas: auto, native, cuda, reference.")
    look_ahead: bool = option(
        True, "Let the native engine compute several values of a single image at once (trained models only)."
    )
    repeats: options.Repeats = 3
    rerun: bool = option(True, "Also time softmax without a cache, extrapolated from 4 positions.")
    limit: float = duration("60s", options.ROW_LIMIT)
    memory: bool = option(True, "Also measure the peak memory of each row, in a fresh process.")
    runs: options.Runs = None
    plot: options.SpeedPlot = None
    bits_plot: Path | None = option(None, "Also plot bits/dim of --runs against images/s to a .png or .svg file.")
    device: options.Device = "auto"
    precision: options.SamplingPrecision = "auto"
    style: options.Style = "table"
    json: options.Json = False


@with_fields
def sample(asked: SampleOptions) -> None:
    """Measure images/s of sampling.

    Examples:

    - `lintx bench sample --checkpoint runs/first --batch 1,64 --json`
    - `lintx bench sample --attention softmax,linear,lsh:rounds=1 --preset mnist-paper,cifar10-paper --batch 1,16,256`
    - `lintx bench sample --runs runs/comparison --no-rerun --bits-plot bits-per-dim.png`
    - `lintx bench sample --preset mnist-small --image-size 16,32,64,128 --batch 1 --engine reference,auto`

    By default, times the checkpoint's model and a softmax model of the same size. With --runs alone, times the models
    of the runs. With --attention or --preset, times untrained models of the checkpoint's or the preset's size. Softmax
    is timed in two ways: with a key-value cache, and with the whole prefix read again for every value.

    Repeats of all rows are interleaved. The table shows the median and quartiles of images/s, seconds per image at
    batch 1, state and peak memory, and the rates of matrix products and memory traffic as shares of this machine's
    highest rates. If an image would take longer than --limit, only some steps around its middle are timed, and the
    extrapolated figures are marked. Mechanisms whose parallel and step forms disagree are not timed. Ctrl-C shows the
    results so far.
    """
    _check_options(asked)

    from linformer_cli.bench.models import read_trained_runs
    from linformer_cli.bench.sample import SamplingSettings, run_sampling_bench
    from linformer_cli.sampling.engines import AUTO, ENGINES
    from linformer_cli.sampling.precision import choose_formats

    engines = options.parse_names(asked.engine, "engine", [AUTO, *ENGINES])
    trained = read_trained_runs(asked.runs or [])
    models, source = _choose_models(asked, trained)
    if asked.bits_plot is not None and all(timed.find_quality(trained).bits_per_dim is None for timed in models):
        raise UsageError("--bits-plot has nothing to plot: no run in --runs has a model that would be timed")
    kind, formats = choose_formats(asked.precision, models[0].model)
    place = str(models[0].model.device)
    info(f"device {place}, precision {kind.value} ({kind.reason})")
    settings = SamplingSettings(
        asked.batch,
        asked.repeats,
        engines,
        look_ahead=asked.look_ahead,
        rerun=asked.rerun,
        limit_seconds=asked.limit,
        memory=asked.memory,
        runs=trained,
        formats=formats,
    )
    run_and_show(
        asked.style,
        asked.json,
        lambda stop: run_sampling_bench(models, settings, build_bench(place, stop)),
        {"plot": asked.plot, "bits_plot": asked.bits_plot},
        source,
    )


def _check_options(asked: SampleOptions) -> None:
    if asked.presets is not None and asked.checkpoint is not None:
        raise UsageError("--preset and --checkpoint both name a network; give one of them")
    if asked.presets is None and asked.sides is not None:
        raise UsageError("--image-size is for --preset: a trained model has the image size it was trained on")
    options.require_plots(asked.plot, asked.bits_plot)
    if asked.bits_plot is not None and not asked.runs:
        raise UsageError("--bits-plot plots the bits/dim of trained runs; name them with --runs")


def _choose_models(asked: SampleOptions, trained: "list[TrainedRun]") -> "tuple[list[BenchModel], dict[str, str]]":
    """Return the models to time, and the checkpoint's path for the JSON document if there is one.

    The models are untrained networks of the presets' sizes or of the checkpoint's, the models of the runs, or the
    checkpoint's own and a softmax model.
    """
    from linformer_cli.bench.models import build_models, load_models, preset_network, resize_network, with_softmax
    from linformer_cli.checkpoint import open_checkpoint, read_checkpoint
    from linformer_cli.system.device import choose_device, torch_dtype

    names = asked.names or (options.PRESET_VARIANTS if asked.presets else None)
    variants = None if names is None else options.choose_variants(names, True)
    place, precision = choose_device(asked.device).value, asked.precision
    if asked.presets is not None:
        networks = [preset_network(name.strip()) for name in asked.presets.split(",")]
        if asked.sides is not None:
            networks = [resize_network(*network, side) for network in networks for side in asked.sides]
        return build_models(variants or [], networks, place, precision), {}
    if asked.checkpoint is None and variants is None and trained:
        return load_models(trained, place, precision), {}
    if variants is not None:
        found = read_checkpoint(asked.checkpoint)
        return build_models(variants, [(None, found.info.model)], place, precision), {"checkpoint": found.name}
    found, model = open_checkpoint(asked.checkpoint, place, torch_dtype(precision))
    return with_softmax(model.config.attention, model), {"checkpoint": found.name}
