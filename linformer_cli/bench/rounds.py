"""What the benchmarks of whole models have in common: nothing is timed that disagrees, groups in turn, an early end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from linformer_cli.config import ModelConfig
from linformer_cli.errors import Interrupted
from linformer_cli.sampling.engines import TEXTBOOK

from .agreement import require_model_agrees
from .measure.sampling_work import RERUN
from .measure.timing import Check, compare_turns
from .models import BenchModel

# What every other attention is held against.
RIVAL = "softmax"
# What may differ between two models of one network, which are compared by their attention.
_OF_ATTENTION = {"attention": RIVAL, "attention_options": {}, "dropout": 0.0}

Ending = Literal["finished", "interrupted"]


@dataclass(frozen=True)
class BenchReport:
    """`rows` as plain records, and what they depend on. Where it was interrupted, the rows are those measured by then.

    An interrupted group has a row for every subject as soon as each was timed once; its `repeats` say how often.
    """

    rows: list[dict[str, Any]]
    ended: Ending
    settings: dict[str, Any]
    environment: dict[str, Any]
    ceilings: dict[str, Any] | None = None


def measure_groups(
    subjects: Sequence[BenchModel],
    batches: Sequence[int],
    measure: Callable[[Sequence[BenchModel], int], list[dict[str, Any]]],
    report: Callable[[dict[str, Any]], None],
    check: Check,
    checked: bool,
) -> tuple[list[dict[str, Any]], Ending]:
    """The rows that `measure` makes of the subjects of each preset at each batch size, told to `report` as they come.

    An `Interrupted` that `check` raises, here or inside `measure`, ends it with the rows that there are. Raises
    `DisagreementError` before any measuring where the two executions of a mechanism disagree, which `checked` says has
    been seen to.
    """
    rows: list[dict[str, Any]] = []
    go_on = check or (lambda: None)
    try:
        for subject in () if checked else subjects:
            go_on()
            require_model_agrees(subject)
        for preset in dict.fromkeys(subject.preset for subject in subjects):
            group = [subject for subject in subjects if subject.preset == preset]
            for batch in batches:
                for row in measure(group, batch):
                    rows.append(row)
                    report(row)
                go_on()  # a group that was interrupted has given the rows that it had
    except Interrupted:
        return rows, "interrupted"
    return rows, "finished"


def compare_with_softmax(
    rows: Sequence[dict[str, Any]],
    find_speed: Callable[[dict[str, Any]], float | None],
    models: Sequence[ModelConfig] | None = None,
) -> None:
    """Give each of `rows`, which took turns, `times_softmax`: how many times as fast as exact attention it is.

    The rival is a row of softmax in the same precision that is no re-run; where `models` are given, in the same
    network; where several are, the first that is plain torch if the row is, and not if not. None where there is no
    rival or either was not timed.
    """
    networks = [None] * len(rows) if models is None else [model.model_copy(update=_OF_ATTENTION) for model in models]
    for row, network in zip(rows, networks, strict=True):
        rivals = (
            other
            for other, other_network in zip(rows, networks, strict=True)
            if other["attention"] == RIVAL
            and other["engine"] != RERUN
            and other["precision"] == row["precision"]
            and other_network == network
            and find_speed(other)
        )
        plain = row["engine"] == TEXTBOOK
        rival = min(rivals, key=lambda other: (other["engine"] == TEXTBOOK) != plain, default=None)
        speed = find_speed(row)
        rival_speed = None if rival is None else find_speed(rival)
        row["times_softmax"] = (
            compare_turns(speed, row["samples_seconds"], rival_speed, rival["samples_seconds"])
            if rival and rival_speed and speed
            else None
        )
