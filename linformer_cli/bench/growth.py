"""The growth of time and memory with the number of positions: exponents, crossings, and what longer ones will take."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .rounds import RIVAL

# The worst growth that a mechanism here has: what is assumed where only one length was measured, and the most that two
# lengths can say, one of which a busy moment of the machine may have spoiled.
_WORST_EXPONENT = 2.0

# A number of positions, and what was measured there.
Point = tuple[int, float]


def fit_exponent(points: Sequence[Point]) -> float | None:
    """p of the least-squares line through log y = p log x + c; None where there are not two points above 0."""
    logs = [(math.log(x), math.log(y)) for x, y in points if y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in logs)
    slope: float = sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread
    return slope


@dataclass(frozen=True)
class Overtaking:
    """Where one mechanism becomes faster than another, between the `shortest` and the `longest` T measured of both.

    `at` is None where that is not between them: it is faster at all of them, or slower at the last.
    """

    at: float | None
    faster_at_last: bool
    shortest: int
    longest: int

    def describe(self) -> str:
        if self.at is not None:
            return f"{self.at:,.0f}"
        return f"below {self.shortest:,}" if self.faster_at_last else f"not up to {self.longest:,}"


def find_overtaking(seconds: Sequence[Point], rival: Sequence[Point]) -> Overtaking | None:
    """From where on the times `seconds` stay below those of `rival`, over the lengths that both have.

    Between two lengths both times are straight lines in log T and log seconds. None where no length is in both.
    """
    mine, other = dict(seconds), dict(rival)
    lengths = sorted(mine.keys() & other.keys())
    if not lengths:
        return None
    leads = [math.log(other[length] / mine[length]) for length in lengths]  # above 0 where mine is faster
    at = None
    last_slow = max((index for index, lead in enumerate(leads) if lead <= 0), default=None)
    if last_slow is not None and last_slow + 1 < len(leads):
        before, after = leads[last_slow : last_slow + 2]
        near, far = (math.log(length) for length in lengths[last_slow : last_slow + 2])
        at = math.exp(near + (far - near) * before / (before - after))
    return Overtaking(at, leads[-1] > 0, lengths[0], lengths[-1])


def extrapolate(points: Sequence[Point], length: int) -> float | None:
    """y at `length`, growing on as between the last two points, but at least linearly and at most with the square.

    None where there is no point.
    """
    if not points:
        return None
    exponent = fit_exponent(points[-2:])
    exponent = _WORST_EXPONENT if exponent is None else min(max(1.0, exponent), _WORST_EXPONENT)
    last, y = points[-1]
    return float(y * (length / last) ** exponent)


def describe_exponents(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A record for each mechanism in `rows`: between the last two lengths, where both were measured, and over all.

    And where softmax is overtaken: `overtakes_softmax` is None for softmax itself, and where there is none to compare
    with.
    """
    last = sorted({row["positions"] for row in rows})[-2:]
    seconds, memory = (
        {
            name: [(row["positions"], row[key]) for row in rows if row["name"] == name and row[key] is not None]
            for name in dict.fromkeys(row["name"] for row in rows)
        }
        for key in ("seconds_per_sequence", "memory_bytes_per_sequence")
    )
    rival = next((row["name"] for row in rows if row["attention"] == RIVAL), None)
    records = []
    for name in seconds:
        record: dict[str, Any] = {"name": name}
        for kind, points in (("time", seconds[name]), ("memory", memory[name])):
            record[f"{kind}_exponent_last_two"] = fit_exponent([point for point in points if point[0] in last])
            record[f"{kind}_exponent_all"] = fit_exponent(points)
        record["longest_positions"] = max((length for length, _ in seconds[name]), default=None)
        attention = next(row["attention"] for row in rows if row["name"] == name)
        compared = rival is not None and attention != RIVAL
        overtaking = find_overtaking(seconds[name], seconds[rival or ""]) if compared else None
        record["overtakes_softmax"] = None if overtaking is None else overtaking.describe()
        record["overtakes_softmax_at"] = None if overtaking is None else overtaking.at
        records.append(record)
    return records
