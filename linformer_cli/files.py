"""Writes files safely, and finds the user's cache folder. These functions write all images, checkpoints and tables."""

import contextlib
import errno
import functools
import os
import platform
import secrets
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from .errors import LintxError

# Matches the files and folders that `write_file` and `write_folder` may leave behind if the process is killed.
TEMPORARY_FILES = ".lintx-*.tmp"
STREAM = "-"  # in place of a path: stdin or stdout
_SWEEPING = threading.Lock()

_ADVICE = {
    errno.EACCES: "choose a folder that you may write to",
    errno.EPERM: "choose a folder that you may write to",
    errno.EROFS: "choose a folder that you may write to",
    errno.ENOSPC: "free some space or choose another disk",
    errno.EDQUOT: "free some space or choose another disk",
    errno.EISDIR: "give the name of a file",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EEXIST: "a part of the path is a file, not a folder",
    errno.ELOOP: "it links to itself; choose another name",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENXIO: "nothing reads from this pipe; start its reader first",
}


def user_cache() -> Path:
    """Name the folder for downloads and speeds: $LINTX_CACHE, or `lintx` in the user's cache. It need not exist."""
    if chosen := os.environ.get("LINTX_CACHE"):
        return Path(os.path.expanduser(chosen))
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # by the XDG rules, a relative path is ignored
        cache = os.path.expanduser("~/.cache")
    if cache.startswith("~"):
        raise LintxError("cannot find your home folder; set LINTX_CACHE to a folder for downloads and measured speeds")
    return Path(cache) / "lintx"


def is_special(path: Path) -> bool:
    """Return whether `path` is a pipe, a device or a socket: neither a file nor a folder."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_file(path: str | os.PathLike[str], data: bytes, flush: bool = True) -> None:
    """Write all of `data` to `path`, or nothing. Missing folders are created.

    The bytes are first written to a temporary file in the same folder, which is then renamed. If `path` is a symbolic
    link, its target is replaced. A pipe or a device is written to directly. Without `flush`, which waits for the disk,
    many small files are written much faster, but a power cut may damage the last ones. Raises `LintxError` with the
    path and the reason if the system refuses, or if `path` is a pipe without a reader.
    """
    with open_atomically(Path(path), flush=flush) as file:
        file.write(data)


@contextlib.contextmanager
def open_atomically(path: Path, name: Callable[[], str | None] | None = None, flush: bool = True) -> Iterator[BinaryIO]:
    """Open a context that writes and reads a new file, which replaces `path` if the context ends without an exception.

    `name`, if given, is called at the end and may return another name for the new file, which then replaces nothing at
    `path`. It is beside `path` or, if `path` is a symbolic link, beside its target. Missing folders are created.
    `write_file` explains the rest, and what is raised if the system refuses.
    """
    target = Path(os.path.realpath(path))
    try:
        if is_special(path):
            with tempfile.TemporaryFile() as waiting, _open_directly(path) as device:
                yield waiting
                waiting.seek(0)
                shutil.copyfileobj(waiting, device)
            return
        with _rename_later(
            target.parent, lambda: target.with_name(other) if name and (other := name()) else target, flush
        ) as opened:
            yield opened
    except OSError as error:
        raise _explain(path, error) from None


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a new folder with all of `files` (contents by name), or nothing. Raises what `write_file` raises."""
    target = Path(os.path.realpath(folder))
    temporary = temporary_path(target.parent)
    try:
        temporary.mkdir(parents=True)
        for name, data in files.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            write_flushed(temporary / name, data)
        os.rename(temporary, target)
    except BaseException as error:  # including Ctrl-C
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise _explain(folder, error) from None
        raise


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents unless they exist. A link to a missing folder creates that folder."""
    os.makedirs(os.path.realpath(folder), exist_ok=True)


def require_writable(path: str | os.PathLike[str]) -> None:
    """Raise `LintxError` before long work if it is already clear that `path` cannot be written. Creates nothing."""
    try:
        code = _foreseen_error(Path(os.path.realpath(path)))
    except OSError as error:  # for example, the name is too long
        raise _explain(path, error) from None
    if code:
        raise _explain(path, OSError(code, os.strerror(code)))


def _foreseen_error(target: Path) -> int:
    """Return the `errno` with which writing to `target` would fail, or 0."""
    if target.is_dir():
        return errno.EISDIR
    if any(place.is_symlink() for place in (target, *target.parents)):  # the path is resolved, so this is a loop
        return errno.ELOOP
    if is_special(target):
        return 0
    folder = next(parent for parent in target.parents if parent.exists())
    if not folder.is_dir():
        return errno.ENOTDIR
    return 0 if os.access(folder, os.W_OK | os.X_OK) else errno.EACCES


def temporary_path(folder: Path) -> Path:
    """Return a new hidden name in `folder`, for renaming later. The first call removes what killed processes left."""
    folder = Path(os.path.realpath(folder))
    with _SWEEPING:  # otherwise a thread might remove what another one has begun to write
        _remove_leftovers(folder)
    # It is not derived from the target's name, which may already be as long as the system allows.
    return folder / TEMPORARY_FILES.replace("*", f"{_machine()}-{os.getpid()}-{secrets.token_hex(6)}")


def _machine() -> str:
    return f"{zlib.crc32(platform.node().encode()):08x}"  # several machines may share a folder


@functools.cache
def _remove_leftovers(folder: Path) -> None:
    for path in folder.glob(TEMPORARY_FILES.replace("*", f"{_machine()}-*")):
        process = path.name.split("-")[2]
        # This process has written nothing here yet, so a name with its number belongs to an earlier process.
        if process == str(os.getpid()) or not _is_running(process):
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                path.unlink()


def _is_running(process: str) -> bool:
    if os.name == "nt":  # Windows has no harmless signal
        return True
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):
        pass
    return True


def _explain(path: str | os.PathLike[str], error: OSError) -> LintxError:
    reason = (error.strerror or str(error)).lower()
    advice = _ADVICE.get(error.errno or 0)
    return LintxError(f"cannot write {os.fspath(path)}: {reason}{f'; {advice}' if advice else ''}")


def write_flushed(file: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk; some file systems report a full disk only then."""
    with open(file, "xb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())


def flush_folder(folder: Path) -> None:
    """Wait until the list of names in `folder` is on the disk, if its file system can do so."""
    if os.name == "nt":  # Windows cannot open a folder
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # some file systems cannot flush a folder
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def _open_directly(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    # Without O_NONBLOCK, opening a pipe would wait for a reader. With it, a pipe without a reader is an error.
    handle = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
    with open(handle, "wb") as opened:
        if hasattr(os, "O_NONBLOCK"):
            os.set_blocking(handle, True)
        yield opened


@contextlib.contextmanager
def _rename_later(folder: Path, target: Callable[[], Path], flush: bool) -> Iterator[BinaryIO]:
    """Return a new file in `folder` that gets the name `target()` if the context ends without an exception."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(folder)
    try:
        with open(temporary, "xb+") as opened:
            yield opened
            if flush:
                opened.flush()
                os.fsync(opened.fileno())
        os.replace(temporary, target())
    except BaseException:  # including Ctrl-C
        temporary.unlink(missing_ok=True)
        raise
