"""Expected errors, which are reported in one line. Each has an exit code for the command that it ends."""

import difflib
from collections.abc import Iterable


class LintxError(Exception):
    """An error explained in one line: what is wrong, what was found, what to do."""

    exit_code = 1


class UsageError(LintxError):
    """The command line or a configuration is wrong: a name is unknown, or settings contradict each other."""

    exit_code = 2


class DataError(LintxError):
    """Images are missing, unreadable or of the wrong form."""


class CheckpointError(LintxError):
    """A checkpoint or a run folder is missing, damaged or from another program."""


class TrainingError(LintxError):
    """Training cannot continue: the loss is NaN or infinite, or the disk is full."""


class DisagreementError(LintxError):
    """The parallel and the step form of a model give different results."""


class Interrupted(LintxError):
    """A signal stopped the work; results are saved. `exit_code` is 128 plus the signal: 130 after Ctrl-C."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


def shorten(text: str, most: int = 200) -> str:
    """Return `text` for a message: at most its first `most` characters."""
    return text if len(text) <= most else f"{text[:most]}..."


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> UsageError:
    """Build the error for a `name` that is not in `choices`. It suggests the nearest choice."""
    known, name = sorted(choices), shorten(name)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known) or 'none'}"
    return UsageError(f"unknown {kind} '{name}'; {hint}")


def describe_reason(error: Exception) -> str:
    """Return what the system or a library says about an error, without the file's name."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
