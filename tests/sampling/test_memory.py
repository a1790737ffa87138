"""Tests, on whole processes, that the memory of sampling with linear attention does not grow with the image."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from linformer_cli.config import ImageShape, ModelConfig
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.presets import PRESETS
from linformer_cli.system.memory import measure_peak_memory
from linformer_cli.sampling.decode import Sampler

height, width, attention = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
network = PRESETS["tiny"].model_copy(update={"attention": attention})
model = PixelModel(ModelConfig(**network.model_dump(), image=ImageShape(height=height, width=width))).eval()
before = measure_peak_memory()
images = Sampler(model).sample(range(128)).values
print(measure_peak_memory() - before - images.numel() * images.element_size())
"""


def measure_growth(height: int, width: int, attention: str) -> int:
    """Return by how many bytes sampling raises the peak of a fresh process, without the 128 images themselves."""
    arguments = [sys.executable, "-c", SCRIPT, str(height), str(width), attention]
    return int(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
def test_sampling_memory_is_flat_for_linear_and_grows_for_softmax():
    """Compares 784 and 3,072 positions. The model, torch and Python are not counted, because they would hide a leak.

    An earlier version kept a small tensor at every step. The heap could not reuse memory and grew by 260 KB per
    position.
    """
    short, long = measure_growth(28, 28, "linear"), measure_growth(48, 64, "linear")
    assert abs(long - short) < 0.1 * short + 2**20, (short, long)
    assert measure_growth(28, 28, "softmax") > 3 * short
