"""Benchmarks of speed: of sampling (`sample`), training (`train`), attention alone (`attention`) and a GPU (`gpu`)."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from linformer_cli.config import LARGEST_SIZE
from linformer_cli.errors import DisagreementError, Interrupted, UsageError
from linformer_cli.files import require_writable
from linformer_cli.system.device import Precision
from . import options
from .config_options import duration, option, several, sizes, with_fields
from .output import info, print_json
from .reports import build_bench, choose_place, run_and_show

if TYPE_CHECKING:
    from linformer_cli.bench.models import BenchModel, TrainedRun

_SCALED = "scaled"  # the batch of bench attention


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    checkpoint: options.CheckpointOption = None
    names: options.BenchVariants = None
    presets: str | None = several(None, "Untrained networks of presets, such as mnist-paper,mnist-small.", "--preset")
    sides: list[int] | None = sizes(None, "Sides of square images for --preset networks.", "--image-size")
    batch: list[int] = sizes("1,64", options.BATCHES)
    engine: str = several("auto", "auto, native, cuda, cuda-fused (or with :state=bf16 or :look-ahead=16), reference.")
    look_ahead: bool = option(True, "Use look-ahead for single images of trained models.")
    repeats: options.Repeats = 3
    rerun: bool = option(True, "Also time softmax without a cache, extrapolated from 4 positions.")
    limit: float = duration("60s", options.ROW_LIMIT)
    memory: bool = option(True, "Also measure the peak memory of each row, in a fresh process.")
    runs: options.Runs = None
    plot: options.SpeedPlot = None
    bits_plot: Path | None = option(None, "Also plot bits/dim of --runs against images/s (.png or .svg).")
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

    Times the checkpoint's model beside a softmax model of the same size, or the models of --runs, or untrained models
    (--attention, --preset). Softmax is timed with a key-value cache, and with the whole prefix read again for every
    value. The table shows images/s, seconds per image at batch 1, state, peak memory, and shares of this machine's
    highest rates. If an image would take longer than --limit, only some steps are timed, and extrapolated figures are
    marked. Ctrl-C shows the results so far.
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
    """Return the models to time, and the checkpoint's path for the JSON document if there is one."""
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


@with_fields
def train(
    names: options.BenchVariants = None,
    presets: str = several("mnist-small", "Networks of presets, such as mnist-paper,cifar10-paper.", "--preset"),
    batch: list[int] = sizes("16", options.BATCHES),
    repeats: options.Repeats = 3,
    engine: str = several("auto", "auto (as lintx train), graph (as with --graph), reference (plain torch)."),
    limit: float = duration("60s", options.ROW_LIMIT),
    runs: options.Runs = None,
    plot: options.SpeedPlot = None,
    device: options.Device = "auto",
    precision: str = several("auto", "auto (the faster one, or fp32 with engine reference), fp32, bf16."),
    style: options.Style = "table",
    json: options.Json = False,
) -> None:
    """Measure images/s of whole training steps.

    Examples:

    - `lintx bench train --attention softmax,linear,lsh:rounds=1 --preset mnist-paper --batch 4,16`
    - `lintx bench train --attention linear --engine reference,auto --precision fp32,bf16`
    - `lintx bench train --preset mnist-paper,cifar10-paper --batch 1 --format md`

    A step is that of `lintx train`, with the training settings of the preset and random images. The table shows
    images/s, and the rate of matrix products as a share of this machine's highest rate. A row that would take longer
    than --limit has fewer repeats. Ctrl-C shows the results so far.
    """
    options.require_plots(plot)
    variants = options.choose_variants(names or options.PRESET_VARIANTS, True)

    from linformer_cli.bench.models import build_models, preset_network, read_trained_runs
    from linformer_cli.bench.train import ENGINES, TrainingSettings, run_training_bench
    from linformer_cli.probe import choose_precision
    from linformer_cli.sampling.engines import REFERENCE
    from linformer_cli.system.device import choose_device

    engines = options.parse_names(engine, "engine", ENGINES)
    wanted = options.parse_names(precision, "precision", get_args(Precision))
    trained = read_trained_runs(runs or [])
    place = choose_device(device).value
    networks = [preset_network(name.strip()) for name in presets.split(",")]
    widths = networks[0][1].width, networks[0][1].feed_forward
    kinds = {name: choose_precision(cast(Precision, name), place, *widths) for name in wanted}
    info(f"device {place}, precision {', '.join(f'{kind.value} ({kind.reason})' for kind in kinds.values())}")
    pairs = [
        (name, "fp32" if name == REFERENCE and kind == "auto" else kinds[kind].value)
        for name in engines
        for kind in kinds
    ]
    models = build_models(variants, networks, place, "fp32")
    settings = TrainingSettings(batch, list(dict.fromkeys(pairs)), repeats, limit, trained)
    plots = {"plot": plot}
    run_and_show(style, json, lambda stop: run_training_bench(models, settings, build_bench(place, stop)), plots)


