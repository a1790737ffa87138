import errno
import os
import stat
import subprocess
import time
from pathlib import Path

import pytest

from linformer_cli.errors import LintxError
from linformer_cli.files import (
    flush_folder,
    make_folder,
    require_writable,
    temporary_path,
    user_cache,
    write_file,
    write_folder,
)


def test_the_user_can_choose_the_cache_folder(monkeypatch):
    monkeypatch.setenv("LINTX_CACHE", "~/ours")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.setenv("HOME", "/home/user")
    assert user_cache() == Path("/home/user/ours")
    monkeypatch.delenv("LINTX_CACHE")
    assert user_cache() == Path("/cache/lintx")
    for ignored in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert user_cache() == Path("/home/user/.cache/lintx")


def test_a_missing_home_folder_gives_a_one_line_error(monkeypatch):
    for name in ("LINTX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for users without a home folder
    with pytest.raises(LintxError, match=r"^cannot find your home folder; set LINTX_CACHE to a folder for downloads"):
        user_cache()


def test_writing_creates_folders_and_replaces_a_file(tmp_path):
    path = tmp_path / "new" / "folder" / "a.bin"
    write_file(path, b"first, and longer")
    write_file(str(path), b"second")
    assert path.read_bytes() == b"second"
    assert [entry.name for entry in path.parent.iterdir()] == ["a.bin"]


def test_a_written_file_has_ordinary_permissions(tmp_path):
    (tmp_path / "ordinary").write_bytes(b"")
    write_file(tmp_path / "ours", b"")
    assert stat.S_IMODE((tmp_path / "ours").stat().st_mode) == stat.S_IMODE((tmp_path / "ordinary").stat().st_mode)


def test_a_file_with_the_longest_possible_name_is_written(tmp_path):
    path = tmp_path / ("a" * 255)
    write_file(path, b"data")
    assert path.read_bytes() == b"data"


interrupted = pytest.mark.parametrize(
    "fault, expected, message",
    [
        (OSError(errno.ENOSPC, "No space left on device"), LintxError, "no space left on device; free some space"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
    ids=["full", "ctrl-c"],
)


@interrupted
@pytest.mark.parametrize("before", [None, b"old"])
def test_an_interrupted_write_leaves_no_partial_file(tmp_path, monkeypatch, fault, expected, message, before):
    path = tmp_path / "a.bin"
    if before is not None:
        path.write_bytes(before)

    def fail(_):
        assert any(entry.read_bytes() == b"new" for entry in tmp_path.iterdir())
        raise fault

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(expected, match=message):
        write_file(path, b"new")
    assert [entry.read_bytes() for entry in tmp_path.iterdir()] == ([] if before is None else [before])


def test_a_folder_is_written_whole(tmp_path):
    folder = tmp_path / "new" / "folder"
    write_folder(folder, {"a": b"1", "b": b"2"})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a": b"1", "b": b"2"}
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]


@interrupted
def test_an_interrupted_write_leaves_no_partial_folder(tmp_path, monkeypatch, fault, expected, message):
    asked = []

    def fail(_):
        asked.append(1)
        if len(asked) == 2:
            raise fault

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(expected, match=message):
        write_folder(tmp_path / "site", {"a": b"1", "b": b"2"})
    assert len(asked) == 2 and list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_behind_is_removed_by_the_next_write(tmp_path):
    (tmp_path / "there").mkdir()
    name = temporary_path(tmp_path).name
    others = [name.replace(f"-{os.getpid()}-", f"-{number}-") for number in (99_999_999, os.getppid())]
    killed, running = (tmp_path / "there" / other for other in others)
    abroad = tmp_path / "there" / ".lintx-otherhost-99999999-00.tmp"
    for path in (killed, running, abroad):
        path.write_bytes(b"half")
    killed_folder = killed.with_name(f"{killed.name[:-4]}2.tmp")
    killed_folder.mkdir()
    earlier = tmp_path / "there" / name  # of an earlier process with the same number, as in a container
    earlier.write_bytes(b"half")
    write_file(tmp_path / "there" / "new", b"whole")
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"new", running.name, abroad.name}


def test_a_link_to_a_missing_folder_creates_the_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "runs")
    require_writable(tmp_path / "link" / "file")
    make_folder(tmp_path / "link")
    assert (tmp_path / "disk" / "runs").is_dir()


def test_errors_name_the_path_and_the_reason(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LintxError) as caught:
        write_file(tmp_path, b"data")
    assert str(caught.value) == f"cannot write {tmp_path}: is a directory; give the name of a file"
    for path in (tmp_path / "file" / "a", tmp_path / "file" / "b" / "a"):
        with pytest.raises(LintxError) as caught:
            write_file(path, b"data")
        assert str(caught.value).startswith(f"cannot write {path}: ")
        assert str(caught.value).endswith("; a part of the path is a file, not a folder")


def test_foreseeable_errors_are_raised_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, reason in (
        (tmp_path, "is a directory; give the name of a file"),
        ("/", "is a directory; give the name of a file"),
        (tmp_path / "loop" / "a", "too many levels of symbolic links; it links to itself; choose another name"),
        (tmp_path / ("a" * 256), "file name too long; choose a shorter name"),
        (tmp_path / "file" / "b" / "a", "not a directory; a part of the path is a file, not a folder"),
    ):
        with pytest.raises(LintxError) as caught:
            require_writable(path)
        assert str(caught.value) == f"cannot write {path}: {reason}"
    for fine in (tmp_path / "file", tmp_path / "new" / "deep" / "a", "/dev/null"):
        require_writable(fine)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "loop"}
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(LintxError, match=r"permission denied; choose a folder that you may write to$"):
        require_writable(tmp_path / "new" / "a")


def test_a_denied_permission_is_explained(tmp_path, monkeypatch):
    def deny(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", deny)  # root could write into a read-only folder
    with pytest.raises(LintxError, match=r"permission denied; choose a folder that you may write to$"):
        write_file(tmp_path / "a", b"data")
    assert list(tmp_path.iterdir()) == []


def test_writing_to_a_link_keeps_the_link(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(Path("real") / "a")
    write_file(link, b"data")
    assert link.is_symlink()
    assert (tmp_path / "real" / "a").read_bytes() == b"data"


def test_more_data_than_a_pipe_holds_arrives_completely(tmp_path):
    path, data = tmp_path / "pipe", bytes(range(256)) * 4096
    os.mkfifo(path)
    with subprocess.Popen(["cp", str(path), str(tmp_path / "copy")]) as reader:
        deadline = time.monotonic() + 60
        while True:  # wait until `cp` has opened the pipe
            try:
                write_file(path, data)
            except LintxError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            else:
                break
        assert reader.wait(timeout=60) == 0
    assert (tmp_path / "copy").read_bytes() == data


def test_a_pipe_without_a_reader_is_refused(tmp_path, raises_one_line):
    os.mkfifo(tmp_path / "pipe")
    require_writable(tmp_path / "pipe")  # this raises nothing, because a reader may open the pipe later
    with raises_one_line(LintxError, f"cannot write {tmp_path / 'pipe'}: ", "; nothing reads from this pipe; start"):
        write_file(tmp_path / "pipe", b"data")


def test_a_file_system_that_cannot_flush_folders_is_no_error(tmp_path, monkeypatch):
    def refuse(_handle):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    number = errno.EINVAL
    flush_folder(tmp_path)
    number = errno.EIO
    with pytest.raises(OSError, match=os.strerror(number)):
        flush_folder(tmp_path)
