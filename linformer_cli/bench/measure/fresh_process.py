"""Runs a measurement of memory in a fresh process. After other work, a process would report the peak of that work.

Starting Python and loading torch takes longer than most measurements. Therefore a single server process, which runs
this file, loads the modules and forks a process for every measurement.
"""

import atexit
import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import torch

from linformer_cli.errors import LintxError
from linformer_cli.system.memory import give_back_freed_memory, is_out_of_memory

# Seconds allowed beyond a limit, for a warm-up, compiling a kernel and loading torch on a busy machine.
STARTING_SECONDS = 120.0
OUT_OF_MEMORY = "needs more memory than there is"
# On systems other than Linux, forking is not safe once a system library has threads. There, every process loads all
# modules itself.
FORKS = sys.platform == "linux"
# With these settings, the C library returns every freed large block to the system, so resident memory is memory in use.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
# Seconds that the server may take to end a running measurement.
_ENDING_SECONDS = 10.0


class PassFailed(LintxError):
    """The work could not be finished. The message gives the reason briefly."""


def run_fresh(module: str, setup: dict[str, Any], limit_seconds: float) -> dict[str, Any]:
    """Call `measure(setup)` of `module` in a fresh process and return its result. Setup and result must be plain JSON.

    Raises `PassFailed` if the process ends without an answer or takes longer than `limit_seconds` plus
    `STARTING_SECONDS`.
    """
    give_back_freed_memory()
    server = _find_server()
    request = {
        "module": module,
        "setup": setup,
        "threads": torch.get_num_threads(),
        "limit_seconds": limit_seconds,
        "patience_seconds": limit_seconds + STARTING_SECONDS,
    }
    try:
        with contextlib.suppress(BrokenPipeError):  # a server that has ended gives no answer below
            server.requests.write(json.dumps(request) + "\n")
            server.requests.flush()
        line = server.answers.readline()
    except BaseException:  # for example Ctrl-C; otherwise the next request would read the answer to this one
        end_server()
        raise
    if not line:
        code = server.process.wait()
        last = server.last_words()
        end_server()
        raise PassFailed(f"failed: {last}" if code > 0 and last else _describe_end(code))
    answer: dict[str, Any] = json.loads(line)
    if "failed" in answer:
        raise PassFailed(answer["failed"])
    found: dict[str, Any] = answer["found"]
    return found


@dataclass(frozen=True)
class _Server:
    """The server process, its pipes, and the stderr of the server and its children."""

    process: subprocess.Popen[str]
    requests: IO[str]
    answers: IO[str]
    errors: IO[str]

    def last_words(self) -> str:
        self.errors.seek(0)
        return (self.errors.read().strip().splitlines() or [""])[-1][:200]


_server: _Server | None = None


@atexit.register
def end_server() -> None:
    """End the server process, if there is one, and its running measurement."""
    global _server
    server, _server = _server, None
    if server is None:
        return
    server.process.terminate()
    try:
        server.process.wait(_ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
    for pipe in (server.requests, server.answers, server.errors):
        with contextlib.suppress(OSError):
            pipe.close()


def _find_server() -> _Server:
    global _server
    if _server is not None and _server.process.poll() is not None:
        end_server()
    if _server is None:
        package = Path(__file__).resolve().parents[3]
        paths = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
        errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # the file lives as long as the process
        process = subprocess.Popen(
            # -P ignores the current folder, which may hold another version of the package, or a file numpy.py.
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **_ALLOCATOR, "PYTHONPATH": paths},
        )
        assert process.stdin is not None and process.stdout is not None
        _server = _Server(process, process.stdin, process.stdout, errors)
    return _server


def _describe_end(code: int) -> str:
    """Say why a process ended without an answer. When memory runs out, the system kills a process with signal 9."""
    return OUT_OF_MEMORY if code == -9 else "its process ended"


# The server process writes its answers here. stdout itself is redirected, because libraries print to it.
_answers: IO[str] | None = None


def serve() -> None:
    """Run the server process, with one request per line on stdin and one answer per line on stdout."""
    global _answers
    # The server ignores Ctrl-C, which is for the measurement and the caller. SIG_IGN would be inherited by child
    # processes, so this is a handler that does nothing.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    context = multiprocessing.get_context("fork" if FORKS else "spawn")
    for line in sys.stdin:
        request = json.loads(line)
        with contextlib.suppress(Exception):  # the measurement will raise the same error and report it
            importlib.import_module(request["module"])
        _answers.write(json.dumps(_measure(context, request)) + "\n")
        _answers.flush()


def _measure(context: Any, request: dict[str, Any]) -> dict[str, Any]:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(request, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(request["patience_seconds"]):
            return {"failed": f"it took more than {request['limit_seconds']:.3g} s"}
        answer: dict[str, Any] = receiver.recv()
        return answer
    except EOFError:
        process.join()
        return {"failed": _describe_end(process.exitcode)}
    finally:
        process.kill()
        process.join()
        receiver.close()


def _answer(request: dict[str, Any], sender: Connection) -> None:
    """Answer one request in the fresh process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _answers is not None:
        _answers.close()  # with this pipe open here, the caller would not notice the end of the server
    torch.set_num_threads(request["threads"])
    try:
        sender.send({"found": importlib.import_module(request["module"]).measure(request["setup"])})
    except BaseException as error:
        reason = f"failed: {type(error).__name__}: {error}".splitlines()[0][:200]
        sender.send({"failed": OUT_OF_MEMORY if is_out_of_memory(error) else reason})


if __name__ == "__main__":
    serve()
