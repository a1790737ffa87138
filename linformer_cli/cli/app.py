"""The `lintx` command: one file per command, loaded here; errors become one line and an exit code here."""

import contextlib
import os
import signal
import sys
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from linformer_cli import __version__
from linformer_cli.errors import Interrupted, LintxError
from linformer_cli.system.distributed import end_process, process_rank
from linformer_cli.system.memory import is_out_of_memory, keep_freed_memory
from linformer_cli.system.threads import limit_spinning

from . import attentions, bench, check, compare, complete, env, evaluate, export, info, plot, sample, train
from .output import complain

app = typer.Typer(
    name="lintx",
    help="Train pixel models with linear attention, and sample and complete images in constant memory.",
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


app.command("train")(train.train)
app.command("sample")(sample.sample)
app.command("complete")(complete.complete)
app.command("eval")(evaluate.evaluate)
app.command("check")(check.check)
app.add_typer(bench.app, name="bench")
app.command("compare")(compare.compare)
app.command("plot")(plot.plot)
app.command("attentions")(attentions.attentions)
app.command("info")(info.info)
app.command("export")(export.export)
app.command("env")(env.env)


def main() -> NoReturn:
    """Run the command line; every foreseen failure is one line on stderr and its exit code."""
    try:
        _run()
    except SystemExit as ended:
        end_process(ended.code if isinstance(ended.code, int) else 0)


def _run() -> NoReturn:
    limit_spinning()
    keep_freed_memory()
    terminated = _raise_on_sigterm()
    try:
        code = app(standalone_mode=False)
        if sys.stdout is not None:  # it may be closed
            sys.stdout.flush()  # here, where a reader that has gone is foreseen
    except Interrupted as stopped:
        _stop(str(stopped), stopped.exit_code)
    except LintxError as error:
        _end(f"Error: {error}", error.exit_code)
    except TyperException as error:
        # Typer raises its own help page as an exception where no command was given.
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.format_message())
            sys.exit(2)
        context = getattr(error, "ctx", None)
        hint = f" (see '{context.command_path} --help')" if context is not None else ""
        _end(f"Error: {error.format_message()}{hint}", error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BrokenPipeError:
        # Whoever read our output has gone; Python must not complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # what the system refuses is no fault of ours, and says itself what it is
        where = f": '{str(error.filename)[:200]}'" if error.filename is not None else ""
        _end(f"Error: {error.strerror or error}{where}", 1)
    except Exception as error:
        if not ("torch" in sys.modules and is_out_of_memory(error)):
            raise
        _end("Error: there is not enough memory; try a smaller --batch", 1)
    if code == 130:  # Typer, too, turns a Ctrl-C into this number
        _stop("Stopped", 128 + signal.SIGTERM if terminated else 130)
    sys.exit(code if isinstance(code, int) else 0)


def _raise_on_sigterm() -> list[int]:
    """Let SIGTERM unwind like Ctrl-C, so that nothing half-written stays; what is returned fills when one came."""
    received: list[int] = []

    def handle(number: int, _frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, handle)
    return received


def _stop(message: str, code: int) -> NoReturn:
    if process_rank():  # the first of several says it
        sys.exit(code)
    _end(message, code)


def _end(message: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # whoever read it has gone, as at Ctrl-C in a pipe
        complain(message)
    sys.exit(code)
