"""`lintx bench train`: images per second of whole training steps."""

from typing import cast, get_args

from linformer_cli.system.device import Precision
from . import options
from .config_options import duration, several, sizes, with_fields
from .output import info
from .reports import build_bench, run_and_show


@with_fields
def train(
    names: options.BenchVariants = None,
    presets: str = several("mnist-small", "Networks, separated by commas: mnist-paper, cifar10-paper, ...", "--preset"),
    batch: list[int] = sizes("16", options.BATCHES),
    repeats: options.Repeats = 3,
    engine: str = several(
        "auto",
        "Engines, separated by commas. 'auto' computes as lintx train does, with compiled kernels where the "
        "attention has them, and 'graph' as with --graph. 'reference' is plain torch.",
    ),
    limit: float = duration("60s", options.ROW_LIMIT),
    runs: options.Runs = None,
    plot: options.SpeedPlot = None,
    device: options.Device = "auto",
    precision: str = several(
        "auto",
        "Precisions of matrix products, separated by commas: auto, fp32, bf16. 'auto' means the faster one "
        "with engine auto, and fp32 with engine reference.",
    ),
    style: options.Style = "table",
    json: options.Json = False,
) -> None:
    """Measure images/s of whole training steps.

    Examples:

    - `lintx bench train --attention softmax,linear,lsh:rounds=1 --preset mnist-paper --batch 4,16`
    - `lintx bench train --attention linear --engine reference,auto --precision fp32,bf16`
    - `lintx bench train --preset mnist-paper,cifar10-paper --batch 1 --format md`

    A step is the same as in `lintx train`: forward pass, backward pass, clipping and optimizer, with the training
    settings of the preset. The images are random. Repeats of all rows are interleaved, after one warm-up step. The
    table shows the median and quartiles of images/s, and the rate of matrix products as a share of this machine's
    highest rate. A row that would take longer than --limit has fewer repeats and says so. Mechanisms whose parallel and
    step forms disagree are not timed. Ctrl-C shows the results so far.
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
    run_and_show(
        style, json, lambda stop: run_training_bench(models, settings, build_bench(place, stop)), {"plot": plot}
    )
