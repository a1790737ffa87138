"""`lintx bench sample`: images per second of sampling, measured so that the figure can be trusted."""

from pathlib import Path
from typing import Annotated, Any

import typer

from linformer_cli.errors import UsageError
from linformer_cli.report import benchmarks

from . import options
from .output import print_json, print_records, talk, write_plot
from .session import open_session

Rerun = Annotated[
    bool, typer.Option("--rerun/--no-rerun", help="Also softmax without a cache, extrapolated from a few positions.")
]
Memory = Annotated[
    bool, typer.Option("--memory/--no-memory", help="Also the peak memory of each row, in a process of its own.")
]


def sample(
    checkpoint: options.CheckpointOption = None,
    names: options.BenchVariants = None,
    presets: options.Presets = None,
    image_sizes: Annotated[
        str | None,
        typer.Option(
            "--image-size",
            help="Pixels a side of square images, separated by commas, for --preset: time against the number of "
            "positions.",
            show_default=False,
            metavar="LIST",
        ),
    ] = None,
    batch: options.Batches = "1,64",
    engine: Annotated[
        str,
        typer.Option(
            "--engine", help="Engines to step with, separated by commas: auto, native, stepwise, cuda, textbook."
        ),
    ] = "auto",
    repeats: options.Repeats = 3,
    rerun: Rerun = True,
    limit: options.RowLimit = "60s",
    memory: Memory = True,
    runs: options.Runs = None,
    plot: options.SpeedPlot = None,
    bits_plot: Annotated[
        Path | None,
        typer.Option("--bits-plot", help="Also bits/dim of --runs against images/s.", show_default=False),
    ] = None,
    device: options.Device = "auto",
    precision: options.SamplingPrecision = options.PrecisionName.AUTO,
    style: options.Style = options.TableFormat.TABLE,
    json: options.Json = False,
) -> None:
    """Measure images/s of sampling, by attention, batch size and network.

    Without --attention and --preset it is this checkpoint's model beside softmax of the same size, or the models of
    --runs. Others are untrained models: of the checkpoint's size, or of --preset. Softmax comes with a key-value cache,
    and re-run at every value.

    One warm-up, then interleaved repeats: the median and quartiles of images per second, seconds an image at batch 1,
    state and peak memory, and the shares of the machine's own matrix products and memory copies, measured in the same
    run. What would take longer than --limit is timed over some steps around the middle of the image; that, and the
    re-run, which is timed at four positions, stands under `extrapolated`. Nothing is timed whose parallel and step form
    disagree. bits/dim come from --runs alone. The paper's presets have its published figures beside ours. Ctrl-C shows
    what was measured.

    Examples:

    - `lintx bench sample`
    - `lintx bench sample --checkpoint runs/first --batch 1,64 --json`
    - `lintx bench sample --attention softmax,linear,lsh:rounds=1 --preset mnist-paper,cifar10-paper --batch 1,16,256`
    - `lintx bench sample --runs runs/comparison --batch 1,64 --no-rerun --bits-plot bits-per-dim.png`
    - `lintx bench sample --engine textbook,auto --no-rerun`
    - `lintx bench sample --preset mnist-small --image-size 16,32,64,128 --batch 1 --no-rerun`
    - `lintx bench sample --batch 256 --format md --no-rerun --no-memory`
    """
    batches = options.parse_sizes(batch, "--batch", "1,64")
    seconds = options.parse_duration(limit)
    if presets is not None and checkpoint is not None:
        raise UsageError("--preset and --checkpoint both name a network; give one of them")
    if presets is None and image_sizes is not None:
        raise UsageError("--image-size is for --preset: a trained model has the images it was trained on")
    sides = None if image_sizes is None else options.parse_sizes(image_sizes, "--image-size", "16,32,64")

    options.require_plots(plot, bits_plot)
    if bits_plot is not None and not runs:
        raise UsageError("--bits-plot draws the bits/dim of trained runs; name them with --runs")

    from linformer_cli.bench.ceilings import Ceilings
    from linformer_cli.bench.run import SamplingPlan, run_sampling_bench
    from linformer_cli.bench.subjects import build_subjects, load_subjects, preset_network, resize_network, with_softmax
    from linformer_cli.bench.trained import read_trained_runs
    from linformer_cli.sampling.engines import AUTO, ENGINES
    from linformer_cli.system.device import choose_device, choose_precision
    from linformer_cli.system.signals import catch_signals

    trained = read_trained_runs(runs or [])
    source: dict[str, Any] = {}

    def choose() -> tuple[str, str]:
        place = choose_device(device).value
        kind = choose_precision(precision.value, place, "sampling")
        talk(f"device {place}, precision {kind.value} ({kind.reason})")
        return place, kind.value

    if presets is None and checkpoint is None and names is None and trained:
        place, kind = choose()
        subjects = load_subjects(trained, place, kind)
    elif presets is None:
        session = open_session(checkpoint, device, precision.value)
        place, kind, source = session.device, session.precision, {"checkpoint": str(session.checkpoint.path)}
        subjects = with_softmax(session.model.config.attention, session.model)
        if names is not None:
            network = session.model.config
            subjects = build_subjects(options.choose_variants(names, True), [(None, network)], place, kind)
    else:
        place, kind = choose()
        networks = [preset_network(name.strip()) for name in presets.split(",")]
        if sides is not None:
            networks = [resize_network(*network, side) for network in networks for side in sides]
        variants = options.choose_variants(names or options.PRESET_VARIANTS, True)
        subjects = build_subjects(variants, networks, place, kind)
    plan = SamplingPlan(
        batches, repeats, rerun, seconds, memory, trained, options.parse_engines(engine, [AUTO, *ENGINES, "stepwise"])
    )
    if bits_plot is not None and all(subject.find_run(trained)["bits_per_dim"] is None for subject in subjects):
        raise UsageError("--bits-plot has nothing to draw: none of --runs is of a model that would be timed")
    with catch_signals() as stop:
        report = run_sampling_bench(subjects, plan, kind, Ceilings(place), talk_about_row, stop.raise_if_set)
    if not report.rows:
        stop.raise_if_set("Stopped before anything was measured")
    if json:
        print_json({**source, **vars(report), "plot": plot, "bits_plot": bits_plot})
    else:
        print_speeds(report.rows, "sampling", style)
        if sides is not None and style is options.TableFormat.TABLE:
            print_position_times(report.rows)
        options.talk_about(report.environment, report.ceilings)
    # Behind the figures, which a plot that cannot be written must not take along.
    write_plot(plot, lambda kind: benchmarks.render_speed(report.rows, kind))
    if benchmarks.trained_rows(report.rows):
        write_plot(bits_plot, lambda kind: benchmarks.render_quality(report.rows, kind))
    elif bits_plot is not None:
        talk(f"no plot in '{bits_plot}': no trained model was timed")
    stop.raise_if_set(options.STOPPED)


