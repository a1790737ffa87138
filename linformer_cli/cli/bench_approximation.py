"""`lintx bench approximation`: how well random features approximate softmax."""

from pathlib import Path
from typing import Literal

from linformer_cli.config import LARGEST_SIZE
from . import options
from .config_options import count, numbers, option, several, sizes, with_fields
from .reports import run_and_show


@with_fields
def approximation(
    features: list[int] = sizes("16,32,64,128,256", "Numbers of features m, separated by commas."),
    norms: list[float] = numbers(
        "0.25,0.5,1,2", "Lengths of queries and keys in units of sqrt(K), separated by commas."
    ),
    maps: str = several("positive,hyperbolic,trig", "Feature maps, separated by commas: positive, hyperbolic, trig."),
    draws: int = count(20, "Number of draws of random inputs and directions."),
    positions: int = option(128, "Sequence length T.", min=2, max=LARGEST_SIZE),
    head_width: int = option(32, "Width K of a head.", min=2, max=LARGEST_SIZE),
    seed: options.Seed = 0,
    plot: Path | None = option(None, "Also plot medians and quartiles to a .png or .svg file."),
    error: Literal["output", "bounded-output", "kernel", "small-kernel"] = option(
        "output", "The error that the table and the plot show."
    ),
    style: options.Style = "table",
    json: options.Json = False,
) -> None:
    """Measure the errors of random features.

    Examples:

    - `lintx bench approximation --features 32,64,128 --norms 1,2 --plot errors.svg`
    - `lintx bench approximation --maps positive --draws 100 --format csv`

    Reports mean squared errors of performer attention relative to causal softmax attention in float64, with orthogonal
    or independent random directions. Each figure is the mean over draws of inputs and directions, with quartiles. CSV
    and JSON contain all errors. Ctrl-C shows the results of the finished draws.

    - output: of the attention outputs, for values drawn from N(0, 1).
    - bounded-output: the same, with the mechanism's lower bound on the denominator of `trig`.
    - kernel: of the estimate of exp(x . y) over all pairs of a query q and a key k at an earlier or the same position,
      where x = q K^(-1/4) and y = k K^(-1/4).
    - small-kernel: the same over the quarter of pairs with the smallest exp(x . y).
    """
    options.require_plots(plot)

    from linformer_cli.bench.approximation import Draws, measure_approximation

    names = [name.strip() for name in maps.split(",")]
    settings = Draws(positions, head_width, draws, seed)
    run_and_show(
        style,
        json,
        lambda stop: measure_approximation(
            features, norms, names, draws=settings, error=error, check=stop.raise_if_set
        ),
        {"plot": plot},
    )
