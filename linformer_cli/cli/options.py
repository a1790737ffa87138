"""Options that several commands share, and texts turned into values."""

import math
import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from linformer_cli.errors import UsageError, unknown_name
from linformer_cli.files import require_writable

from .output import set_quiet, talk

if TYPE_CHECKING:
    from linformer_cli.bench.variants import Variant


Number = TypeVar("Number", int, float)


class PrecisionName(StrEnum):
    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"


class TableFormat(StrEnum):
    TABLE = "table"
    MD = "md"
    CSV = "csv"
    JSON = "json"


def _hush(quiet: bool) -> bool:
    set_quiet(quiet)
    return quiet


Engine = Annotated[
    str,
    typer.Option(
        "--engine",
        help="How to step the model: auto (the fastest that serves it), native (fused kernels, for linear "
        "attention on a CPU with a C++ compiler), cuda (CUDA graphs, for linear attention; never chosen by auto) or "
        "textbook (plain torch, serves everything).",
        metavar="NAME",
    ),
]
CheckpointArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A run, a checkpoint folder or a shipped name; an existing path wins. Default: the shipped mnist-deep.",
        show_default=False,
    ),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint", "-c", help="The same as the argument CHECKPOINT.", show_default=False, metavar="CHECKPOINT"
    ),
]
OnlyCheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        "-c",
        help="A run, a checkpoint folder or a shipped name; an existing path wins. Default: the shipped mnist-deep.",
        show_default=False,
    ),
]
Variants = Annotated[
    str | None,
    typer.Option(
        "--attention",
        help="Mechanisms, separated by commas; default all. With options: linear:chunk=256, or NAME=linear:chunk=256.",
        show_default=False,
        metavar="LIST",
    ),
]
# What a preset is measured with where no mechanism is named.
PRESET_VARIANTS = "linear,softmax"
BenchVariants = Annotated[
    str | None,
    typer.Option(
        "--attention",
        help="Mechanisms, separated by commas; of presets linear,softmax by default. With options: lsh:rounds=1, or "
        "NAME=lsh:rounds=1.",
        show_default=False,
        metavar="LIST",
    ),
]
Presets = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help="Networks, separated by commas, untrained: mnist-paper, cifar10-paper, mnist-small, mnist-wide, tiny. "
        "With linear and softmax, unless --attention says otherwise.",
        show_default=False,
        metavar="LIST",
    ),
]
Batches = Annotated[str, typer.Option("--batch", help="Batch sizes, separated by commas.", metavar="LIST")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Repeats after one warm-up; the median counts.")]
RowLimit = Annotated[str, typer.Option("--limit", help="The most that all repeats of one row should take.")]
Runs = Annotated[
    list[str] | None,
    typer.Option(
        "--runs",
        help="A trained run, or a folder of runs, whose bits/dim stand beside the same model; repeatable.",
        show_default=False,
        metavar="DIR",
    ),
]
SpeedPlot = Annotated[
    Path | None,
    typer.Option("--plot", help="Also images/s against the batch size: .png or .svg.", show_default=False),
]
Style = Annotated[TableFormat, typer.Option("--format", help="How to print; json is --json.")]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed of all random numbers.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:INDEX or mps.", metavar="DEVICE")]
SamplingPrecision = Annotated[
    PrecisionName,
    typer.Option(
        "--precision",
        help="Of weights and activations; sums are float32 always. auto samples in fp32: an image is then the same at "
        "any --batch, but for at most 1 in 100 through rounding. bf16 promises that for one batch size only.",
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Say nothing on stderr but errors and warnings.", callback=_hush)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]
DataDir = Annotated[
    str | None,
    typer.Option(
        "--data-dir",
        help="Where data sets lie or are downloaded to. Default: $LINTX_DATA, else the user's cache.",
        show_default=False,
        metavar="DIR",
    ),
]
ImageSize = Annotated[
    int | None,
    typer.Option(
        "--image-size",
        min=4,
        help="Pixels a side: of glyphs 8 to 512, 28 by default; of folder:PATH 32 by default.",
        show_default=False,
    ),
]
Channels = Annotated[
    int | None,
    typer.Option(
        "--channels",
        help="1 (grey) or 3 (RGB), for folder:PATH; by default 3 where a picture has colours, else 1.",
        show_default=False,
    ),
]
Temperature = Annotated[
    float, typer.Option("--temperature", help="Divides the log probabilities; 1 leaves them. The first filter.")
]
TopK = Annotated[
    int | None, typer.Option("--top-k", help="Keep the K likeliest values. The second filter.", show_default=False)
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", help="Keep the likeliest values up to mass P. The third filter.", show_default=False),
]

# What a benchmark ends with after Ctrl-C, behind the results it had.
STOPPED = "Stopped; what was measured by then is shown"

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "min": 60.0, "s": 1.0, "": 1.0}


def complete_preset() -> list[str]:
    """For the TAB key; Typer leaves out those that begin otherwise."""
    from linformer_cli.presets import PRESETS

    return list(PRESETS)


def parse_duration(text: str) -> float:
    """Seconds of `90`, `90s`, `10m`, `1.5h` or `1h30m`; raises `UsageError` for anything else, and for nothing."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(d|h|min|m|s|)\s*", text.strip().lower())
    if not parts or "".join(re.split(r"\s+", text.strip().lower())) != "".join(n + u for n, u in parts):
        raise UsageError(f"'{text}' is not a time; write 90s, 10m or 1h30m")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if seconds <= 0:
        raise UsageError(f"a time must be above 0, found '{text}'")
    return seconds


def parse_engines(text: str, known: Sequence[str]) -> list[str]:
    """`textbook,auto` as names; raises `UsageError` for one that is not among `known`."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise unknown_name("engine", name, known)
    return names


def parse_sizes(text: str, option: str, example: str) -> list[int]:
    """The numbers of `1,64`; raises `UsageError` for anything else than whole numbers above 0."""
    return _parse_list(text, int, "whole numbers", option, example)


def parse_size(text: str, option: str, example: str) -> int:
    """The number of `16`; raises `UsageError` for anything else than a whole number above 0."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(f"{option} takes a whole number above 0, such as {example}, found '{text}'")


def parse_numbers(text: str, option: str, example: str) -> list[float]:
    """The numbers of `0.5,1`; raises `UsageError` for anything else than finite numbers above 0."""
    return _parse_list(text, float, "numbers", option, example)


def _parse_list(text: str, kind: Callable[[str], Number], wanted: str, option: str, example: str) -> list[Number]:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise UsageError(f"{option} takes {wanted} above 0 separated by commas, such as {example}, found '{text}'")
    return numbers


def choose_variants(names: str | None, baselines: bool = False) -> "list[Variant]":
    """The mechanisms named by `--attention`, or all of the catalogue; with `baselines`, those of whole models too."""
    from linformer_cli.bench.variants import list_variants, parse_variants

    return list_variants(baselines) if names is None else parse_variants(names.split(","), baselines)


def parse_pairs(pairs: list[str] | None, option: str) -> dict[str, str]:
    """`["key=value", ...]` as a dictionary; raises `UsageError` for a text without `=` or a key given twice."""
    values: dict[str, str] = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"{option} takes KEY=VALUE, found '{pair}'")
        if key in values:
            raise UsageError(f"{option} {key} is given twice")
        values[key] = value
    return values


def require_output(option: str, path: str | Path | None, ending: str) -> None:
    """Before any work: `UsageError` for a file whose name promises something else than will be written to it.

    And `LintxError` where it cannot be written. `-` is no file.
    """
    if path is None or str(path) == "-":
        return
    if Path(path).suffix.lower() not in ("", ending):
        kind = ending.removeprefix(".").upper()
        raise UsageError(f"{option} writes a {kind}, found '{path}'; give it a name that ends in {ending}")
    require_writable(path)


def require_plots(*paths: Path | None) -> None:
    """Before anything is measured: `UsageError` for a plot in no format, `LintxError` where it cannot be written."""
    from linformer_cli.report.plots import parse_plot_format

    for path in paths:
        if path is not None:
            parse_plot_format(path)
            require_writable(path)


def one_checkpoint(argument: str | None, option: str | None) -> str | None:
    """The checkpoint, named once: as argument or as option."""
    if argument is not None and option is not None and argument != option:
        raise UsageError(f"two checkpoints are named, '{argument}' and --checkpoint '{option}'; name one")
    return argument if argument is not None else option


def talk_about(environment: dict[str, Any], ceilings: dict[str, Any] | None = None) -> None:
    """The machine behind a benchmark's figures, in a line on stderr; and what it can do at best."""
    talk(f"{environment['processor']}, {environment['threads']} threads, torch {environment['versions']['torch']}")
    if ceilings is None:
        return
    best: dict[str, float] = {}
    for product in ceilings["products"]:
        best[product["precision"]] = max(best.get(product["precision"], 0.0), product["gigaflops"])
    products = ", ".join(f"{speed:.0f} GFLOP/s in {kind}" for kind, speed in sorted(best.items(), reverse=True))
    copied = f"memory copied at {ceilings['copy']['gigabytes_per_second']:.0f} GB/s"
    talk(f"matrix products up to {products}; {copied}" if products else copied)
