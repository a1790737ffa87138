"""Interruptions of work at a chosen step."""

from collections.abc import Callable

from linformer_cli.errors import Interrupted


def stop_after(calls: int) -> Callable[[], None]:
    """Return a `Check` that lets `calls` calls pass and then raises `Interrupted`."""
    left = iter(range(calls))

    def check() -> None:
        if next(left, None) is None:
            raise Interrupted("enough", 2)

    return check
