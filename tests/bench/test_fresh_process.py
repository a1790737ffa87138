"""Tests of measurements in fresh processes: setups, results and failures."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from linformer_cli.bench.measure import fresh_process
from linformer_cli.bench.measure.fresh_process import PassFailed, end_server, run_fresh

ODD = """
import os, signal, time
import torch

here = []


def measure(setup):
    for name, value in setup.items():
        if name == "raise":
            raise {"memory": MemoryError, "value": ValueError}[value]("odd heads\\nand more")
        if name == "kill":
            os.kill(os.getpid(), value)
        if name == "kill_parent":
            os.kill(os.getppid(), value)
            time.sleep(1)
        if name == "tell":
            with open(value, "w") as file:
                file.write(f"{os.getpid()}\\n")
        if name == "sleep":
            time.sleep(value)
        if name == "print":
            print(value, flush=True)
            os.write(1, value.encode())
    here.append(setup)
    return {"pid": os.getpid(), "parent": os.getppid(), "threads": torch.get_num_threads(), "seen": len(here)}
"""

# In place of torch, which takes seconds to load, in every server that a test starts.
TORCH = """
class OutOfMemoryError(RuntimeError):
    pass


def set_num_threads(number):
    global get_num_threads
    get_num_threads = lambda: number
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """A folder on the processes' path, with the module `odd` and another `linformer_cli`, which must be ignored.

    Most servers have a small module `torch`.
    """
    folder = tmp_path_factory.mktemp("modules")
    (folder / "odd.py").write_text(ODD)
    (folder / "torch.py").write_text(TORCH)
    (folder / "here" / "linformer_cli").mkdir(parents=True)
    (folder / "here" / "linformer_cli" / "__init__.py").write_text("raise SystemExit('another one')")
    end_server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.chdir(folder / "here")
        yield folder
    end_server()


def test_every_measurement_has_a_process_of_its_own(folder, monkeypatch) -> None:
    given_back: list[int] = []
    monkeypatch.setattr(fresh_process, "give_back_freed_memory", lambda: given_back.append(1))
    first, second = (run_fresh("odd", {}, 60) for _ in range(2))
    assert len({first["pid"], second["pid"], os.getpid()}) == 3
    assert first["parent"] == second["parent"] != os.getpid()  # one server starts both
    assert first["seen"] == second["seen"] == 1
    assert first["threads"] == torch.get_num_threads()
    assert given_back == [1, 1]


def test_a_process_uses_as_many_threads_as_its_caller(folder) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert run_fresh("odd", {}, 60)["threads"] == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ({"kill": int(signal.SIGKILL)}, "needs more memory than there is"),
        ({"kill": int(signal.SIGSEGV)}, "its process ended"),
        ({"raise": "memory"}, "needs more memory than there is"),
        ({"raise": "value"}, "failed: ValueError: odd heads"),
    ],
)
def test_a_process_that_fails_gives_its_reason_in_one_line(folder, raises_one_line, setup, message) -> None:
    with raises_one_line(PassFailed, message):
        run_fresh("odd", setup, 60)
    assert run_fresh("odd", {}, 60)["seen"] == 1


def test_a_module_that_cannot_be_loaded_is_named(folder, raises_one_line) -> None:
    with raises_one_line(PassFailed, "No module named 'odder'"):
        run_fresh("odder", {}, 60)


def test_a_process_that_takes_too_long_is_ended(folder, monkeypatch, raises_one_line) -> None:
    monkeypatch.setattr(fresh_process, "STARTING_SECONDS", 0.0)
    with raises_one_line(PassFailed, "more than 0.5 s"):
        run_fresh("odd", {"sleep": 600}, 0.5)


def test_text_that_a_measurement_prints_is_not_mistaken_for_its_result(folder) -> None:
    assert run_fresh("odd", {"print": '{"found": {}}\n'}, 60)["seen"] == 1


def test_text_that_a_module_prints_while_loading_is_not_mistaken_for_a_result(folder) -> None:
    (folder / "loud.py").write_text("print('loaded')\n\n\ndef measure(setup):\n    return setup\n")
    assert [run_fresh("loud", {"number": number}, 60) for number in range(2)] == [{"number": 0}, {"number": 1}]


def test_a_server_that_was_ended_is_replaced(folder, raises_one_line) -> None:
    server = run_fresh("odd", {}, 60)["parent"]
    os.kill(server, signal.SIGKILL)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
    again = run_fresh("odd", {}, 60)["parent"]
    assert again != server
    with raises_one_line(PassFailed, "needs more memory than there is"):
        run_fresh("odd", {"kill_parent": int(signal.SIGKILL)}, 60)
    assert run_fresh("odd", {}, 60)["parent"] != again


def test_a_server_that_cannot_start_reports_the_reason(folder, monkeypatch, raises_one_line) -> None:
    (folder / "broken").mkdir()
    (folder / "broken" / "torch.py").write_text("raise ImportError('libgomp.so.1: cannot open')")
    end_server()
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder / "broken"))
        with raises_one_line(PassFailed, "failed: ImportError: libgomp.so.1: cannot open"):
            run_fresh("odd", {}, 60)
    assert run_fresh("odd", {}, 60)["seen"] == 1


def wait_for_pid(path: Path) -> int:
    while not path.exists() or not path.read_text().endswith("\n"):
        time.sleep(0.01)
    return int(path.read_text())


def is_alive(pid: int) -> bool:
    # A process that has ended stays listed until its parent (init for an orphan) has read its exit status.
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_an_interrupted_caller_leaves_no_process_behind(folder, tmp_path) -> None:
    server = run_fresh("odd", {}, 60)["parent"]
    pid = tmp_path / "pid"

    def press() -> None:
        wait_for_pid(pid)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        run_fresh("odd", {"tell": str(pid), "sleep": 600}, 60)
    pressing.join()
    assert not is_alive(server) and not is_alive(wait_for_pid(pid))
    assert run_fresh("odd", {}, 60)["parent"] != server


def test_ctrl_c_ends_the_measurement_but_not_the_server(folder, tmp_path, raises_one_line) -> None:
    server = run_fresh("odd", {}, 60)["parent"]
    pid = tmp_path / "pid"

    def press() -> None:
        measured = wait_for_pid(pid)
        for process in (server, measured):  # a terminal sends SIGINT to all its processes
            os.kill(process, signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with raises_one_line(PassFailed, "failed: KeyboardInterrupt"):
        run_fresh("odd", {"tell": str(pid), "sleep": 600}, 60)
    pressing.join()
    assert run_fresh("odd", {}, 60)["parent"] == server
