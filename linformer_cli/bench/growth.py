"""How time and memory grow with the number of positions T: exponents, predictions, and where softmax is overtaken."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from linformer_cli.model.mixers import SOFTMAX
from linformer_cli.report.tables import Shown
from .rows import AttentionRow

# No mechanism here grows faster than T^2. A busy machine may distort the growth between two lengths.
_WORST_EXPONENT = 2.0

# A number of positions, and the value measured for it.
Point = tuple[int, float]


@dataclass(frozen=True)
class Exponents:
    """The exponents p of time and memory as T^p, and the T above which the mechanism is faster than softmax."""

    name: Annotated[str, Shown("attention", names=True)]
    time_exponent_last_two: Annotated[float | None, Shown("time, last two", ".2f")]
    time_exponent_all: Annotated[float | None, Shown("time, all", ".2f")]
    memory_exponent_last_two: Annotated[float | None, Shown("memory, last two", ".2f")]
    memory_exponent_all: Annotated[float | None, Shown("memory, all", ".2f")]
    longest_positions: Annotated[int | None, Shown("longest T that fits", ",")]
    overtakes_softmax: Annotated[str | None, Shown("overtakes softmax at T")] = None
    overtakes_softmax_at: float | None = None


def fit_exponent(points: Sequence[Point]) -> float | None:
    """Return p of the least-squares line log y = p log x + c, or None with fewer than two points above 0."""
    logs = [(math.log(x), math.log(y)) for x, y in points if y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def find_overtaking(seconds: Sequence[Point], others: Sequence[Point]) -> tuple[str, float | None] | None:
    """Find the common T above which `seconds` stay below `others`: in words, and interpolated in logs if known."""
    mine, other = dict(seconds), dict(others)
    lengths = sorted(mine.keys() & other.keys())
    leads = [math.log(other[length] / mine[length]) for length in lengths]  # positive where `mine` is faster
    if not lengths:
        return None
    if leads[-1] <= 0:
        return f"not up to {lengths[-1]:,}", None
    last_slow = max((index for index, lead in enumerate(leads) if lead <= 0), default=None)
    if last_slow is None:
        return f"below {lengths[0]:,}", None
    before, after = leads[last_slow : last_slow + 2]
    near, far = (math.log(length) for length in lengths[last_slow : last_slow + 2])
    at = math.exp(near + (far - near) * before / (before - after))
    return f"{at:,.0f}", at


def extrapolate(points: Sequence[Point], length: int) -> float | None:
    """Predict y at `length` from the growth between the last two points: at least linear and at most quadratic."""
    if not points:
        return None
    exponent = fit_exponent(points[-2:])
    exponent = _WORST_EXPONENT if exponent is None else min(max(1.0, exponent), _WORST_EXPONENT)
    last, y = points[-1]
    return float(y * (length / last) ** exponent)


def describe_exponents(rows: Sequence[AttentionRow]) -> list[Exponents]:
    """Return the exponents of each mechanism. The last two lengths are the two longest T of all rows."""
    last_two = sorted({row.positions for row in rows})[-2:]
    softmax = next((row.name for row in rows if row.attention == SOFTMAX), None)

    def list_points(name: str | None, key: str) -> list[Point]:
        return [(row.positions, y) for row in rows if row.name == name and (y := getattr(row, key)) is not None]

    def fit(points: Sequence[Point]) -> tuple[float | None, float | None]:
        return fit_exponent([point for point in points if point[0] in last_two]), fit_exponent(points)

    found = []
    for name, attention in {row.name: row.attention for row in rows}.items():
        seconds, memory = (list_points(name, f"{key}_per_sequence") for key in ("seconds", "memory_bytes"))
        longest = max((length for length, _ in seconds), default=None)
        others = [] if attention == SOFTMAX else list_points(softmax, "seconds_per_sequence")
        overtaking = find_overtaking(seconds, others) or (None, None)
        found.append(Exponents(name, *fit(seconds), *fit(memory), longest, *overtaking))
    return found
