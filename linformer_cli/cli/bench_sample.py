"""`lintx bench sample`: images per second of sampling."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from linformer_cli.errors import UsageError

from . import options
from .config_options import option, several, with_fields
from .output import info

if TYPE_CHECKING:
    from linformer_cli.bench.models import BenchModel, TrainedRun
    from linformer_cli.bench.rounds import BenchReport
    from linformer_cli.bench.rows import SamplingRow
    from linformer_cli.model.variants import Variant

    from .bench_output import Plots


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """The options of the command."""

    checkpoint: options.CheckpointOption = None
    names: options.BenchVariants = None
    presets: options.Presets = None
    image_sizes: str | None = several(
        None, "Side lengths of square images, separated by commas, at which to time --preset networks.", "--image-size"
    )
    batch: options.Batches = "1,64"
    engine: str = several("auto", "Engines, separated by commas: auto, native, cuda, reference.")
    look_ahead: bool = option(
        True, "Let the native engine compute several values of a single image at once (trained models only)."
    )
    repeats: options.Repeats = 3
    rerun: bool = option(True, "Also time softmax without a cache, extrapolated from 4 positions.")
    limit: options.RowLimit = "60s"
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

    By default, times the checkpoint's model and a softmax model of the same size. With --runs alone, times the models
    of the runs. With --attention or --preset, times untrained models of the checkpoint's or the preset's size. Softmax
    is timed in two ways: with a key-value cache, and with the whole prefix read again for every value.

    Repeats of all rows are interleaved. The table shows the median and quartiles of images/s, seconds per image at
    batch 1, state and peak memory, and the rates of matrix products and memory traffic as shares of this machine's
    highest rates. If an image would take longer than --limit, only some steps around its middle are timed, and the
    extrapolated figures are marked. Mechanisms whose parallel and step forms disagree are not timed. Ctrl-C shows the
    results so far.

    Examples:

    - `lintx bench sample --checkpoint runs/first --batch 1,64 --json`
    - `lintx bench sample --attention softmax,linear,lsh:rounds=1 --preset mnist-paper,cifar10-paper --batch 1,16,256`
    - `lintx bench sample --runs runs/comparison --no-rerun --bits-plot bits-per-dim.png`
    - `lintx bench sample --preset mnist-small --image-size 16,32,64,128 --batch 1 --engine reference,auto`
    """
    _check_options(asked)
    batches = options.parse_sizes(asked.batch, "--batch", "1,64")
    seconds = options.parse_duration(asked.limit)
    sides = None if asked.image_sizes is None else options.parse_sizes(asked.image_sizes, "--image-size", "16,32,64")
    variants = None if asked.names is None else options.choose_variants(asked.names, True)

    from linformer_cli.bench.columns import SAMPLING
    from linformer_cli.bench.models import read_trained_runs
    from linformer_cli.bench.sample import SamplingSettings, run_sampling_bench
    from linformer_cli.sampling.engines import AUTO, ENGINES
    from linformer_cli.sampling.precision import choose_formats

    from .bench_output import print_position_times, print_speeds, run_and_show

    engines = options.parse_names(asked.engine, "engine", [AUTO, *ENGINES])
    trained = read_trained_runs(asked.runs or [])
    models, source = _choose_models(asked, sides, variants, trained)
    if asked.bits_plot is not None and all(timed.find_quality(trained).bits_per_dim is None for timed in models):
        raise UsageError("--bits-plot has nothing to plot: no run in --runs has a model that would be timed")
    kind, formats = choose_formats(asked.precision, models[0].model)
    place = str(models[0].model.device)
    info(f"device {place}, precision {kind.value} ({kind.reason})")
    settings = SamplingSettings(
        batches,
        asked.repeats,
        engines,
        look_ahead=asked.look_ahead,
        rerun=asked.rerun,
        limit_seconds=seconds,
        memory=asked.memory,
        runs=trained,
        formats=formats,
    )

    def show(report: "BenchReport[SamplingRow]") -> None:
        print_speeds(report.rows, SAMPLING, asked.style)
        if sides is not None and asked.style == "table":
            print_position_times(report.rows)

    run_and_show(
        place,
        lambda bench: run_sampling_bench(models, settings, bench),
        show,
        lambda report: _list_plots(report, asked.plot, asked.bits_plot),
        source if asked.json else None,
    )


def _check_options(asked: SampleOptions) -> None:
    if asked.presets is not None and asked.checkpoint is not None:
        raise UsageError("--preset and --checkpoint both name a network; give one of them")
    if asked.presets is None and asked.image_sizes is not None:
        raise UsageError("--image-size is for --preset: a trained model has the image size it was trained on")
    options.require_plots(asked.plot, asked.bits_plot)
    if asked.bits_plot is not None and not asked.runs:
        raise UsageError("--bits-plot plots the bits/dim of trained runs; name them with --runs")


def _list_plots(report: "BenchReport[SamplingRow]", plot: Path | None, bits_plot: Path | None) -> "Plots":
    from linformer_cli.bench.figures import render_quality, render_speed, trained_rows

    if bits_plot is not None and not trained_rows(report.rows):
        info(f"no plot in '{bits_plot}': no trained model was timed")
        bits_plot = None
    return {
        "plot": (plot, lambda kind: render_speed(report.rows, kind)),
        "bits_plot": (bits_plot, lambda kind: render_quality(report.rows, kind)),
    }


def _choose_models(
    asked: SampleOptions, sides: list[int] | None, variants: "list[Variant] | None", trained: "list[TrainedRun]"
) -> "tuple[list[BenchModel], dict[str, str]]":
    """Return the models to time, and the checkpoint's path for the JSON document if there is one.

    The models are untrained networks of the presets' sizes or of the checkpoint's, the models of the runs, or the
    checkpoint's own and a softmax model.
    """
    from linformer_cli.bench.models import build_models, load_models, preset_network, resize_network, with_softmax
    from linformer_cli.checkpoint import open_checkpoint, read_checkpoint
    from linformer_cli.system.device import choose_device, torch_dtype

    place, precision = choose_device(asked.device).value, asked.precision
    if asked.presets is not None:
        networks = [preset_network(name.strip()) for name in asked.presets.split(",")]
        if sides is not None:
            networks = [resize_network(*network, side) for network in networks for side in sides]
        variants = variants or options.choose_variants(options.PRESET_VARIANTS, True)
        return build_models(variants, networks, place, precision), {}
    if asked.checkpoint is None and variants is None and trained:
        return load_models(trained, place, precision), {}
    if variants is not None:
        found = read_checkpoint(asked.checkpoint)
        return build_models(variants, [(None, found.info.model)], place, precision), {"checkpoint": found.name}
    found, model = open_checkpoint(asked.checkpoint, place, torch_dtype(precision))
    return with_softmax(model.config.attention, model), {"checkpoint": found.name}
