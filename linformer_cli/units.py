"""Formats bits/dim, durations, bytes, counts and shares as text for people, and reads counts."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """What messages call a sequence of a data set, and the unit of its likelihood."""

    item: str
    bits: str

    @property
    def items(self) -> str:
        return f"{self.item}s"


IMAGES, WINDOWS = Words("image", "bits/dim"), Words("window", "bits/byte")

LARGEST_INTEGER = 2**63 - 1  # what fits in 63 bits, so that sums and comparisons with other counts stay within 64 bits


def format_bits(bits: float, error: float | None, digits: int = 4, sign: str = "") -> str:
    """Bits/dim with the standard error, such as '0.6929 +- 0.0030', or '0.6929' without one (for a single image)."""
    return f"{bits:{sign}.{digits}f}" + ("" if error is None else f" +- {error:.{digits}f}")


def format_duration(seconds: float) -> str:
    """Write a time as '12.3 ms', '0.4 s', '45 s', '12 min 3 s', '1 h 4 min' or '2 d 3 h'; 'unknown' if not finite."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds <= 0:  # the clock was set back
        return "0 s"
    if seconds < 0.1:
        return f"{_three_digits(seconds * 1000)} ms"
    if seconds < 10:
        return f"{_short(seconds, 1)} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def format_milliseconds(seconds: float) -> str:
    """Format a time in milliseconds rounded to about three digits: '0.12 ms', '45.3 ms', '1,205 ms'."""
    return f"{seconds * 1000:,.0f} ms" if seconds >= 1 else f"{_three_digits(seconds * 1000)} ms"


def format_microseconds(seconds: float) -> str:
    """Format a time in microseconds rounded to about three digits: '0.12 µs', '45.3 µs', '1,205 µs'."""
    return f"{seconds * 1e6:,.0f} µs" if seconds >= 1e-3 else f"{_three_digits(seconds * 1e6)} µs"


def format_bytes(count: float) -> str:
    """Format a size with binary prefixes, rounded to about three digits: '512 B', '264 KiB', '1.5 MiB'."""
    return _with_prefix(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_count(count: float) -> str:
    """Format a number with decimal prefixes, rounded to about three digits: '784', '12.3 k', '6.36 M', '1.2 G'."""
    return _with_prefix(count, 1000, ("", "k", "M", "G", "T", "P"))


def count_words(count: int, word: str) -> str:
    """Return a number with its noun: '1 image', '2,000 images'."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def format_percent(share: float) -> str:
    """Format a share as a percentage rounded to about three digits: '0.123 %', '45 %'."""
    return f"{100 * share:.3g} %"


def _with_prefix(count: float, base: int, units: tuple[str, ...]) -> str:
    value, unit = float(count), 0
    # Compare the rounded value: 999,999 is '1 M', not '1000 k'.
    while unit + 1 < len(units) and float(_three_digits(abs(value))) >= base:
        value, unit = value / base, unit + 1
    return f"{_three_digits(value)} {units[unit]}".rstrip()


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    return _short(value, 2 if magnitude < 10 else 1 if magnitude < 100 else 0)


def _short(value: float, decimals: int) -> str:
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def parse_count(text: str, most: int = LARGEST_INTEGER) -> int | None:
    """Return the number from 0 to `most` that a text writes in the digits 0 to 9, or None."""
    digits = text.lstrip("0")
    if not (text.isascii() and text.isdigit()) or len(digits) > len(str(most)):  # int() refuses thousands of digits
        return None
    count = int(digits or "0")
    return count if count <= most else None


def printable(text: str) -> str:
    """Return `text` with U+FFFD for control characters and for bytes of a path that are not UTF-8."""
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in text)
