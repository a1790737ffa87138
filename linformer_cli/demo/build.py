"""Compiles the engine to WebAssembly: `python -m linformer_cli.demo.build`. It needs the Python package ziglang."""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from linformer_cli.errors import LintxError
from linformer_cli.files import write_file

FOLDER = Path(__file__).parent
ENGINE, DIGEST = FOLDER / "engine.wasm", FOLDER / "engine.sha256"
SOURCE, HEADERS = FOLDER / "wasm.cpp", FOLDER.parent / "native"
INCLUDED = ("runner.cpp", "runtime.cpp")  # the C++ files that it includes
# The functions of runner.h that the page calls, without "lintx_".
FUNCTIONS = (
    *("open", "close", "error", "describe", "filter", "guide", "start", "continue", "draw_next", "give_next"),
    *("resize", "keep", "pick", "probabilities", "values", "pixels", "palette", "state"),
)
OPTIONS = (
    *("-target", "wasm32-wasi", "-mexec-model=reactor", "-msimd128", "-std=c++17", "-O3"),
    # Without contraction, the results are the same bits as those of the native engine.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    # A page has one thread, and the engine throws no exceptions.
    *("-fno-exceptions", "-fno-rtti", "-Dthread_local=", "-fno-c++-static-destructors"),
    *("-Wl,--strip-all", "-Wl,--export=malloc", "-Wl,--export=free"),
    *(f"-Wl,--export=lintx_{name}" for name in FUNCTIONS),
)
# The linker leaves five bytes for every address, unless it has this option, which zig does not pass on.
LINK_OPTIONS = ("--compress-relocations",)


def compute_digest() -> str:
    """Digest everything that engine.wasm is compiled from, except the compiler."""
    found = hashlib.sha256(repr((OPTIONS, LINK_OPTIONS)).encode())
    for file in (SOURCE, *(HEADERS / name for name in INCLUDED), *sorted(HEADERS.rglob("*.h"))):
        found.update(file.read_bytes())
    return found.hexdigest()


def build_engine() -> None:
    """Compile engine.wasm. Raises `LintxError` with what the compiler says if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / ENGINE.name
        zig, environment = (sys.executable, "-m", "ziglang"), os.environ | {"ZIG_VERBOSE_LINK": "1"}
        arguments = [*OPTIONS, "-I", str(HEADERS), str(SOURCE), "-o", str(target)]
        done = subprocess.run([*zig, "c++", *arguments], env=environment, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise LintxError(done.stderr)
        (link,) = (line for line in done.stderr.splitlines() if line.startswith("wasm-ld "))
        subprocess.run([*zig, *link.split(), *LINK_OPTIONS], check=True)
        write_file(ENGINE, target.read_bytes())
    write_file(DIGEST, f"{compute_digest()}\n".encode())


if __name__ == "__main__":
    build_engine()
