"""Tests that other machines draw the same images as this one, bit for bit.

aarch64 runs in qemu, with and without dot products, Windows in wine, and WebAssembly in node.
"""

import importlib.util
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from demo.node import Node, needs_node
from machine import needs_library
from sampling.cases import CHANGES
from sampling.test_native_mechanisms import POSITIONS, VARIANTS

from linformer_cli.checkpoint import load_model
from linformer_cli.config import ImageShape
from linformer_cli.data.sequence import paint
from linformer_cli.model.compile_step import encode_model
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.native import build
from linformer_cli.sampling.decode import Sampler
from linformer_cli.sampling.engines import NATIVE
from linformer_cli.sampling.engines.native import NativeEngine

pytestmark = [pytest.mark.slow, needs_library]
NATIVE_FOLDER = build.PACKAGE / "native"
SEED, COUNT = 11, 9
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
    pixels = paint(images, model.config.image).tobytes()
    return Case(encode_model(model, NativeEngine.window, torch.int8), pixels)


@pytest.fixture(scope="module")
def cases(build_tiny_model) -> dict[str, Case]:
    """A tiny model of every mechanism and of every kind of network."""
    image = ImageShape(height=POSITIONS // 10, width=10, levels=16)
    changes = {name: {"attention": a, "attention_options": o, "image": image} for name, (a, o) in VARIANTS.items()}
    return {name: draw_here(build_tiny_model(**change), COUNT) for name, change in (changes | CHANGES).items()}


@dataclass(frozen=True)
class Machine:
    """A command that compiles for another machine, and the program that runs the result on this machine."""

    compiler: tuple[str, ...]
    emulator: tuple[str, ...]

    @property
    def missing(self) -> str | None:
        """A program that is needed but not installed, if any."""
        absent = [name for name in (self.compiler[0], self.emulator[0]) if shutil.which(name) is None]
        if "ziglang" in self.compiler and importlib.util.find_spec("ziglang") is None:
            absent.append("ziglang")
        return absent[0] if absent else None


WINDOWS = build.TARGETS["windows-x86_64"]
ZIG = build.Compiler((sys.executable, "-m", "ziglang", "c++"), is_zig=True)
ARM_COMPILER = ("aarch64-linux-gnu-g++", "-static", "-pthread")
NEON, DOT_PRODUCTS = build.INSTRUCTION_SETS["aarch64"]
# The Cortex-A53 has no dot products. The Neoverse N1 is one of the first processors with them.
QEMU = {name: ("qemu-aarch64", "-cpu", name) for name in ("cortex-a53", "neoverse-n1")}
MACHINES = {
    NEON.name: Machine((*ARM_COMPILER, *NEON.options), QEMU["cortex-a53"]),
    DOT_PRODUCTS.name: Machine((*ARM_COMPILER, *DOT_PRODUCTS.options), QEMU["neoverse-n1"]),
    # The first build takes minutes, because zig compiles the C and C++ libraries of Windows.
    "windows": Machine((*ZIG.command, *ZIG.options(WINDOWS, WINDOWS.instruction_sets[0])), ("wine",)),
}


@pytest.fixture(params=MACHINES)
def machine(request) -> Machine:
    found = MACHINES[request.param]
    if found.missing is not None:
        pytest.skip(f"there is no {found.missing}")
    return found


def compile_files(command: tuple[str, ...], target: Path, *files: Path, level: str = "-O3") -> None:
    options = (*build.OPTIONS, level, build.EXACT, '-DLINTX_DIGEST=""', "-I", str(NATIVE_FOLDER), "-pthread")
    subprocess.run([*command, *options, *files, "-o", target], check=True)


def test_other_machines_draw_the_same_images(machine: Machine, cases, tmp_path: Path) -> None:
    """Also checks that only the library for dot products has them; building takes most of the time."""
    drawer = tmp_path / "draw.exe"
    # Machines without dot products run the same C++ but for the products, which every kind of network has.
    few = machine == MACHINES[NEON.name]
    files = [NATIVE_FOLDER / f"{name}.cpp" for name in ("draw", "runner", "threads")]
    compile_files(machine.compiler, drawer, *files, level="-O1" if few else "-O3")
    if machine.compiler[0] == ARM_COMPILER[0]:
        command = ("aarch64-linux-gnu-objdump", "--disassemble", drawer)
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert ("\tsdot\t" in listing) == (machine == MACHINES[DOT_PRODUCTS.name])
    counts = {name: (cases[name], COUNT) for name in (CHANGES if few else cases)}
    counts["mnist-deep"] = (draw_here(load_model("mnist-deep"), 1), 1)
    for name, (case, count) in counts.items():
        (tmp_path / "program").write_bytes(case.program)
        command = [*machine.emulator, drawer, "program", str(SEED), str(count)]
        # A pipe would stay open as long as the servers that wine starts.
        with (tmp_path / "drawn").open("wb") as output:
            subprocess.run(command, cwd=tmp_path, check=True, stdout=output)
        drawn = (tmp_path / "drawn").read_bytes()
        assert drawn[-len(case.pixels) :] == case.pixels, name


def test_other_machines_compute_the_same_frequencies(machine: Machine, tmp_path: Path) -> None:
    """Compressed files depend on these integers."""
    here = build.find_system_compiler()
    if here is None:
        pytest.skip("there is no compiler")
    found = []
    for compiler, emulator in ((here.command, ()), (machine.compiler, machine.emulator)):
        files = Path(__file__).with_name("frequencies_main.cpp"), NATIVE_FOLDER / "threads.cpp"
        compile_files(compiler, tmp_path / "main.exe", *files)
        with (tmp_path / "found").open("wb") as output:
            subprocess.run([*emulator, "./main.exe"], cwd=tmp_path, check=True, stdout=output)
        found.append((tmp_path / "found").read_bytes())
    assert found[0] == found[1] and len(found[0]) == 2 * 6 * 50 * 256 * 4


def test_dot_products_are_detected(tmp_path: Path) -> None:
    machine, program = MACHINES[NEON.name], tmp_path / "main"
    if machine.missing is not None:
        pytest.skip(f"there is no {machine.missing}")
    compile_files(machine.compiler, program, Path(__file__).with_name("supports_main.cpp"))
    found = {
        (one.name, processor): subprocess.run((*emulator, program, one.name), capture_output=True, check=True).stdout
        for one in (NEON, DOT_PRODUCTS)
        for processor, emulator in QEMU.items()
    }
    assert found == {
        (NEON.name, "cortex-a53"): b"yes\n",
        (NEON.name, "neoverse-n1"): b"yes\n",
        (DOT_PRODUCTS.name, "cortex-a53"): b"no\n",
        (DOT_PRODUCTS.name, "neoverse-n1"): b"yes\n",
    }


@needs_node
def test_webassembly_draws_the_same_images(cases, tmp_path: Path) -> None:
    drawn = Node(tmp_path).run(DRAW, [case.program for case in cases.values()])
    for (name, case), pixels in zip(cases.items(), drawn, strict=True):
        assert bytes(pixels) == case.pixels, name
