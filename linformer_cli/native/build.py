"""Compiles the C++ for each instruction set: `python -m linformer_cli.native.build`, or at installation."""

import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
LIBRARIES = PACKAGE / "native" / "libraries"
# Fast math is not used, because it may drop NaN. maths.h has functions that are vectorised without it.
OPTIONS = (
    *("-std=c++17", "-Wall", "-Wextra", "-O3", "-g0", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-exceptions"),
)
# A fused multiply-add rounds once, not twice. The engine promises bits, so it fuses only where its C++ says so.
EXACT, FUSED = "-ffp-contract=off", "-ffp-contract=fast"
# The C++ files of every library. Those that take longest to compile are first, so that all cores are busy.
SOURCES = {
    "attention/kernels/linear.cpp": FUSED,
    "native/runner.cpp": EXACT,
    "attention/kernels/sums.cpp": FUSED,
    "attention/kernels/delta.cpp": FUSED,
    "attention/kernels/mesa.cpp": FUSED,
    "attention/kernels/scale.cpp": FUSED,
    "model/dropout.cpp": FUSED,
    "model/linear_layers.cpp": FUSED,
    "native/threads.cpp": EXACT,
    "native/library.cpp": EXACT,
}
# Builds with zig have this file instead of the C++ library, which zig would have to compile first.
RUNTIME = {"native/runtime.cpp": EXACT}
HEADERS = ("native", "attention/kernels")  # the folders of the headers
TARGET_VARIABLE = "LINTX_TARGET"  # the environment variable that names one of `TARGETS` to build a wheel for
# The first part of the name of a folder in which libraries are built.
_BUILDING = ".building-"
COMMAND = "python -m linformer_cli.native.build"
NO_COMPILER = "there is no C++ compiler (c++, g++, clang++, or the Python package ziglang)"


@dataclass(frozen=True)
class InstructionSet:
    """Instructions that a library may use, zig's name for a processor that has them, and a level of optimisation."""

    name: str
    meaning: str
    options: tuple[str, ...] = ()
    zig: str = "baseline"
    level: str = "-O3"


# The sets of each architecture, slowest first. library.cpp finds out which ones a processor supports.
INSTRUCTION_SETS = {
    "x86_64": (
        InstructionSet("x86-64", "SSE2", ("-march=x86-64",), "x86_64", "-O2"),
        InstructionSet("x86-64-v3", "AVX2 and FMA", ("-march=x86-64-v3",), "x86_64_v3"),
        InstructionSet(
            "x86-64-v4",
            "AVX-512 with VNNI",
            ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"),
            "x86_64_v4+avx512vnni-prefer_256_bit",
        ),
    ),
    "aarch64": (
        InstructionSet("aarch64", "NEON", ("-march=armv8-a",), "generic"),
        # zig's baseline for macOS is the M1.
        InstructionSet("aarch64-dotprod", "NEON with dot products", ("-march=armv8.2-a+dotprod",), "baseline+dotprod"),
    ),
}


@dataclass(frozen=True)
class Target:
    """A system that libraries are built for. `tag` is the platform of its wheels, `triple` zig's name for it."""

    architecture: str
    suffix: str
    tag: str
    triple: str | None = None

    @property
    def instruction_sets(self) -> tuple[InstructionSet, ...]:
        unknown = InstructionSet(self.architecture, "what every processor of this architecture has")
        return INSTRUCTION_SETS.get(self.architecture, (unknown,))


# The systems that libraries can be built for on any machine, with zig. Linux: glibc 2.17 or later.
TARGETS = {
    "linux-x86_64": Target("x86_64", ".so", "manylinux_2_17_x86_64.manylinux2014_x86_64", "x86_64-linux-gnu.2.17"),
    "linux-aarch64": Target("aarch64", ".so", "manylinux_2_17_aarch64.manylinux2014_aarch64", "aarch64-linux-gnu.2.17"),
    "macos-arm64": Target("aarch64", ".dylib", "macosx_11_0_arm64", "aarch64-macos.11.0"),
    "windows-x86_64": Target("x86_64", ".dll", "win_amd64", "x86_64-windows-gnu"),
}


def this_machine() -> Target:
    machine = platform.machine().lower()
    architecture = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
    return Target(architecture, suffix, re.sub(r"[-.]", "_", sysconfig.get_platform()))


def library_file(target: Target, instruction_set: InstructionSet, folder: Path | None = None) -> Path:
    return (folder or LIBRARIES) / f"{instruction_set.name}{target.suffix}"


def compute_digest(instruction_set: InstructionSet) -> str:
    """Digest the C++ files and the options that the library of an instruction set is built from."""
    found = hashlib.sha256(repr((OPTIONS, SOURCES, instruction_set)).encode())
    headers = (file for folder in HEADERS for file in (PACKAGE / folder).rglob("*.h"))
    for file in sorted({*headers, *(PACKAGE / source for source in (*SOURCES, *RUNTIME))}):
        found.update(file.read_bytes())
    return found.hexdigest()


def read_digest(library: Path) -> str | None:
    """Read the digest in the file of a library, or None if it has none. Raises `OSError` if the file cannot be read."""
    found = re.search(rb"lintx library ([0-9a-f]{64})", library.read_bytes())
    return found and found[1].decode()


def is_fresh(library: Path, instruction_set: InstructionSet) -> bool:
    """Return whether the file is there and was built from the C++ that is there now."""
    try:
        return read_digest(library) == compute_digest(instruction_set)
    except OSError:
        return False


@dataclass(frozen=True)
class Compiler:
    """The command of a C++ compiler. Unlike GCC and clang, zig has its own processor names and a folder of caches."""

    command: tuple[str, ...]
    is_zig: bool = False
    caches: Path | None = None  # None: in the home folder

    @property
    def sources(self) -> dict[str, str]:
        return SOURCES | RUNTIME if self.is_zig else SOURCES

    def options(self, target: Target, instruction_set: InstructionSet) -> tuple[str, ...]:
        if not self.is_zig:
            return *instruction_set.options, instruction_set.level
        triple = () if target.triple is None else ("-target", target.triple)
        level = "-Os" if instruction_set.level == "-O2" else instruction_set.level  # zig takes -O2 for -O3
        return *triple, f"-mcpu={instruction_set.zig}", level

    def run(self, *arguments: str) -> None:
        """Run the compiler. Raises `CompilerError` with the first error that it reports."""
        caches = {f"ZIG_{kind}_CACHE_DIR": str(self.caches) for kind in ("GLOBAL", "LOCAL") if self.caches}
        command, surroundings = (*self.command, *arguments), os.environ | caches
        outcome = subprocess.run(command, env=surroundings, capture_output=True, text=True, errors="replace")
        if outcome.returncode:
            lines = [line for line in outcome.stderr.splitlines() if "error" in line] or outcome.stderr.splitlines()
            raise CompilerError(f"{Path(self.command[0]).name}: {lines[0] if lines else 'failed'}")


class CompilerError(Exception):
    """The compiler failed."""


def find_system_compiler() -> Compiler | None:
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    return None if found is None else Compiler((found,))


def find_zig() -> Compiler | None:
    has_zig = importlib.util.find_spec("ziglang") is not None
    return Compiler((sys.executable, "-m", "ziglang", "c++"), is_zig=True) if has_zig else None


def find_compiler(target: Target) -> Compiler | None:
    """Find the system's compiler, or else zig's. Only zig's builds for other systems."""
    return (find_system_compiler() if target.triple is None else None) or find_zig()


@dataclass(frozen=True)
class Outcome:
    libraries: tuple[Path, ...]
    problems: tuple[str, ...]


def build_libraries(target: Target, folder: Path | None = None) -> Outcome:
    """Build the libraries of `target` in `folder` (None: the package) that are not up to date, or raise `OSError`."""
    folder = folder or LIBRARIES
    files = {one: library_file(target, one, folder) for one in target.instruction_sets}
    missing = {one: file for one, file in files.items() if not is_fresh(file, one)}
    compiler = find_compiler(target) if missing else None
    problems = [NO_COMPILER] if missing and compiler is None else []
    if compiler is not None:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        # zig compiles parts of its C library for each processor that it links for, so all link for the first.
        link = (*compiler.options(target, target.instruction_sets[0]), "-shared", "-s", "-pthread")
        if compiler.is_zig:
            link += ("-nostdlib++", "-Wl,-z,defs")
        with (
            tempfile.TemporaryDirectory(dir=folder, prefix=_BUILDING) as place,
            ThreadPoolExecutor(os.cpu_count()) as pool,
        ):
            compiler = replace(compiler, caches=Path(place) / "caches")
            objects: dict[InstructionSet, list[Future[str]]] = {one: [] for one in missing}
            for source in compiler.sources:
                for one, units in objects.items():
                    units.append(pool.submit(_compile, compiler, target, one, source, Path(place)))
            for one, file in missing.items():
                try:
                    linked = Path(place) / file.name
                    compiler.run(*link, *(unit.result() for unit in objects[one]), "-o", str(linked))
                    os.replace(linked, file)
                except CompilerError as error:
                    problems.append(f"no library for {one.name}: {error}")
    return Outcome(tuple(file for one, file in files.items() if is_fresh(file, one)), tuple(problems))


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed builds left behind. A folder that is a day old is assumed to belong to a killed build."""
    for leftover in folder.glob(f"{_BUILDING}*"):
        if time.time() - leftover.stat().st_mtime > 24 * 60 * 60:
            shutil.rmtree(leftover, ignore_errors=True)


def _compile(compiler: Compiler, target: Target, instruction_set: InstructionSet, source: str, folder: Path) -> str:
    compiled = folder / f"{instruction_set.name}-{Path(source).stem}.o"
    compiler.run(*_list_arguments(compiler, target, instruction_set, source), "-o", str(compiled))
    return str(compiled)


def _list_arguments(compiler: Compiler, target: Target, instruction_set: InstructionSet, file: str) -> tuple[str, ...]:
    flags = (*OPTIONS, compiler.sources[file], *compiler.options(target, instruction_set))
    digest = f'-DLINTX_DIGEST="{compute_digest(instruction_set)}"'
    return *flags, digest, "-I", str(PACKAGE / "native"), "-c", str(PACKAGE / file)


def write_compile_commands(file: Path) -> None:
    """Write how the system's compiler compiles each C++ file, for editors and clang's tools. Raises `CompilerError`."""
    compiler, target = find_system_compiler(), this_machine()
    if compiler is None:
        raise CompilerError(NO_COMPILER)
    commands = [
        {
            "directory": str(PACKAGE.parent),
            "file": str(PACKAGE / source),
            "arguments": [*compiler.command, *_list_arguments(compiler, target, target.instruction_sets[0], source)],
        }
        for source in compiler.sources
    ]
    file.write_text(json.dumps(commands, indent=1), encoding="utf-8")


def main() -> int:
    if "--compile-commands" in sys.argv[1:]:
        write_compile_commands(PACKAGE.parent / "compile_commands.json")
        return 0
    began = time.monotonic()
    outcome = build_libraries(this_machine())
    for problem in outcome.problems:
        print(problem, file=sys.stderr)
    for library in outcome.libraries:
        print(f"{library} ({library.stat().st_size / 1e6:.1f} MB)")
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0 if outcome.libraries else 1


if __name__ == "__main__":
    sys.exit(main())
