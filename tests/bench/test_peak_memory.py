"""Tests of peak memory: the growth of fresh processes, their results and failures, and the counters of a GPU."""

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from machine import use_threads

from linformer_cli.bench.measure import peak_memory
from linformer_cli.bench.measure.attention_pass import PassSetup
from linformer_cli.bench.measure.peak_memory import PassFailed, measure_peak, run_fresh
from linformer_cli.model.mixers import parse_variant
from linformer_cli.system import timing
from linformer_cli.system.memory import measure_free_memory

ODD = """
import os, time
import torch

here = []

def look():
    here.append(1)
    return {"pid": os.getpid(), "parent": os.getppid(), "threads": torch.get_num_threads(), "seen": len(here)}

def kill(number):
    os.kill(os.getpid(), number)

def fail(error):
    raise error

def wait(path):
    with open(path, "w") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(600)

def shout():
    print("loud", flush=True)
    os.write(1, b"louder")
    return look()
"""

# In place of torch, which takes seconds to load, in the servers that a test starts.
TORCH = """
class OutOfMemoryError(RuntimeError):
    pass


def set_num_threads(number):
    global get_num_threads
    get_num_threads = lambda: number
"""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The module `odd`, whose functions run in fresh processes.

    The current folder has another `linformer_cli`, which must be ignored. Servers have a small module `torch`.
    """
    folder = tmp_path_factory.mktemp("modules")
    (folder / "odd.py").write_text(ODD)
    (folder / "small").mkdir()
    (folder / "small" / "torch.py").write_text(TORCH)
    (folder / "here" / "linformer_cli").mkdir(parents=True)
    (folder / "here" / "linformer_cli" / "__init__.py").write_text("raise SystemExit('another one')")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (folder / "small", folder))))
        patch.chdir(folder / "here")
        module = importlib.import_module("odd")
        yield module
        end(run_fresh(module.look, limit_seconds=60)["parent"])


def end(server: int) -> None:
    os.kill(server, signal.SIGKILL)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)


def test_every_measurement_has_a_quiet_process_of_its_own_with_as_many_threads(odd, monkeypatch, capfd) -> None:
    given_back: list[int] = []
    monkeypatch.setattr(peak_memory, "give_back_freed_memory", lambda: given_back.append(1))
    before, threads = dict(os.environ), torch.get_num_threads() + 1
    with use_threads(threads):
        first, second = (run_fresh(work, limit_seconds=60) for work in (odd.look, odd.shout))
    assert len({first["pid"], second["pid"], os.getpid()}) == 3
    assert first["parent"] == second["parent"] != os.getpid()  # one server starts both
    assert first["seen"] == second["seen"] == 1 and first["threads"] == threads
    assert capfd.readouterr().out == ""
    assert given_back == [1, 1] and dict(os.environ) == before


@pytest.mark.parametrize(
    ("name", "argument", "message"),
    [
        ("kill", int(signal.SIGKILL), "needs more memory than there is"),
        ("kill", int(signal.SIGSEGV), "its process ended"),
        ("fail", MemoryError("odd heads"), "needs more memory than there is"),
        ("fail", ValueError("odd heads\nand more"), "failed: ValueError: odd heads"),
    ],
)
def test_a_process_that_fails_gives_its_reason_in_one_line(odd, raises_one_line, name, argument, message) -> None:
    with raises_one_line(PassFailed, message):
        run_fresh(getattr(odd, name), argument, limit_seconds=60)
    assert run_fresh(odd.look, limit_seconds=60)["seen"] == 1


def test_a_module_that_does_not_load_is_named(odd, monkeypatch, raises_one_line) -> None:
    missing = types.ModuleType("odder")
    exec("def look():\n    return 1", missing.__dict__)
    monkeypatch.setitem(sys.modules, "odder", missing)  # the process does not find it
    with raises_one_line(PassFailed, "failed: ModuleNotFoundError: No module named 'odder'"):
        run_fresh(missing.look, limit_seconds=60)


def test_a_process_that_takes_too_long_is_ended(odd, monkeypatch, tmp_path, raises_one_line) -> None:
    monkeypatch.setattr(peak_memory, "STARTING_SECONDS", 0.0)
    with raises_one_line(PassFailed, "more than 0.5 s"):
        run_fresh(odd.wait, tmp_path / "pid", limit_seconds=0.5)
    assert not (tmp_path / "pid").exists() or not is_alive(wait_for_pid(tmp_path / "pid"))


def test_a_server_that_was_ended_is_replaced(odd) -> None:
    server = run_fresh(odd.look, limit_seconds=60)["parent"]
    end(server)
    assert run_fresh(odd.look, limit_seconds=60)["parent"] != server


def test_a_server_that_cannot_start_fails_only_the_measurement(odd, tmp_path, monkeypatch, raises_one_line) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('libgomp.so.1: cannot open')")
    end(run_fresh(odd.look, limit_seconds=60)["parent"])
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, Path(odd.__file__).parent))))
        with raises_one_line(PassFailed, "its process ended"):
            run_fresh(odd.look, limit_seconds=60)
    for _ in range(100):  # the server may still be ending
        with contextlib.suppress(PassFailed):
            assert run_fresh(odd.look, limit_seconds=60)["seen"] == 1
            return
        time.sleep(0.1)
    pytest.fail("no server starts any more")


def wait_for_pid(path: Path) -> int:
    while not path.exists() or not path.read_text().endswith("\n"):
        time.sleep(0.01)
    return int(path.read_text())


def is_alive(pid: int) -> bool:
    # A process that has ended stays listed until its parent (init for an orphan) has read its exit status.
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@contextlib.contextmanager
def pressing(path: Path, *processes: int) -> Iterator[None]:
    """Send SIGINT to `processes` and, if there are any, to the measurement that writes its id to `path`."""

    def press() -> None:
        measured = wait_for_pid(path)
        for process in processes or (os.getpid(),):
            os.kill(process, signal.SIGINT)
        if processes:
            os.kill(measured, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    yield
    thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_an_interrupted_caller_leaves_no_measurement_behind(odd, tmp_path) -> None:
    with pressing(tmp_path / "pid"), pytest.raises(KeyboardInterrupt):
        run_fresh(odd.wait, tmp_path / "pid", limit_seconds=60)
    assert not is_alive(wait_for_pid(tmp_path / "pid"))


def test_ctrl_c_ends_the_measurement_but_not_the_server(odd, tmp_path, raises_one_line) -> None:
    """A terminal sends SIGINT to all its processes."""
    server = run_fresh(odd.look, limit_seconds=60)["parent"]
    with pressing(tmp_path / "pid", server), raises_one_line(PassFailed, "failed: KeyboardInterrupt"):
        run_fresh(odd.wait, tmp_path / "pid", limit_seconds=60)
    assert run_fresh(odd.look, limit_seconds=60)["parent"] == server


def test_on_a_gpu_torchs_counters_are_used(monkeypatch, raises_one_line) -> None:
    """The counters are made up here, because the real ones need a GPU."""
    order: list[str] = []
    bytes_in_use = iter([1000])
    monkeypatch.setattr(timing, "synchronize", lambda device: order.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: order.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(bytes_in_use))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5000)
    setup = PassSetup(parse_variant("linear"), heads=2, head_width=8, positions=32, device="cuda:0")
    found = measure_peak(lambda given: lambda: order.append("pass"), setup, 1)
    assert found.bytes == 4000 and found.seconds >= 0
    assert order == ["synchronize", "reset", "synchronize", "pass", "synchronize"]

    def full() -> None:
        raise torch.OutOfMemoryError

    bytes_in_use = iter([1000])
    with raises_one_line(PassFailed, "more memory than there is"):
        measure_peak(lambda given: full, setup, 1)


def test_free_memory_counts_what_this_process_keeps_and_may_be_unknown(monkeypatch) -> None:
    order: list[str] = []
    monkeypatch.setattr("linformer_cli.system.memory.give_back_freed_memory", lambda: order.append("given back"))
    free = measure_free_memory("cpu")
    assert order == ["given back"] and (free is None or free > 0) and measure_free_memory("mps") is None
    monkeypatch.setattr("linformer_cli.system.memory.Path.read_text", lambda path: "MemTotal: 5 kB")
    assert measure_free_memory("cpu") is None
