"""Builds a wheel for every system in `build.TARGETS` and checks it: python .ci/wheels.py FOLDER

zig's compiler builds for all of them on any of them. pip fetches it while it builds.
"""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from linformer_cli.native import build  # noqa: E402

MOST_BYTES = 12_000_000
# What the file of a library begins with: the format, and for ELF files the number of the architecture.
BEGINNINGS = {
    "linux-x86_64": rb"\x7fELF.{14}\x3e\x00",
    "linux-aarch64": rb"\x7fELF.{14}\xb7\x00",
    "macos-arm64": rb"\xcf\xfa\xed\xfe\x0c\x00\x00\x01",
    "windows-x86_64": rb"MZ.*PE\x00\x00\x64\x86",
}


def find_functions() -> set[str]:
    """The names of the functions that Python calls, read from the C++."""
    text = "".join((build.PACKAGE / source).read_text() for source in build.SOURCES)
    return set(re.findall(r"^\S.* \*?(lintx_\w+)\(", text, flags=re.MULTILINE))


def build_wheel(system: str, folder: Path) -> Path:
    command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    subprocess.run(command, check=True, env={**os.environ, build.TARGET_VARIABLE: system})
    (wheel,) = folder.glob(f"*-py3-none-{build.TARGETS[system].tag}.whl")
    return wheel


def check_wheel(system: str, wheel: Path) -> None:
    """Check the size, the addresses in the readme, and the format, functions and glibc version of every library."""
    target = build.TARGETS[system]
    assert wheel.stat().st_size < MOST_BYTES, wheel.stat().st_size
    with zipfile.ZipFile(wheel) as content:
        (about,) = (content.read(name) for name in content.namelist() if name.endswith(".dist-info/METADATA"))
        assert b"](docs/" not in about and b"/raw/main/docs/" in about, "the readme has relative addresses"
        libraries = {Path(name).name: name for name in content.namelist() if "/native/libraries/" in name}
        expected = {build.library_file(target, one).name: one for one in target.instruction_sets}
        assert libraries.keys() == expected.keys(), libraries
        for name, instruction_set in expected.items():
            data = content.read(libraries[name])
            assert re.match(BEGINNINGS[system], data, flags=re.DOTALL), f"{name} is not for {system}"
            assert build.compute_digest(instruction_set).encode() in data, f"{name} was built from other C++"
            missing = {function for function in find_functions() if function.encode() not in data}
            assert not missing, f"{name} lacks {missing}"
            versions = {tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", data)}
            assert all(version <= (2, 17) for version in versions), f"{name} needs glibc {max(versions)}"
    print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for system in build.TARGETS:
        check_wheel(system, build_wheel(system, folder))


if __name__ == "__main__":
    main()
