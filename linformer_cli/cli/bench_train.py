"""`lintx bench train`: images per second of whole training steps."""

from typing import Annotated

import typer

from linformer_cli.report import benchmarks

from . import options
from .bench_sample import print_speeds, talk_about_row
from .output import print_json, talk, write_plot

TrainingPrecision = Annotated[
    options.PrecisionName,
    typer.Option("--precision", help="Of matrix products. auto trains in bf16 where the hardware multiplies it."),
]
TrainingPresets = Annotated[
    str, typer.Option("--preset", help="Networks, separated by commas: mnist-paper, cifar10-paper, ...", metavar="LIST")
]
TrainingEngines = Annotated[
    str,
    typer.Option(
        "--engine",
        help="Separated by commas: auto, as a run computes, with kernels compiled for linear attention on a CPU; "
        "textbook, plain torch in float32.",
        metavar="LIST",
    ),
]


def train(
    names: options.BenchVariants = None,
    presets: TrainingPresets = "mnist-small",
    batch: options.Batches = "16",
    repeats: options.Repeats = 3,
    engine: TrainingEngines = "auto",
    limit: options.RowLimit = "60s",
    runs: options.Runs = None,
    plot: options.SpeedPlot = None,
    device: options.Device = "auto",
    precision: TrainingPrecision = options.PrecisionName.AUTO,
    style: options.Style = options.TableFormat.TABLE,
    json: options.Json = False,
) -> None:
    """Measure images/s of whole training steps.

    A step is what `lintx train` does: forward, backward, clipping and the optimizer, by the recipe of the preset, on
    random images. One warm-up, then interleaved repeats; the median and quartiles of images per second, and the share
    of the machine's own matrix products. Where repeats would take longer than --limit there are fewer, and the row says
    so. Nothing is timed whose parallel and step form disagree. Ctrl-C shows what was measured.

    Examples:

    - `lintx bench train`
    - `lintx bench train --attention softmax,linear,lsh:rounds=1 --preset mnist-paper --batch 4,16`
    - `lintx bench train --attention linear --preset mnist-small,mnist-paper --engine textbook,auto`
    - `lintx bench train --preset mnist-paper,cifar10-paper --batch 1 --format md`
    """
    batches = options.parse_sizes(batch, "--batch", "4,16")
    seconds = options.parse_duration(limit)

    options.require_plots(plot)

    from linformer_cli.bench.ceilings import Ceilings
    from linformer_cli.bench.subjects import build_subjects, preset_network
    from linformer_cli.bench.trained import read_trained_runs
    from linformer_cli.bench.training import ENGINES, run_training_bench
    from linformer_cli.sampling.engines import TEXTBOOK
    from linformer_cli.system.device import choose_device, choose_precision
    from linformer_cli.system.signals import catch_signals

    engines = options.parse_engines(engine, ENGINES)
    trained = read_trained_runs(runs or [])
    place = choose_device(device).value
    kind = choose_precision(precision.value, place, "training")
    textbook = "; textbook fp32" if TEXTBOOK in engines and kind.value != "fp32" else ""
    talk(f"device {place}, precision {kind.value} ({kind.reason}){textbook}")
    networks = [preset_network(name.strip()) for name in presets.split(",")]
    subjects = build_subjects(options.choose_variants(names or options.PRESET_VARIANTS, True), networks, place, "fp32")
    with catch_signals() as stop:
        report = run_training_bench(
            subjects,
            batches,
            repeats,
            kind.value,
            seconds,
            trained,
            Ceilings(place),
            talk_about_row,
            stop.raise_if_set,
            engines=engines,
        )
    if not report.rows:
        stop.raise_if_set("Stopped before anything was measured")
    if json:
        print_json({**vars(report), "plot": plot})
    else:
        print_speeds(report.rows, "training", style)
        options.talk_about(report.environment, report.ceilings)
    write_plot(plot, lambda form: benchmarks.render_speed(report.rows, form))
    stop.raise_if_set(options.STOPPED)
