"""`lintx bench gpu`: correctness and speed on a GPU in one run."""

import contextlib
from pathlib import Path

from linformer_cli.errors import DisagreementError, Interrupted, UsageError
from linformer_cli.files import require_writable
from . import options
from .config_options import option, with_fields
from .output import info, print_json


@with_fields
def gpu(
    out: Path = option(Path("gpu.json"), "JSON file for the report, rewritten during the benchmark."),
    tiny: bool = option(False, "Trial run with tiny sizes, on any device. Its figures mean nothing.", "--tiny"),
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Check and measure a GPU.

    Examples:

    - `lintx bench gpu --out gpu.json`
    - `lintx bench gpu --tiny --device cpu`

    First compares, on the device, the parallel and step forms of every mechanism, replayed steps and training steps
    with plain ones, kernels with plain torch in float64, and the sampling engine with the model's own step. Then
    measures sampling and training with the networks of Katharopoulos 2020, sampling of 10,000 images of MNIST's size at
    once, and attention alone, beside torch's softmax and, if installed, flash-linear-attention. All of it ends within
    some four minutes: parts that are out of time keep their rows. A part that fails does not stop the others. The exit
    code is 1 if a check or a part failed.
    """
    require_writable(out)

    from linformer_cli.bench.gpu import GpuBench, GpuReport, GpuSizes, full_sizes
    from linformer_cli.files import write_file
    from linformer_cli.report.tables import to_json
    from linformer_cli.system.device import choose_device
    from linformer_cli.system.signals import catch_signals

    place = choose_device(device)
    if not (tiny or place.value.startswith("cuda")):
        raise UsageError(
            f"there is no CUDA device here ({place.reason}); --tiny runs every part at tiny sizes on any device"
        )
    info(f"device {place.value} ({place.reason})")

    def write(report: GpuReport) -> None:
        write_file(out, (to_json(report) + "\n").encode())

    with catch_signals() as stop:
        sizes = GpuSizes() if tiny else full_sizes()
        bench = GpuBench(place.value, sizes, write, info, stop.raise_if_set)
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
