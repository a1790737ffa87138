"""Tests that libraries are compiled once and cached, and that no other user can replace them."""

import ctypes
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from stat import ST_UID

import pytest
from machine import HAS_COMPILER

from linformer_cli.native import cache, compiler

needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C++ compiler")
needs_user_ids = pytest.mark.skipif(not hasattr(os, "getuid"), reason="there are no user ids")
needs_superuser = pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can change the owner of a file"
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The source of a library with one function, `answer`."""
    file = tmp_path / "answer.cpp"
    file.write_text('extern "C" int answer() { return 42; }\n')
    return file


@pytest.fixture
def load(source: Path) -> Callable[[], ctypes.CDLL]:
    """Provides a function that loads the library as a new process would."""

    def load() -> ctypes.CDLL:
        compiler.try_load.cache_clear()
        return compiler.load_library(source)

    return load


def find_library(cache: Path) -> Path:
    (library,) = cache.glob("*.so")
    return library


def plant(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy `library` and its checksum to another cache, because a process loads a library only once per path."""
    monkeypatch.setenv("LINTX_CACHE", str(tmp_path / "other"))
    planted = tmp_path / "other" / "native" / library.name
    planted.parent.mkdir(parents=True, mode=0o700)
    shutil.copy(library, planted)
    shutil.copy(library.with_suffix(".sha256"), planted.with_suffix(".sha256"))
    return planted


# Compiling


def test_asking_again_for_a_missing_library_keeps_no_stack_frames(source, fresh_compiler, monkeypatch) -> None:
    """An error that is stored and raised again keeps every stack frame that it has passed."""
    monkeypatch.setenv("PATH", str(fresh_compiler))
    errors = []
    for _ in range(2):
        assert not compiler.has_library(source)
        with pytest.raises(compiler.NoCompiler, match="no C\\+\\+ compiler") as raised:
            compiler.load_library(source)
        errors.append(raised.value)
    assert errors[0] is not errors[1]


@needs_compiler
def test_a_library_is_compiled_once(load, fresh_compiler, fake_compiler) -> None:
    assert load().answer() == 42
    real = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert real is not None
    # This compiler logs its runs and calls the real one.
    counter = fake_compiler(f'echo run >> "$0.log"\nexec {real} "$@"')
    assert load().answer() == 42 and load().answer() == 42
    assert Path(f"{counter}.log").read_text().split() == ["run", "run"]  # it compiles once and links once


@needs_compiler
def test_a_processor_with_fewer_features_gets_its_own_kernels(load, fresh_compiler, monkeypatch) -> None:
    """A virtual machine can hide features of a processor, and kernels that use these features would crash."""
    load()
    monkeypatch.setattr(compiler, "processor_features", lambda: "fpu")
    load()
    assert len(list(fresh_compiler.glob("*.so"))) == 2


@needs_compiler
def test_a_changed_header_gives_another_library(load, fresh_compiler, monkeypatch, tmp_path) -> None:
    load()
    headers = tmp_path / "headers"
    shutil.copytree(compiler.HEADERS, headers)
    (headers / "new.h").write_text("")
    monkeypatch.setattr(compiler, "HEADERS", headers)
    load()
    assert len(list(fresh_compiler.glob("*.so"))) == 2


@needs_compiler
def test_other_options_give_another_library(source, fresh_compiler) -> None:
    source.write_text('extern "C" int answer() { return ANSWER; }\n')
    for answer in (42, 43, 42):
        assert compiler.load_library(source, (f"-DANSWER={answer}",)).answer() == answer
    assert len(list(fresh_compiler.glob("*.so"))) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="the test reads /proc")
def test_a_ctrl_c_in_the_terminal_does_not_reach_the_compiler(load, fresh_compiler, fake_compiler) -> None:
    fake_compiler('read -r stat < /proc/$$/stat\nset -- $stat\necho "error: session $6" >&2\nexit 1')
    with pytest.raises(compiler.NoCompiler, match=r"session \d+") as raised:
        load()
    assert str(raised.value).split()[-1] != str(os.getsid(0))


@pytest.mark.skipif(sys.platform == "win32", reason="the fake compiler is a shell script")
def test_a_compiler_that_hangs_is_ended_and_not_started_again(
    load, source, fresh_compiler, fake_compiler, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.5)
    # As with g++, a child of the compiler keeps the pipe open.
    hanging = fake_compiler('echo run >> "$0.log"\nsleep 60 &\necho $! > "$0.child"\nwait')
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(compiler.NoCompiler, match="did not finish within 0 s"):
            load()
    assert time.monotonic() - began < 20
    assert Path(f"{hanging}.log").read_text().split() == ["run"]
    assert [record.message for record in caplog.records] == [
        f"warning: {hanging} did not finish within 0 s; plain torch is used instead of compiled kernels"
    ]
    child = int(Path(f"{hanging}.child").read_text())
    for _ in range(100):
        if not is_running(child):
            break
        time.sleep(0.05)
    assert not is_running(child)


