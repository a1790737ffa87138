"""Tests of building the libraries: what is kept, what is built again, and what happens without a working compiler."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from machine import needs_library

from linformer_cli.native import build

needs_shell = pytest.mark.skipif(sys.platform == "win32", reason="the compiler is a shell script")


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """`fake_compiler(script)` makes a shell script the C++ compiler and returns the path of its log."""

    def install(script: str) -> Path:
        file = tmp_path / "bin" / "c++"
        file.parent.mkdir()
        file.write_text(f'#!/bin/sh\necho "$@" >> "$0.log"\n{script}\n')
        file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{file.parent}:/usr/bin:/bin")
        monkeypatch.delenv("CXX", raising=False)
        return Path(f"{file}.log")

    return install


def copy_libraries(folder: Path) -> list[Path]:
    """Copy this machine's libraries to `folder` and return their paths."""
    target = build.this_machine()
    return [
        Path(shutil.copy(build.library_file(target, one), build.library_file(target, one, folder)))
        for one in target.instruction_sets
    ]


def test_the_libraries_were_built_from_the_cpp_that_is_here() -> None:
    """Otherwise, the tests of compiled code are skipped. Without a compiler, there are no libraries."""
    target = build.this_machine()
    files = {one: build.library_file(target, one) for one in target.instruction_sets}
    if not any(file.exists() for file in files.values()) and build.find_system_compiler() is None:
        pytest.skip("there is no C++ compiler")
    stale = [file.name for one, file in files.items() if not build.is_fresh(file, one)]
    assert not stale, f"the C++ has changed: run '{build.COMMAND}'"


def test_every_cpp_file_is_in_the_libraries() -> None:
    """draw.cpp is an example, and wasm.cpp is for the demo."""
    files = {file.relative_to(build.PACKAGE).as_posix() for file in build.PACKAGE.rglob("*.cpp")}
    assert files == {*build.SOURCES, *build.RUNTIME, "native/draw.cpp", "demo/wasm.cpp"}


@needs_library
@needs_shell
def test_a_library_that_is_up_to_date_is_kept(tmp_path, fake_compiler) -> None:
    log, files = fake_compiler("exit 1"), copy_libraries(tmp_path)
    assert build.build_libraries(build.this_machine(), tmp_path) == build.Outcome(tuple(files), ())
    assert not log.exists()


@needs_library
@needs_shell
@pytest.mark.parametrize("damage", ["other C++", "truncated", "missing"])
def test_an_outdated_damaged_or_missing_library_is_built_again(tmp_path, fake_compiler, damage) -> None:
    """The fake compiler writes only the digest, so its result is not a library."""
    log = fake_compiler('for last in "$@"; do :; done\necho "$@" | grep -o "LINTX_DIGEST=.*" > "$last"')
    *others, file = copy_libraries(tmp_path)
    content = file.read_bytes()
    if damage == "other C++":
        file.write_bytes(content.replace(b"lintx library ", b"lintx library 0"))
    elif damage == "truncated":
        file.write_bytes(content[:1000])
    else:
        file.unlink()
    outcome = build.build_libraries(build.this_machine(), tmp_path)
    assert outcome.libraries == tuple(others)  # the new file is not a library, so it is left out
    assert len(log.read_text().splitlines()) == len(build.SOURCES) + 1


@needs_shell
def test_a_failing_compiler_gives_one_line_for_each_library(tmp_path, fake_compiler) -> None:
    fake_compiler("echo 'runner.cpp: in function f' >&2\necho 'runner.cpp:1: error: I cannot' >&2\nexit 1")
    target = build.this_machine()
    outcome = build.build_libraries(target, tmp_path / "new")
    assert outcome.libraries == ()
    assert outcome.problems == tuple(
        f"no library for {one.name}: c++: runner.cpp:1: error: I cannot" for one in target.instruction_sets
    )
    assert not list((tmp_path / "new").iterdir())


@needs_shell
def test_what_killed_builds_left_behind_is_removed(tmp_path, fake_compiler) -> None:
    fake_compiler("exit 1")
    old, new = tmp_path / ".building-old", tmp_path / ".building-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "engine.o").touch()
    os.utime(old, (0, 0))
    build.build_libraries(build.this_machine(), tmp_path)
    assert not old.exists() and new.exists()  # another process may be building in the new one


def test_without_a_compiler_nothing_is_built(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    outcome = build.build_libraries(build.this_machine(), tmp_path / "new")
    assert outcome == build.Outcome((), (build.NO_COMPILER,)) and not (tmp_path / "new").exists()


def test_only_zig_builds_for_other_systems(monkeypatch) -> None:
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: object())
    for target in build.TARGETS.values():
        compiler = build.find_compiler(target)
        assert compiler is not None and compiler.is_zig
        for one in target.instruction_sets:
            assert compiler.options(target, one)[:2] == ("-target", target.triple)


def test_zig_does_without_its_cpp_library_and_leaves_nothing_in_the_home_folder(tmp_path, monkeypatch) -> None:
    """zig compiles its libraries for every processor that it links for, and keeps the results in its caches."""
    package = tmp_path / "modules" / "ziglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()  # or an installed ziglang would be found first
    (package / "__main__.py").write_text(
        "import os, sys\n"
        "caches = [os.environ[f'ZIG_{kind}_CACHE_DIR'] for kind in ('GLOBAL', 'LOCAL')]\n"
        "with open(os.environ['LOG'], 'a') as log: print(*caches, *sys.argv[1:], file=log)\n"
        "open(sys.argv[-1], 'w').close()\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    build.build_libraries(build.TARGETS["windows-x86_64"], tmp_path / "new")
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    links = [line for line in lines if "-shared" in line]
    assert len(links) == 3 and all("-nostdlib++" in line for line in links)
    assert all(any(Path(word).stem.endswith("-runtime") for word in line) for line in links)
    assert {word for line in links for word in line if word.startswith("-mcpu=")} == {"-mcpu=x86_64"}
    assert all(Path(folder).is_relative_to(tmp_path / "new") for line in lines for folder in line[:2])
    assert {file.suffix for file in (tmp_path / "new").iterdir()} == {".dll"}


@pytest.mark.parametrize("changed", ["native/ops", "attention/kernels", "an option"])
def test_the_digest_depends_on_everything_that_a_library_is_built_from(tmp_path, monkeypatch, changed) -> None:
    one = build.this_machine().instruction_sets[0]
    before = build.compute_digest(one)
    if changed != "an option":
        for source in build.SOURCES:
            (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(build.PACKAGE / source, tmp_path / source)
        for folder in build.HEADERS:
            shutil.copytree(build.PACKAGE / folder, tmp_path / folder, dirs_exist_ok=True)
        monkeypatch.setattr(build, "PACKAGE", tmp_path)
        assert build.compute_digest(one) == before
        (tmp_path / changed / "new.h").write_text("// new\n")
    else:
        monkeypatch.setattr(build, "OPTIONS", (*build.OPTIONS, "-ffast-math"))
    assert build.compute_digest(one) != before