@with_fields
def attention(
    names: options.Variants = None,
    positions: list[int] = sizes("512,1024,2048,4096,8192,16384,32768,65536", "Sequence lengths T."),
    batch: str = option(
        _SCALED, "Sequences per pass. 'scaled' means 65,536 / T, but at least 1.", metavar="NUMBER|scaled"
    ),
    heads: int = option(1, "Number of heads.", min=1, max=LARGEST_SIZE),
    head_width: int = option(32, "Width of a head.", min=1, max=LARGEST_SIZE),
    repeats: options.Repeats = 5,
    limit: float = duration("60s", "Time limit for all passes of one mechanism at one T."),
    device: options.Device = "auto",
    plot: Path | None = option(None, "Also plot time and memory against T (.png or .svg)."),
    style: options.Style = "table",
    json: options.Json = False,
) -> None:
    """Measure how time and memory grow with T.

    Examples:

    - `lintx bench attention --attention linear,softmax --positions 1024,4096 --batch 1 --format md`
    - `lintx bench attention --attention linear,linear:chunk=256 --limit 10s --json`
    - `lintx bench attention --attention linear,softmax,lsh --plot scaling.png`

    Times forward and backward passes of each mechanism alone, in float32. The first table shows time and peak memory
    per sequence. A second one shows the exponents p of the growth T^p, the longest T that each mechanism can handle,
    and the T above which it is faster than softmax. Ctrl-C shows the results so far.
    """
    options.require_plots(plot)
    size = None if batch == _SCALED else options.parse_size(batch, "--batch", f"16, or {_SCALED}")

    from linformer_cli.bench.attention import AttentionSettings, run_attention_bench

    place = choose_place(device)
    variants = options.choose_variants(names)
    settings = AttentionSettings(repeats, limit, heads, head_width, place, size)
    run_and_show(
        style,
        json,
        lambda stop: run_attention_bench(variants, positions, settings, build_bench(place, stop)),
        {"plot": plot},
    )


@with_fields
def gpu(
    out: Path = option(Path("gpu.json"), "JSON file for the report, rewritten during the benchmark."),
    tiny: bool = option(False, "Try it with tiny sizes, on any device. The figures mean nothing.", "--tiny"),
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Check and measure a GPU.

    Examples:

    - `lintx bench gpu --out gpu.json`
    - `lintx bench gpu --tiny --device cpu`

    Compares kernels, steps and graphs on the device with plain torch. Then measures sampling, training and attention
    alone. All of it takes some four minutes; a part that fails does not stop the others. The exit code is 1 if a check
    or a part failed.
    """
    require_writable(out)

    from linformer_cli.bench.gpu import GpuBench, GpuReport, GpuSizes, full_sizes
    from linformer_cli.files import write_file
    from linformer_cli.report.tables import to_json
    from linformer_cli.system.device import choose_device
    from linformer_cli.system.signals import catch_signals

    place = choose_device(device)
    if not (tiny or place.value.startswith("cuda")):
        hint = "--tiny runs every part at tiny sizes on any device"
        raise UsageError(f"there is no CUDA device here ({place.reason}); {hint}")
    info(f"device {place.value} ({place.reason})")

    def write(report: GpuReport) -> None:
        write_file(out, (to_json(report) + "\n").encode())

    with catch_signals() as stop:
        bench = GpuBench(place.value, GpuSizes() if tiny else full_sizes(), write, info, stop.raise_if_set)
        with contextlib.suppress(Interrupted):  # the results so far are written below, before the command ends
            bench.run()
        write(bench.result)
    info(f"wrote {out}")
    if json:
        print_json(bench.result)
    stop.raise_if_set("Stopped; the results so far are kept")
    if not bench.result.passed:
        wrong = [check.name for check in bench.result.checks if not check.passed]
        raise DisagreementError(f"failed: {', '.join([*wrong, *bench.result.failed])[:300]}")
