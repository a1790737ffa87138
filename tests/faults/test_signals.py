"""Tests that a signal at any moment of a short command ends it without a traceback, once `main` has begun."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")]


def test_a_signal_during_startup_gives_no_traceback(copy: Path, share: float) -> None:
    command, moments = [sys.executable, "-m", "linformer_cli", "info", str(copy)], random.Random(5)
    began = time.monotonic()
    assert subprocess.run(command, capture_output=True).returncode == 0
    longest = time.monotonic() - began
    codes: Counter[int] = Counter()
    early = 0
    for _ in range(max(round(600 * share), 4)):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(moments.uniform(0, longest))
        number = moments.choice((signal.SIGINT, signal.SIGTERM))
        process.send_signal(number)
        _, errors = process.communicate()
        if b"Traceback" in errors:
            # Before `main` installs its handler, Python itself answers Ctrl-C: with a traceback, and with code 1 if it
            # has not finished its own startup. `runpy` calls `main`.
            assert number == signal.SIGINT, errors.decode()
            assert not (b"linformer_cli/__main__.py" in errors and b", in main" in errors), errors.decode()
            assert process.returncode in (1, -number)
            early += 1
            continue
        # Before Python has started, the system ends the process; then its code is the negative number of the signal.
        assert process.returncode in (0, 128 + number, -number)
        codes[process.returncode] += 1
    print(f"exit codes: {dict(codes)}; {early} times Ctrl-C came before `main`")
