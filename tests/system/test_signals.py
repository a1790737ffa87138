"""Tests that the first signal sets the request and the second ends the process."""

import signal
import subprocess
import sys

import pytest

from linformer_cli.errors import Interrupted
from linformer_cli.system.signals import StopRequest, catch_signals


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_set_request_ends_the_command_as_shells_expect(number, exit_code) -> None:
    with pytest.raises(Interrupted, match=r"^saved at step 3\Z") as error:
        StopRequest(int(number)).raise_if_set("saved at step 3")
    assert error.value.exit_code == exit_code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_only_sets_the_request(number) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with catch_signals() as request:
        assert request.signal_number is None
        signal.raise_signal(number)
        assert request.signal_number == number
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_an_ignored_signal_stays_ignored() -> None:
    """A shell starts the background jobs of a script like this."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with catch_signals() as request:
            signal.raise_signal(signal.SIGINT)
            assert request.signal_number is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_handlers_are_restored_after_an_error_too() -> None:
    def mine(number: int, frame: object) -> None:
        raise AssertionError("not while signals are caught")

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with pytest.raises(KeyError), catch_signals() as request:
            signal.raise_signal(signal.SIGTERM)
            assert request.signal_number == signal.SIGTERM
            raise KeyError
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_second_signal_ends_the_process_at_once() -> None:
    script = """
import signal
from linformer_cli.system.signals import catch_signals
with catch_signals() as request:
    signal.raise_signal(signal.SIGINT)
    print("first", request.signal_number, flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("not reached", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "first 2\n"
    assert ended.returncode == -signal.SIGTERM
    assert ended.stderr == ""
