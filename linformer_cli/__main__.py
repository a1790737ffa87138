"""The entry point of the `lintx` command. It prepares the process before any slow import."""

from __future__ import annotations  # the names of types need no import

import io
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> NoReturn:
    """Run the command line. A signal during startup or shutdown ends the process without a traceback."""
    foreground = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # background jobs ignore Ctrl-C
    if foreground:
        signal.signal(signal.SIGINT, _leave)
    _open_closed_streams()
    limit_spinning()
    drop_impossible_sizes()
    _replace_unknown_characters()
    try:
        from linformer_cli.cli.app import main as run

        run()
    except KeyboardInterrupt:  # a second signal arrived while the first was being handled
        _leave(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, _leave)
        if foreground:
            signal.signal(signal.SIGINT, _leave)
        _drop_unwritable_output()


def limit_spinning() -> None:
    """Let waiting threads of GNU OpenMP sleep sooner than by default, unless the environment sets this itself.

    Call it before torch is loaded. On a busy machine, a spinning thread can occupy the core that another one needs:
    sampling one image took two to seven times as long as on an idle one, and with this setting twice as long.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = "10000"


def drop_impossible_sizes() -> None:
    """Remove sizes of the terminal with which rich or Typer would fail or print nothing, such as `COLUMNS=0`."""
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
        size = os.environ.get(name, "")
        if not (size.isascii() and size.isdigit() and 10 <= int(size[:6]) <= 10_000):
            os.environ.pop(name, None)


def _leave(number: int, _frame: object = None) -> NoReturn:
    os._exit(128 + number)


def _open_closed_streams() -> None:
    """Open the null device for each closed standard stream, or the next file opened would get its descriptor."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 - gets the lowest free descriptor, that of the closed stream
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _drop_unwritable_output() -> None:
    """Keep the exit code if a stream cannot be written: Python would flush it at exit, fail, and return 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _replace_unknown_characters() -> None:
    """Print `?` for characters that the terminal's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