def is_running(process: int) -> bool:
    """Tell whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Damaged files


@needs_compiler
def test_a_truncated_library_is_compiled_again(load, fresh_compiler, tmp_path, monkeypatch) -> None:
    load()
    library = find_library(fresh_compiler)
    planted = plant(library, tmp_path, monkeypatch)
    planted.write_bytes(library.read_bytes()[:1000])
    assert load().answer() == 42
    assert planted.stat().st_size == library.stat().st_size


@needs_compiler
@pytest.mark.parametrize("damage", [b"\xff\xfe\x00", b"", b"0" * 64])
def test_a_library_with_a_damaged_checksum_is_compiled_again(
    load, fresh_compiler, tmp_path, monkeypatch, damage
) -> None:
    load()
    planted = plant(find_library(fresh_compiler), tmp_path, monkeypatch)
    before = planted.stat().st_mtime_ns
    planted.with_suffix(".sha256").write_bytes(damage)
    assert load().answer() == 42
    assert planted.stat().st_mtime_ns != before


# Libraries that another user could have put there


@needs_compiler
@needs_user_ids
@pytest.mark.parametrize("open_folder", ["native", "."], ids=["the folder", "a parent"])
@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_a_library_in_a_folder_that_others_may_write_to_is_not_loaded(
    load, fresh_compiler, tmp_path, monkeypatch, caplog, open_folder, mode
) -> None:
    load()
    planted = plant(find_library(fresh_compiler), tmp_path, monkeypatch)
    risky = Path(os.path.realpath(tmp_path / "other" / open_folder))
    risky.chmod(mode)
    library = load()
    assert library.answer() == 42 and not library._name.startswith(str(planted.parent))
    assert not Path(library._name).exists()
    (said,) = (record.message for record in caplog.records)
    assert "for this process only" in said and f"others may write to {risky}" in said


@needs_compiler
@needs_user_ids
def test_a_parent_folder_with_the_sticky_bit_is_accepted(load, fresh_compiler, caplog) -> None:
    fresh_compiler.mkdir(parents=True, mode=0o700)
    fresh_compiler.parent.chmod(0o1777)
    assert load()._name.startswith(str(fresh_compiler))
    assert not caplog.records


@needs_compiler
@needs_user_ids
@pytest.mark.parametrize("suffix", [".so", ".sha256"])
def test_a_library_or_checksum_that_others_may_write_to_is_replaced(
    load, fresh_compiler, tmp_path, monkeypatch, caplog, suffix
) -> None:
    load()
    planted = plant(find_library(fresh_compiler), tmp_path, monkeypatch)
    before = planted.stat().st_mtime_ns
    planted.with_suffix(suffix).chmod(0o666)
    assert load().answer() == 42
    assert planted.stat().st_mtime_ns != before and not planted.with_suffix(suffix).stat().st_mode & 0o022
    assert [record.message for record in caplog.records if "are replaced: others may write to" in record.message]


@needs_compiler
@needs_superuser
@pytest.mark.parametrize("which", ["folder", "library", "checksum", "parent"])
def test_nothing_of_another_user_is_loaded(load, fresh_compiler, tmp_path, monkeypatch, caplog, which) -> None:
    load()
    planted = plant(find_library(fresh_compiler), tmp_path, monkeypatch)
    checksum, before = planted.with_suffix(".sha256"), planted.stat().st_mtime_ns
    paths = {"folder": planted.parent, "library": planted, "checksum": checksum, "parent": planted.parent.parent}
    os.chown(paths[which], 12345, -1)
    library = load()
    assert library.answer() == 42
    assert not library._name.startswith(str(planted)) or planted.stat().st_mtime_ns != before
    assert [record.message for record in caplog.records if "belongs to another user (number 12345)" in record.message]


@needs_user_ids
def test_folders_with_the_same_owner_as_the_root_folder_are_accepted(tmp_path, monkeypatch) -> None:
    """In a user namespace, as in some containers, the owner of / and /tmp may be unknown; its number is then 65534."""
    real = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        fields = list(real(path, **options))
        fields[ST_UID] = os.getuid() if path.is_relative_to(tmp_path) else 65534
        return os.stat_result(fields)

    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr(Path, "stat", stat)
    cache.require_private(tmp_path)
    with pytest.raises(cache.UnsafeCache, match="belongs to another user"):
        cache.require_private(tmp_path.parent)


def test_all_folders_are_accepted_without_user_ids(tmp_path, monkeypatch) -> None:
    monkeypatch.delattr(os, "getuid", raising=False)
    monkeypatch.delattr(os, "getgid", raising=False)
    cache.require_private(tmp_path)


@needs_compiler
@needs_user_ids
def test_only_this_user_can_write_compiled_libraries(load, fresh_compiler) -> None:
    fresh_compiler.parent.mkdir(mode=0o700)
    before = os.umask(0)
    try:
        load()
    finally:
        os.umask(before)
    made = [fresh_compiler, *fresh_compiler.iterdir()]
    assert len(made) == 3 and not any(path.stat().st_mode & 0o022 for path in made)
