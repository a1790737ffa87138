"""Command lines in processes of their own, for tests of signals, pipes and exit codes.

Python's fork server loads torch once and forks for each command, which takes a tenth of the time of a new interpreter.
Tests of how an interpreter starts do not use it.
"""

import ctypes
import io
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

if sys.platform == "win32":
    pytest.skip("commands are forked, which Windows cannot do", allow_module_level=True)
_SERVER = multiprocessing.get_context("forkserver")
# Training loads torch._dynamo, which takes as long as the rest of torch.
_PRELOADED = ("linformer_cli.cli.app", "linformer_cli.training.loop", "linformer_cli.sampling.decode", "torch._dynamo")
_SERVER.set_forkserver_preload([*_PRELOADED])
SECONDS = 120


class Command:
    """A running command line, or a script with these arguments.

    `stderr`, if given, is the file that its messages go to. Its outputs must each fit into a pipe, unless they are read
    while it runs.
    """

    def __init__(
        self, *arguments: object, data: bytes = b"", stdout: str = "", stderr: str = "", script: str = ""
    ) -> None:
        self.returncode: int | None = None
        ends: list[Connection | str] = []
        self.streams: list[io.BufferedIOBase] = []
        reader, writer = _SERVER.Pipe(duplex=False)
        os.write(writer.fileno(), data)
        writer.close()
        ends.append(reader)
        for path in (stdout, stderr):
            mine, its = _SERVER.Pipe(duplex=False)
            ends.append(path or its)
            self.streams.append(os.fdopen(os.dup(mine.fileno()), "rb"))
            mine.close()
        self.stdout, self.stderr = self.streams
        given = [str(argument) for argument in arguments], ends, dict(os.environ), str(Path.cwd()), script
        self.process = _SERVER.Process(target=_run, args=given)
        self.process.start()
        for end in ends:
            if isinstance(end, Connection):
                end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        for stream in self.streams:
            stream.close()

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait(self, seconds: float | None = SECONDS) -> int:
        """Return the exit code; `seconds` is a limit, because a hanging command never ends."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, "the command does not end"
        self.returncode = self.process.exitcode
        return self.returncode

    def finish(self) -> tuple[int, bytes, str]:
        """Return the exit code, the output and the messages."""
        errors, output = self.stderr.read().decode(), self.stdout.read()
        return self.wait(), output, errors


def run_command(*arguments: object, data: bytes = b"", stdout: str = "", stderr: str = "") -> tuple[int, bytes, str]:
    """Run a command to its end. Returns the exit code, the output and the messages."""
    with Command(*arguments, data=data, stdout=stdout, stderr=stderr) as command:
        return command.finish()


def run_script(script: str, *arguments: object) -> tuple[int, bytes, str]:
    """Run a script to its end. Returns the exit code, the output and the messages."""
    with Command(*arguments, script=script) as command:
        return command.finish()


def _run(
    arguments: list[str], ends: list[Connection | str], environment: dict[str, str], folder: str, script: str
) -> None:
    for number, end in enumerate(ends):
        opened = os.open(end, os.O_WRONLY) if isinstance(end, str) else end.fileno()
        os.dup2(opened, number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["lintx", *arguments]
    from linformer_cli.__main__ import main

    try:
        exec(script, {}) if script else main()
    except SystemExit as ended:
        ctypes.pythonapi.Py_Exit(ended.code)  # the end of a normal interpreter, with its last flush of the streams