def print_speeds(rows: list[dict[str, Any]], kind: str, style: options.TableFormat) -> None:
    """Rows of images per second, of `sampling` or `training`, on stdout."""
    flat = [benchmarks.flatten_speed(row) for row in rows]
    tables, columns = {
        "sampling": (benchmarks.SAMPLING_TABLES, benchmarks.SAMPLING_FILE_COLUMNS),
        "training": (benchmarks.TRAINING_TABLES, benchmarks.TRAINING_FILE_COLUMNS),
    }[kind]
    if style is options.TableFormat.CSV:
        print_records(flat, columns, "csv")
        return
    if style is options.TableFormat.MD:
        print_records(flat, benchmarks.choose_columns(flat, columns, benchmarks.QUALITY), "md")
        return
    for preset in dict.fromkeys(row["preset"] for row in flat):
        if preset is not None:
            print(preset)
        of_preset = [row for row in flat if row["preset"] == preset]
        for table in tables:
            if shown := benchmarks.choose_columns(of_preset, table):
                print_records(of_preset, shown, "table")
                print()


def print_position_times(rows: list[dict[str, Any]]) -> None:
    """Time of one value of one image against the number of positions, on stdout."""
    # A preset is called by its network and the size of its images here.
    flat = [{**benchmarks.flatten_speed(row), "network": row["preset"].partition(",")[0]} for row in rows]

    def method(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[key] for key in ("network", "name", "engine", "batch"))

    methods = list(dict.fromkeys(map(method, flat)))
    flat.sort(key=lambda row: (methods.index(method(row)), row["positions"]))
    print_records(flat, benchmarks.choose_columns(flat, benchmarks.POSITION_COLUMNS), "table")
    print()


def talk_about_row(row: dict[str, Any]) -> None:
    """A long job says what it has."""
    talk(benchmarks.describe_speed(row))
