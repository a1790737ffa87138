"""Tests that the Triton kernels compile for a GPU. The interpreter also runs code that the compiler rejects."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from machine import NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton's assembler is not available on every platform")
def test_every_kernel_compiles_and_fits_into_shared_memory() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = Path(__file__).with_name("compile_kernels.py")
    finished = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert finished.returncode == 0, finished.stderr
    shared = [int(line.split()[1]) for line in finished.stdout.splitlines()]
    # GPUs of compute capability 8.6 allow only 99 KiB per block.
    assert len(shared) == 34 and max(shared) <= 99 * 1024
