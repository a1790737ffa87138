"""`lintx bench attention`: how time and memory of training grow with the number of positions."""

from pathlib import Path

from linformer_cli.config import LARGEST_SIZE
from . import options
from .config_options import duration, option, sizes, with_fields
from .reports import build_bench, choose_place, run_and_show

SCALED = "scaled"


@with_fields
def attention(
    names: options.Variants = None,
    positions: list[int] = sizes(
        "512,1024,2048,4096,8192,16384,32768,65536", "Sequence lengths T, separated by commas."
    ),
    batch: str = option(
        SCALED, "Sequences per pass. 'scaled' means 65,536 / T, but at least 1.", metavar="NUMBER|scaled"
    ),
    heads: int = option(1, "Number of heads.", min=1, max=LARGEST_SIZE),
    head_width: int = option(32, "Width of a head.", min=1, max=LARGEST_SIZE),
    repeats: options.Repeats = 5,
    limit: float = duration("60s", "Time limit for all passes of one mechanism at one T."),
    device: options.Device = "auto",
    plot: Path | None = option(None, "Also plot time and memory against T to a .png or .svg file."),
    style: options.Style = "table",
    json: options.Json = False,
) -> None:
    """Measure how time and memory grow with T.

    Examples:

    - `lintx bench attention --attention linear,softmax --positions 1024,4096 --batch 1 --format md`
    - `lintx bench attention --attention linear,linear:chunk=256 --limit 10s --json`
    - `lintx bench attention --attention linear,softmax,lsh --plot scaling.png`

    Times forward and backward passes of each mechanism alone, in float32. The first table shows time and memory per
    sequence: the median and quartiles of the time over interleaved repeats, and the peak memory (on a CPU, of a fresh
    process). `copying` is the rate of the least possible memory traffic, as a share of this machine's rate of memory
    copies. A length that needs too much memory or time is left out, and its row says why. Mechanisms whose parallel and
    step forms disagree are not timed.

    Another table shows the exponents p of the growth T^p, between the last two lengths and over all lengths, the
    longest T that each mechanism can handle, and the T above which it is faster than softmax. Ctrl-C shows the results
    so far.
    """
    options.require_plots(plot)
    size = None if batch == SCALED else options.parse_size(batch, "--batch", f"16, or {SCALED}")

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
