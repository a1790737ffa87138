"""Options that several commands share, and functions that parse their values."""

import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from linformer_cli.config import CLASS_GUIDANCE, LARGEST_GUIDANCE, LARGEST_SIZE
from linformer_cli.errors import UsageError, unknown_name
from linformer_cli.files import STREAM, is_special, require_writable
from linformer_cli.report.tables import TableStyle
from linformer_cli.system.device import SamplingPrecision as SamplingPrecisionName
from .output import set_quiet

if TYPE_CHECKING:
    from linformer_cli.model.mixers import Variant

Number = TypeVar("Number", int, float)

# This bound is far above any use. It keeps products of several such numbers within 64 bits.
LARGEST_COUNT = 2**24
LONGEST_SECONDS = 3_650 * 86_400.0

# Options below the others on a help page.
_more = functools.partial(typer.Option, rich_help_panel="More options")
_filter = functools.partial(typer.Option, rich_help_panel="Filters")


def _use_plugins(files: list[str] | None) -> None:
    for file in files or []:
        if not os.path.isfile(file):
            raise UsageError(f"--plugin takes a Python file, such as mine.py, found '{file}'")
    if files:
        # `attention.plugins`, which loads torch, reads it, also in other processes of the command.
        os.environ["LINTX_PLUGIN"] = os.pathsep.join(map(os.path.abspath, files))


Plugins = Annotated[
    list[str] | None,
    _more(
        "--plugin", help="Adds mechanisms; repeatable.", metavar="FILE.py", callback=_use_plugins, expose_value=False
    ),
]

Engine = Annotated[
    str,
    _more(
        "--engine",
        help="auto (the fastest), native (C++ on a CPU), cuda (CUDA graphs), cuda-fused (fewer kernels, not yet run on "
        "a GPU), cuda-fused:state=bf16 (the same with sums in bfloat16), cuda-fused:look-ahead=16 (the same, several "
        "values of an image at once) or reference (plain torch).",
        metavar="NAME",
    ),
]
_CHECKPOINT = "A run, checkpoint, shipped model or hf:USER/NAME. Default: mnist-deep."
CheckpointArgument = Annotated[str | None, typer.Argument(metavar="CHECKPOINT", help=_CHECKPOINT)]
CheckpointOption = Annotated[str | None, typer.Option("--checkpoint", help=_CHECKPOINT, metavar="CHECKPOINT")]
_VARIANTS = "Mechanisms, such as linear,lsh:rounds=1 or NAME=lsh:rounds=1 (tables show NAME). "
Variants = Annotated[str | None, typer.Option("--attention", help=f"{_VARIANTS}Default: all.", metavar="LIST")]
BATCHES = "Batch sizes."
ROW_LIMIT = "Time limit for all repeats of one row."
PRESET_VARIANTS = "linear,softmax"  # the default mechanisms for measurements of presets
_BENCH_VARIANTS = f"{_VARIANTS}Default with --preset: {PRESET_VARIANTS}."
BenchVariants = Annotated[str | None, typer.Option("--attention", help=_BENCH_VARIANTS, metavar="LIST")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, max=LARGEST_COUNT, help="Timed repeats.")]
Runs = Annotated[
    list[str] | None,
    typer.Option(
        "--runs",
        help="A run or a folder of runs, whose bits/dim are shown beside the same model; repeatable.",
        metavar="DIR",
    ),
]
SpeedPlot = Annotated[Path | None, typer.Option("--plot", help="Also plot images/s against batch size (.png or .svg).")]
Style = Annotated[TableStyle, _more("--format", help="Table format.")]
Seed = Annotated[int, _more("--seed", min=0, max=2**63 - 1, help="Random seed.")]
Device = Annotated[str, _more("--device", help="auto, cpu, cuda, cuda:INDEX or mps.", metavar="DEVICE")]
SamplingPrecision = Annotated[
    SamplingPrecisionName,
    _more(
        "--precision",
        help="Of weights and activations. int8 needs the native engine, where auto selects it unless fp32 is more than "
        "5 % faster.",
    ),
]
Quiet = Annotated[bool, _more("--quiet", "-q", help="Print only errors and warnings.", callback=set_quiet)]
Json = Annotated[bool, _more("--json", help="Print JSON.")]
ModelData = Annotated[str | None, typer.Option("--data", help="Data set. Default: the model's own.", metavar="NAME")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Use only the first N images.")]
_DATA_DIR = "Folder of data sets. Default: $LINTX_DATA, or the user's cache."
DataDir = Annotated[str | None, _more("--data-dir", help=_DATA_DIR, metavar="DIR")]
_LENGTH = "Bytes in a window, for bytes:PATH. Default: 1024."
WindowLength = Annotated[int | None, typer.Option("--length", min=2, max=LARGEST_SIZE, help=_LENGTH)]
EvaluatedLength = Annotated[
    int | None,
    typer.Option(
        "--length", min=2, max=LARGEST_SIZE, help="Bytes in a window, for a model of bytes. Default: as in training."
    ),
]
Scale = Annotated[int | None, typer.Option("--scale", min=1, max=64, help="Factor by which pixels are enlarged.")]
_GUIDANCE = (
    "How closely images follow their class. Other values than 1 need --hide-class in training, and twice the time."
)
Guidance = Annotated[float, typer.Option("--guidance", min=0, max=LARGEST_GUIDANCE, help=_GUIDANCE)]
ClassGuidance = Annotated[
    float | None,
    typer.Option(
        "--guidance",
        min=0,
        max=LARGEST_GUIDANCE,
        help=f"{_GUIDANCE} Default: {CLASS_GUIDANCE} with --class for such a model, otherwise 1.",
    ),
]
Temperature = Annotated[float, _filter("--temperature", help="Divide log probabilities by X. Applied first.")]
TopK = Annotated[int | None, _filter("--top-k", help="Keep the N likeliest values. Applied second.")]
_TOP_P = "Keep the likeliest values that reach probability X. Applied third."
TopP = Annotated[float | None, _filter("--top-p", help=_TOP_P)]

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "min": 60.0, "s": 1.0, "": 1.0}


