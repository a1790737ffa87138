"""The `lintx` command. This module collects its commands and reports every expected error in one line."""

import contextlib
import os
import signal
import sys
import traceback
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.exceptions import TyperException

import linformer_cli
from linformer_cli import __version__
from linformer_cli.errors import Interrupted, LintxError, shorten
from linformer_cli.system.distributed import end_process, process_rank
from linformer_cli.system.memory import is_out_of_memory, keep_freed_memory
from .groups import LazyGroup
from .output import warn

_CLOSED_PIPE = 128 + 13  # the exit code of a command that SIGPIPE ended; a number, because Windows has no SIGPIPE

# What `lintx` alone prints.
_START = """lintx learns from pictures and draws new ones. To start:

  lintx sample -n 16 -o grid.png    draw digits with a shipped model
  lintx demo                        draw with a model in the browser
  lintx train pictures/             train on a folder of your own pictures
  lintx --help                      show all commands
"""


class _Commands(LazyGroup):
    panels = {
        "Start": "demo sample complete train",
        "Measure": "eval score check compare plot bench",
        "Share": "export compress decompress",
        "Describe": "attentions info env",
    }
    table = {
        "demo": ("demo.demo", "Show models in the browser."),
        "sample": ("sample.sample", "Draw images or text from a model."),
        "complete": ("complete.complete", "Complete your own images."),
        "train": ("train.train", "Train a model, or resume a run."),
        "eval": ("evaluate.evaluate", "Measure bits/dim over a split of a data set."),
        "score": ("score.score", "Say how likely a model finds pictures."),
        "check": ("check.check", "Measure how closely two forms agree."),
        "compare": ("compare.compare", "Train and compare mechanisms."),
        "plot": ("plot.plot", "Plot the curves of runs."),
        "bench": ("bench.app", "Measure speed, memory and quality."),
        "export": ("export.export", "Copy a model out of its run."),
        "compress": ("compress.compress", "Compress images without loss."),
        "decompress": ("decompress.decompress", "Unpack a compressed file."),
        "attentions": ("attentions.attentions", "List the attention mechanisms, or show one."),
        "info": ("info.info", "Describe a checkpoint."),
        "env": ("env.env", "Describe the machine and the versions."),
    }


app = typer.Typer(
    cls=_Commands,
    name="lintx",
    help="Train autoregressive models of images or bytes with linear and other attentions, and sample from them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lintx {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


def main() -> NoReturn:
    """Run the command line. Every expected failure is reported in one line on stderr and gives an exit code."""
    try:
        _run()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
        # Typer and rich end with code 1 when the reader of the output has closed the pipe.
        end_process(_CLOSED_PIPE if isinstance(ended.__context__, BrokenPipeError) else code)


def _run() -> NoReturn:
    keep_freed_memory()
    received = _unwind_on_signals()
    try:
        _check_surroundings()
        code = app(standalone_mode=False)
        sys.stdout.flush()  # flushes inside the try, because the reader may have closed the pipe
    except Interrupted as stopped:
        _stop(str(stopped), stopped.exit_code)
    except LintxError as error:
        _end(f"Error: {error}", error.exit_code)
    except TyperException as error:
        # Typer raises the help page as an exception when no command is given.
        if type(error).__name__ == "NoArgsIsHelpError":
            root = getattr(error, "ctx", None) is None or error.ctx.parent is None  # type: ignore[attr-defined]
            typer.echo(_START if root else error.format_message(), nl=not root)
            sys.exit(2)
        context = getattr(error, "ctx", None)
        hint = f" (see '{context.command_path} --help')" if context is not None else ""
        message = error.format_message().replace("Value error, ", "")  # pydantic's prefix
        _end(f"Error: {message}{hint}", error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:
        sys.exit(_CLOSED_PIPE)
    except OSError as error:  # the system refused an operation; this is not a bug
        where = f": '{str(error.filename)[:200]}'" if error.filename is not None else ""
        _end(f"Error: {error.strerror or error}{where}", 1)
    except Exception as error:
        if received:  # compiled code may turn a KeyboardInterrupt into another exception
            code = 130
        elif isinstance(error, MemoryError) or ("torch" in sys.modules and is_out_of_memory(error)):
            _end(f"Error: out of memory{'; try a smaller --batch' if _has_batch() else ''}", 1)
        elif _broke_a_library(error):
            _end(f"Error: a library cannot be loaded: {shorten(str(error).strip())}; free memory, or reinstall it", 1)
        else:
            raise
    if code == 130:  # Typer also returns 130 after Ctrl-C
        _stop("Stopped", 128 + (received[0] if received else signal.SIGINT))
    sys.exit(code if isinstance(code, int) else 0)


def _check_surroundings() -> None:
    """Raise `LintxError` for surroundings in which libraries would end the process or write to a wrong place."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise LintxError("the working folder was deleted; change to a folder that exists") from None
    if "--install-completion" in sys.argv and os.name != "nt" and not os.environ.get("HOME"):
        raise LintxError("--install-completion writes to your home folder; set HOME to it")


def _broke_a_library(error: Exception) -> bool:
    """Return whether `error` comes from a library that was being imported, for example while memory was limited."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    package = os.path.dirname(linformer_cli.__file__)
    return any(code.co_name == "<module>" and not code.co_filename.startswith(package) for code in codes)


def _has_batch() -> bool:
    command: Any = typer.main.get_command(app)
    for word in sys.argv[1:]:
        command = (isinstance(command, LazyGroup) and command.get_command(None, word)) or command
    return any("--batch" in parameter.opts for parameter in command.params)


def _unwind_on_signals() -> list[int]:
    """Let Ctrl-C and SIGTERM raise `KeyboardInterrupt`, and return a list that gets the numbers of received signals."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if _is_importing(frame):  # compiled modules swallow the exception or raise a different one
            os._exit(128 + number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, handle)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # background jobs ignore Ctrl-C
        signal.signal(signal.SIGINT, handle)
    return received


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib._bootstrap"):
            return True
        frame = frame.f_back
    return False


def _stop(message: str, code: int) -> NoReturn:
    if process_rank():  # only the first of several processes prints the message
        sys.exit(code)
    _end(message, code)


def _end(message: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # the reader of stderr may have closed the pipe, for example after Ctrl-C
        warn(message)
    sys.exit(code)
