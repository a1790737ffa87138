"""How time and memory grow with the number of positions T: exponents, predictions, and where softmax is overtaken."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .rows import BASELINE, AttentionRow

# No mechanism here grows faster than T^2. This growth is assumed if only one length was measured. It also bounds the
# growth between two lengths, because a busy machine may have distorted one of the two times.
_WORST_EXPONENT = 2.0

# A number of positions, and the value measured for it.
Point = tuple[int, float]


@dataclass(frozen=True)
class Exponents:
    """The exponents p for time and memory that grow as T^p: from the last two lengths, and fitted over all lengths.

    `longest_positions` is the longest T measured. `overtakes_softmax` describes the T above which the mechanism is
    faster than softmax. It is None for softmax itself, and if softmax was not measured. `overtakes_softmax_at` is the
    same T as a number, or None if it is not between two measured lengths.
    """

    name: str
    time_exponent_last_two: float | None
    time_exponent_all: float | None
    memory_exponent_last_two: float | None
    memory_exponent_all: float | None
    longest_positions: int | None
    overtakes_softmax: str | None
    overtakes_softmax_at: float | None


def fit_exponent(points: Sequence[Point]) -> float | None:
    """Return p of the least-squares line log y = p log x + c, or None with fewer than two points above 0."""
    logs = [(math.log(x), math.log(y)) for x, y in points if y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


@dataclass(frozen=True)
class Overtaking:
    """The T above which one mechanism is faster than another, compared at lengths from `shortest` to `longest`.

    `at` is None if the mechanism is faster at every length, or slower at the last length.
    """

    at: float | None
    faster_at_last: bool
    shortest: int
    longest: int

    def describe(self) -> str:
        if self.at is not None:
            return f"{self.at:,.0f}"
        return f"below {self.shortest:,}" if self.faster_at_last else f"not up to {self.longest:,}"


def find_overtaking(seconds: Sequence[Point], others: Sequence[Point]) -> Overtaking | None:
    """Find the T above which the times `seconds` stay below the times `others`. Only common lengths are compared.

    Times are interpolated linearly in log T and log seconds. The result is None if there is no common length.
    """
    mine, other = dict(seconds), dict(others)
    lengths = sorted(mine.keys() & other.keys())
    if not lengths:
        return None
    leads = [math.log(other[length] / mine[length]) for length in lengths]  # positive where `mine` is faster
    at = None
    last_slow = max((index for index, lead in enumerate(leads) if lead <= 0), default=None)
    if last_slow is not None and last_slow + 1 < len(leads):
        before, after = leads[last_slow : last_slow + 2]
        near, far = (math.log(length) for length in lengths[last_slow : last_slow + 2])
        at = math.exp(near + (far - near) * before / (before - after))
    return Overtaking(at, leads[-1] > 0, lengths[0], lengths[-1])


def extrapolate(points: Sequence[Point], length: int) -> float | None:
    """Predict y at `length` from the growth between the last two points.

    The growth is assumed to be at least linear and at most quadratic. The result is None if there are no points.
    """
    if not points:
        return None
    exponent = fit_exponent(points[-2:])
    exponent = _WORST_EXPONENT if exponent is None else min(max(1.0, exponent), _WORST_EXPONENT)
    last, y = points[-1]
    return float(y * (length / last) ** exponent)


def describe_exponents(rows: Sequence[AttentionRow]) -> list[Exponents]:
    """Return the exponents of each mechanism in `rows`. The last two lengths are the two longest T of all rows."""
    last_two = sorted({row.positions for row in rows})[-2:]
    seconds: dict[str, list[Point]] = {row.name: [] for row in rows}
    memory: dict[str, list[Point]] = {row.name: [] for row in rows}
    for row in rows:
        if row.seconds_per_sequence is not None:
            seconds[row.name].append((row.positions, row.seconds_per_sequence))
        if row.memory_bytes_per_sequence is not None:
            memory[row.name].append((row.positions, row.memory_bytes_per_sequence))
    softmax = next((row.name for row in rows if row.attention == BASELINE), None)
    attentions = {row.name: row.attention for row in rows}
    found = []
    for name in seconds:
        compared = softmax is not None and attentions[name] != BASELINE
        overtaking = find_overtaking(seconds[name], seconds[softmax or ""]) if compared else None
        time, bytes_ = seconds[name], memory[name]
        found.append(
            Exponents(
                name,
                fit_exponent([point for point in time if point[0] in last_two]),
                fit_exponent(time),
                fit_exponent([point for point in bytes_ if point[0] in last_two]),
                fit_exponent(bytes_),
                max((length for length, _ in time), default=None),
                None if overtaking is None else overtaking.describe(),
                None if overtaking is None else overtaking.at,
            )
        )
    return found