def parse_duration(text: str) -> float:
    """Parse seconds in `90`, `10m`, `1.5h` or `1h30m`, up to `LONGEST_SECONDS`. Raises `UsageError` for other texts."""
    number = r"\d+(?:\.\d+)?"
    if not re.fullmatch(rf"{number}|(?:{number}\s*(?:d|h|min|m|s)\s*)+", given := text.strip().lower()):
        raise UsageError(f"'{text}' is not a time; write 90s, 10m or 1h30m")
    seconds = sum(float(amount) * _UNITS[unit] for amount, unit in re.findall(rf"({number})\s*([a-z]*)", given))
    if seconds <= 0:
        raise UsageError(f"a time must be above 0, found '{text}'")
    if seconds > LONGEST_SECONDS:
        raise UsageError(f"a time can be at most {LONGEST_SECONDS / 86400:g} days, found '{text}'")
    return seconds


def parse_names(text: str, kind: str, known: Sequence[str]) -> list[str]:
    """Return the names in a text such as `reference,auto`. Raises `UsageError` for a name that is not in `known`."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise unknown_name(kind, name, known)
    return names


def parse_sizes(text: str, option: str) -> list[int]:
    """Return the numbers in a text such as `1,64`. Raises `UsageError` unless all are from 1 to `LARGEST_COUNT`."""
    return _parse_list(text, int, "whole numbers", LARGEST_COUNT, option, "16,64")


def parse_size(text: str, option: str, example: str) -> int:
    """Return the number in a text such as `16`. Raises `UsageError` unless it is from 1 to `LARGEST_COUNT`."""
    if not text.isdecimal() or not text.strip("0"):
        raise UsageError(f"{option} takes a whole number above 0, such as {example}, found '{text}'")
    return parse_sizes(text, option)[0]


def parse_numbers(text: str, option: str) -> list[float]:
    """Return the numbers in a text such as `0.5,1`. Raises `UsageError` unless all are finite and above 0."""
    return _parse_list(text, float, "numbers", math.inf, option, "0.5,1")


def _parse_list(
    text: str, kind: Callable[[str], Number], wanted: str, most: float, option: str, example: str
) -> list[Number]:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:  # int() also raises it for thousands of digits
        numbers = []
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise UsageError(f"{option} takes {wanted} above 0 separated by commas, such as {example}, found '{text}'")
    if max(numbers) > most:
        raise UsageError(f"{option} takes {wanted} up to {most:.15g}, found '{text}'")
    return numbers


def choose_variants(names: str | None, baselines: bool = False) -> "list[Variant]":
    """Return the mechanisms named by `--attention`, by default all. `baselines` adds `lstm` and `none`."""
    from linformer_cli.model.mixers import list_variants, parse_variants

    return list_variants(baselines) if names is None else parse_variants(names.split(","), baselines)


def without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def parse_pairs(pairs: list[str] | None, option: str) -> dict[str, str]:
    """Return `["key=value", ...]` as a dictionary. Raises `UsageError` for a text without `=` or a key given twice."""
    values: dict[str, str] = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"{option} takes KEY=VALUE, found '{pair}'")
        if key in values:
            raise UsageError(f"{option} {key} is given twice")
        values[key] = value
    return values


def require_output(option: str, path: str | Path | None, ending: str, stdout: bool = False) -> None:
    """Check an output file before any work: its ending (`UsageError`), and that it can be written (`LintxError`)."""
    if path is None or (stdout and str(path) == STREAM):
        return
    if str(path) == STREAM:
        raise UsageError(f"{option} cannot write to stdout; give it the name of a file")
    if Path(path).suffix.lower() not in ("", ending):
        kind = ending.removeprefix(".").upper()
        raise UsageError(f"{option} writes a {kind}, found '{path}'; give it a name that ends in {ending}")
    require_writable(path)


def require_distinct(*paths: str | Path | None) -> None:
    """Raise `UsageError` if two output files have the same path. Devices are exempt."""
    seen = set()
    for path in paths:
        if path is None or str(path) == STREAM or is_special(Path(path)):
            continue
        if (place := os.path.realpath(path)) in seen:
            raise UsageError(f"two outputs have the path '{path}'; choose another path for one of them")
        seen.add(place)


def require_inputs_kept(inputs: Iterable[str | Path], *outputs: str | Path | None) -> None:
    """Raise `UsageError` if an output file is also one of the inputs."""
    replaced = {os.path.realpath(path) for path in outputs if path is not None}
    for path in inputs:
        if os.path.realpath(path) in replaced:
            raise UsageError(f"'{path}' is one of the inputs and would be replaced; choose another output file")


def require_plots(*paths: Path | None) -> None:
    """Check plot files before any work: their formats (`UsageError`), and that they can be written (`LintxError`)."""
    from linformer_cli.report.plots import parse_plot_format

    require_distinct(*paths)
    for path in paths:
        if path is not None:
            parse_plot_format(path)
            require_writable(path)
