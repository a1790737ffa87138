"""Turns Ctrl-C and SIGTERM into a request that long work checks between steps."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from linformer_cli.errors import Interrupted

# A function that long work calls between steps, and that raises to stop the work.
Check = Callable[[], None]


def never_stop() -> None:
    """Return a `Check` that never raises."""


@dataclass
class StopRequest:
    """A request to stop, made by the first Ctrl-C or SIGTERM and checked by long work between steps."""

    signal_number: int | None = None

    def raise_if_set(self, message: str = "Stopped") -> None:
        """Raise `Interrupted` with `message` if a signal has arrived."""
        if self.signal_number is not None:
            raise Interrupted(message, self.signal_number)


@contextlib.contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """Open a context in which the first SIGINT or SIGTERM sets the request, and the second ends the process."""
    request = StopRequest()
    previous: dict[int, Any] = {}

    def handle(number: int, _frame: object) -> None:
        if request.signal_number is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        request.signal_number = number

    for caught in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(caught) is not signal.SIG_IGN:
            previous[caught] = signal.signal(caught, handle)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
