"""What the benchmarks of whole models have in common: nothing is timed that disagrees, groups in turn, an early end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from linformer_cli.config import ModelConfig
from linformer_cli.errors import DisagreementError, Interrupted
from linformer_cli.evaluation.agreement import measure_agreement
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.sampling.engines import TEXTBOOK

from .cases import RERUN, Check
from .subjects import Subject
from .timing import compare_turns

# How much of the sequence is compared before anything is timed, and over how many layers of an untrained model.
CHECKED_POSITIONS = 96
CHECKED_LAYERS = 2
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


def require_agreement(model: PixelModel) -> None:
    """Raises `DisagreementError` where the two executions of the model's mechanism disagree: it is not timed then."""
    agreement = measure_agreement(model, positions=CHECKED_POSITIONS)
    if not agreement.passed:
        raise DisagreementError(
            f"'{model.config.attention}' is not timed: {agreement.describe_failure()}; see lintx check"
        )


def require_subject_agrees(subject: Subject) -> None:
    """As `require_agreement`, over the first layers only where the model was not trained."""
    model = subject.model
    if not subject.trained and model.config.layers > CHECKED_LAYERS:
        # Its layers are alike, and the float64 copy of a deep one takes longer than what is timed.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = PixelModel(model.config.model_copy(update={"layers": CHECKED_LAYERS})).eval()
    require_agreement(model)


def measure_groups(
    subjects: Sequence[Subject],
    batches: Sequence[int],
    measure: Callable[[Sequence[Subject], int], list[dict[str, Any]]],
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
            require_subject_agrees(subject)
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
