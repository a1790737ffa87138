"""Tests that compile the C++ of the package: warnings, structures, sanitizers, and threads after fork."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from machine import needs_library
from native import sanitized

from linformer_cli.native import build
from linformer_cli.native.library import read_structure

pytestmark = pytest.mark.slow

SYSTEM, ZIG = build.find_system_compiler(), build.find_zig()
COMPILERS = [
    pytest.param(one, id=name, marks=pytest.mark.skipif(one is None, reason=f"there is no {name}"))
    for name, one in (("system compiler", SYSTEM), ("ziglang", ZIG))
]
NATIVE, TESTS = build.PACKAGE / "native", Path(__file__).parent
HEADERS = ("-std=c++17", "-I", str(NATIVE))
# The structures that Python reads from the C++, and the files that declare them.
STRUCTURES = {
    "View": "native/scan.h",
    "LinearCall": "attention/kernels/linear_maps.h",
    "SumsCall": "attention/kernels/sums.cpp",
    "DeltaCall": "attention/kernels/delta.cpp",
    "MesaCall": "attention/kernels/mesa.cpp",
    "ScaleCall": "attention/kernels/scale.cpp",
    "BiasCall": "model/linear_layers.cpp",
    "Dropout": "model/dropout.cpp",
    "Norm": "model/dropout.cpp",
}


@pytest.mark.parametrize("compiler", COMPILERS)
def test_no_file_has_warnings(compiler: build.Compiler, tmp_path: Path) -> None:
    """wasm.cpp needs a compiler for WebAssembly. The files that it includes are here."""
    # zig does without -fsyntax-only.
    only = ("-O0", "-c", "-o", str(tmp_path / "compiled.o")) if compiler.is_zig else ("-fsyntax-only",)
    options = (*build.OPTIONS, *HEADERS, '-DLINTX_DIGEST=""', "-Werror", *only)
    for file in (*build.PACKAGE.rglob("*.cpp"), *TESTS.glob("*.cpp")):
        if file.name != "wasm.cpp":
            replace(compiler, caches=tmp_path).run(*options, str(file))


@pytest.mark.skipif(SYSTEM is None, reason=build.NO_COMPILER)
@pytest.mark.parametrize(("name", "file"), STRUCTURES.items(), ids=STRUCTURES)
def test_python_and_cpp_agree_on_every_field(name: str, file: str, tmp_path: Path) -> None:
    structure = read_structure(file, name)
    checks = [f"static_assert(sizeof({name}) == {ctypes.sizeof(structure)});"]
    for field, kind, *_ in structure._fields_:
        offset = getattr(structure, field).offset
        checks.append(f"static_assert(offsetof({name}, {field}) == {offset});")
        checks.append(f"static_assert(sizeof({name}::{field}) == {ctypes.sizeof(kind)});")
    source = tmp_path / "checks.cpp"
    source.write_text("\n".join(["#include <cstddef>", f'#include "{build.PACKAGE / file}"', *checks]))
    SYSTEM.run(*HEADERS, "-fsyntax-only", str(source))


@pytest.mark.skipif(SYSTEM is None, reason=build.NO_COMPILER)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize(
    ("sanitizers", "runtime"),
    [((), ()), ((), ("runtime.cpp",)), (sanitized.OPTIONS, ("runtime.cpp",)), (("-fsanitize=thread", "-g1"), ())],
    ids=["plain", "plain-runtime", "address-runtime", "thread"],
)
def test_threads_share_work_also_after_fork(sanitizers: Sequence[str], runtime: Sequence[str], tmp_path: Path) -> None:
    """In both kinds of builds: zig's have runtime.cpp instead of the C++ library."""
    program, empty = str(tmp_path / "program"), tmp_path / "empty.cpp"
    empty.write_text("int main() {}\n")
    try:
        SYSTEM.run(*sanitizers, str(empty), "-o", program)
    except build.CompilerError as error:
        pytest.skip(f"the compiler lacks {sanitizers[0]}: {error}")
    files = (TESTS / "runtime_main.cpp", *(NATIVE / file for file in ("threads.cpp", *runtime)))
    SYSTEM.run(*HEADERS, "-O1", *sanitizers, *map(str, files), "-o", program, "-pthread")
    # Unless told otherwise, the sanitizer of threads ends a child that starts threads.
    environment = os.environ | {"TSAN_OPTIONS": "die_after_fork=0"}
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_library
@pytest.mark.skipif(sys.platform != "linux" or SYSTEM is None, reason="this needs LD_PRELOAD and a C++ compiler")
def test_training_has_no_undefined_behaviour(tmp_path: Path) -> None:
    def run(what: str, **environment: str) -> None:
        paths = os.pathsep.join((str(build.PACKAGE.parent), str(TESTS.parent)))
        command = [sys.executable, str(TESTS / "sanitized.py"), str(tmp_path), what]
        environment |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "2"}
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]

    runtimes = [find_runtime(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    run("build")
    # Leaks of Python and torch are not of interest here.
    run("run", LD_PRELOAD=" ".join(runtimes), ASAN_OPTIONS="detect_leaks=0")


def find_runtime(name: str) -> str:
    """The path of a library of GCC. Skips the test where there is none."""
    done = subprocess.run([*SYSTEM.command, f"-print-file-name={name}"], capture_output=True, text=True)
    path = done.stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"the compiler has no {name}")
    return path
