"""Tests of the environment that measurements depend on, and of when slow modules are loaded."""

import os
import subprocess
import sys

import pytest

from linformer_cli.__main__ import limit_spinning

SYSTEM = ("device", "memory", "signals", "environment")


def test_configurations_and_plots_import_neither_torch_nor_matplotlib() -> None:
    modules = ("config", "presets", "errors", "report.plots", *(f"system.{name}" for name in SYSTEM))
    script = "; ".join(["import sys", *(f"import linformer_cli.{name}" for name in modules), "print(*sys.modules)"])
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True, check=True)
    assert not {"torch", "matplotlib"} & set(done.stdout.split())


@pytest.mark.slow
def test_sampling_does_not_load_torchs_compiler() -> None:
    """Loading the compiler takes seconds, about as long as loading torch."""
    script = (
        "import sys, linformer_cli\n"
        "linformer_cli.sample_images(linformer_cli.load_model('mnist-deep'), count=1)\n"
        "sys.exit(', '.join({'torch._dynamo', 'torch._inductor', 'sympy'} & sys.modules.keys()) or None)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_spinning_of_threads_is_limited_unless_the_environment_sets_it(monkeypatch, given, expected) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "x")  # monkeypatch restores the variables after the test
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    limit_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == expected
