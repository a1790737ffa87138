"""Tests that other machines draw the same images as this one, bit for bit: aarch64 in qemu, and WebAssembly in node."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from demo.node import Node, needs_node
from machine import HAS_LIBRARY, NO_LIBRARY
from sampling.cases import CHANGES
from sampling.test_native_mechanisms import POSITIONS, VARIANTS

from linformer_cli.checkpoint import load_model
from linformer_cli.config import ImageShape
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.model.program import encode_model
from linformer_cli.native import build
from linformer_cli.native.constants import definitions
from linformer_cli.sampling.decode import Sampler
from linformer_cli.sampling.engines import NATIVE
from linformer_cli.sampling.engines.native import NativeEngine

QEMU, COMPILER = shutil.which("qemu-aarch64"), shutil.which("aarch64-linux-gnu-g++")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_LIBRARY, reason=NO_LIBRARY)]
SEED, COUNT = 11, 20
DRAW = f"""(names, open) => names.map((name) => {{
  const runner = open(name, {COUNT});
  runner.start({SEED});
  while (runner.draw() < runner.values);
  return runner.allPixels().map((pixels) => Array.from(pixels)).flat();
}})"""


@dataclass(frozen=True)
class Case:
    """A program file and the brightnesses of the images that this machine draws from it."""

    program: bytes
    pixels: bytes


def draw_here(model: PixelModel, count: int) -> Case:
    images = Sampler(model, SEED, engine=NATIVE, products=torch.int8).sample_images(count)
    return Case(encode_model(model, NativeEngine.window, torch.int8), images.tobytes())


@pytest.fixture(scope="module")
def cases(build_tiny_model) -> dict[str, Case]:
    """A tiny model of every mechanism and of every kind of network."""
    image = ImageShape(height=POSITIONS // 10, width=10, levels=16)
    changes = {name: {"attention": a, "attention_options": o, "image": image} for name, (a, o) in VARIANTS.items()}
    return {name: draw_here(build_tiny_model(**change), COUNT) for name, change in (changes | CHANGES).items()}


@pytest.mark.skipif(QEMU is None, reason="there is no qemu-aarch64")
@pytest.mark.skipif(COMPILER is None, reason="there is no aarch64-linux-gnu-g++")
def test_aarch64_draws_the_same_images(cases, tmp_path: Path) -> None:
    source = build.PACKAGE / "native"
    options = (*build.OPTIONS, build.EXACT, *definitions(), "-static", "-pthread", "-I", str(source))
    files = (str(source / "draw.cpp"), str(source / "runner.cpp"))
    subprocess.run([str(COMPILER), *options, *files, "-o", tmp_path / "draw"], check=True)
    counts = {name: (case, COUNT) for name, case in cases.items()}
    counts["mnist-deep"] = (draw_here(load_model("mnist-deep"), 1), 1)
    for name, (case, count) in counts.items():
        (tmp_path / "program").write_bytes(case.program)
        command = [str(QEMU), tmp_path / "draw", tmp_path / "program", str(SEED), str(count)]
        drawn = subprocess.run(command, check=True, capture_output=True).stdout
        assert drawn[-len(case.pixels) :] == case.pixels, name


@needs_node
def test_webassembly_draws_the_same_images(cases, tmp_path: Path) -> None:
    drawn = Node(tmp_path).run(DRAW, [case.program for case in cases.values()])
    for (name, case), pixels in zip(cases.items(), drawn, strict=True):
        assert bytes(pixels) == case.pixels, name
