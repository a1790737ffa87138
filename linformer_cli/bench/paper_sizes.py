"""The batch sizes, rounds and lengths of `bench paper` for a time budget, and the lengths in the paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .attention import PASS_POSITIONS
from .measure.peak_memory import FORKS

# The lengths in the paper. If fewer lengths are measured, the report says so.
PAPER_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
PAPER_TRAINING_BATCH = {"mnist-paper": 10, "cifar10-paper": 4}
# Average seconds for one length of one mechanism: a process that measures memory, and a few passes in every round.
_SECONDS_PER_LENGTH = 3.0 if FORKS else 7.0
_FEWEST_LENGTHS = 3


@dataclass(frozen=True)
class Sizes:
    """The sizes for a budget. Rows have at most one sample per round, except attention rows, which have a few.

    `batches` are the batch sizes of sampling, and `largest_batches` limits them for some networks. If `lengths` is
    None, the available time determines the lengths.
    """

    batches: Sequence[int]
    rounds: int
    training_batches: Mapping[str, int]
    pass_positions: int = PASS_POSITIONS
    largest_batches: Mapping[str, int] = field(default_factory=dict)
    lengths: Sequence[int] | None = None


def choose_sizes(budget_seconds: float) -> Sizes:
    """Return batch sizes and rounds for a budget."""
    minutes = budget_seconds / 60
    if minutes >= 30:
        return Sizes((1, 16, 64, 256), 16, PAPER_TRAINING_BATCH)
    if minutes >= 5:
        # Many rounds of small batches are more informative than a few rounds of large ones. Softmax's keys and values
        # for 64 CIFAR-10 images take 6 GB, and allocating this memory takes longer than the timed steps.
        return Sizes(
            (1, 16, 64), 12, {"mnist-paper": 4, "cifar10-paper": 1}, PASS_POSITIONS // 4, {"cifar10-paper": 16}
        )
    return Sizes((1, 16), 4, {"mnist-paper": 2, "cifar10-paper": 1}, PASS_POSITIONS // 8)


def choose_lengths(seconds: float, methods: int) -> list[int]:
    """Return as many of `PAPER_LENGTHS` as `seconds` allow, spread over their range."""
    count = max(_FEWEST_LENGTHS, min(len(PAPER_LENGTHS), int(seconds / (_SECONDS_PER_LENGTH * methods))))
    if count == len(PAPER_LENGTHS):
        return list(PAPER_LENGTHS)
    # Exponents need lengths that are far apart, but only large budgets reach the longest lengths.
    longest = min(len(PAPER_LENGTHS) - 1, count + 1)
    return [PAPER_LENGTHS[round(index * longest / (count - 1))] for index in range(count)]


def describe_scaling(lengths: Sequence[int], pass_positions: int) -> list[str]:
    """Return a line if there are fewer lengths than in the paper, and a line if passes have fewer positions."""
    lines = []
    if len(lengths) < len(PAPER_LENGTHS):
        listed = ", ".join(f"{length:,}" for length in lengths)
        lines.append(f"time and memory against T: at {listed}; the paper's lengths are 512 to 65,536")
    if pass_positions < PASS_POSITIONS:
        lines.append(
            f"time and memory against T: {pass_positions:,} positions per pass (one sequence where T is longer), "
            f"instead of {PASS_POSITIONS:,} as in lintx bench attention"
        )
    return lines
