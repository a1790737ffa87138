"""What the tests expect of the machine that they run on."""

import os
import shutil

import torch

HAS_COMPILER = any(map(shutil.which, ("c++", "g++", "clang++")))
# What `--engine auto` takes for linear attention in float32.
FASTEST_ENGINE = "native" if HAS_COMPILER else "textbook"
# And in a benchmark, of an untrained model.
TIMED_ENGINE = "stepwise" if HAS_COMPILER else "textbook"
# Kernels in Triton run where they are meant to, or else on the CPU, in Triton's own interpreter.
TRITON_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NO_TRITON = "Triton is not installed"
# The metrics of a run that depend on the machine, not on the training: left out when two runs are compared.
TIMING_METRICS = ("elapsed_seconds", "images_per_second", "peak_memory_bytes")


def prepare_triton() -> None:
    """Before Triton is imported, by whatever: it decides then how kernels run."""
    if TRITON_DEVICE.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
