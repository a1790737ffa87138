"""Everything that can go wrong for a reason the user can mend, each with the exit code of the command it ends."""

import difflib
from collections.abc import Iterable


class LintxError(Exception):
    """A mistake or a fault that one line explains: what is wrong, what was found, what to do."""

    exit_code = 1


class UsageError(LintxError):
    """The command line or a configuration asks for something that does not exist or does not fit together."""

    exit_code = 2


class DataError(LintxError):
    """Images are missing, unreadable or of the wrong form."""


class CheckpointError(LintxError):
    """A checkpoint or a run folder is missing, damaged or not ours."""


class TrainingError(LintxError):
    """Training cannot go on: the loss is no longer a number, or the disk took no more."""


class DisagreementError(LintxError):
    """The parallel and the step form of a model give different answers."""


class Interrupted(LintxError):
    """A signal stopped the work after everything worth keeping was saved.

    `exit_code` is 128 plus the signal's number, as shells expect: 130 after Ctrl-C, 143 after SIGTERM.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> UsageError:
    """The error for a `name` that is none of `choices`, with the nearest one suggested."""
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known) or 'none'}"
    return UsageError(f"unknown {kind} '{name}'; {hint}")
