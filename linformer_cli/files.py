"""The safe way to a file, and the one folder that lintx keeps things in unasked.

Nothing here looks at what is written; what writes pictures, checkpoints and tables goes through it.
"""

import errno
import os
import secrets
from pathlib import Path

from .errors import LintxError

TEMPORARY_FILES = ".lintx-*.tmp"  # what `write_file` may leave behind when the process is killed

_ADVICE = {
    errno.EACCES: "choose a folder that you may write to",
    errno.EPERM: "choose a folder that you may write to",
    errno.EROFS: "choose a folder that you may write to",
    errno.ENOSPC: "free some space or choose another disk",
    errno.EDQUOT: "free some space or choose another disk",
    errno.EISDIR: "give the name of a file",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EEXIST: "a part of the path is a file, not a folder",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def user_cache() -> Path:
    """Where downloads and compiled code are kept, perhaps not made yet: $LINTX_CACHE, else lintx in the user's cache.

    Raises `LintxError` where the user has no home folder.
    """
    if chosen := os.environ.get("LINTX_CACHE"):
        return Path(os.path.expanduser(chosen))
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the XDG rules: a relative path does not count
        cache = os.path.expanduser("~/.cache")
    if cache.startswith("~"):
        raise LintxError("cannot find your home folder; set LINTX_CACHE to a folder for what lintx keeps")
    return Path(cache) / "lintx"


def write_file(path: str | os.PathLike[str], data: bytes, flush: bool = True) -> None:
    """Write `data` to `path` whole or not at all, making the folder where it is missing.

    The bytes go to a temporary file in the same folder, which then takes the name: a full disk or Ctrl-C leaves the
    old file or none, never half a new one. A link keeps pointing where it did. A pipe or a device such as
    /dev/stdout cannot be replaced and is written to directly. Without `flush` nobody waits for the disk: many small
    files are written far sooner, but after a power cut the last ones may be damaged.

    Raises `LintxError` with the path and the reason where the system refuses.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():
            Path(path).write_bytes(data)  # for a folder, the error says so
        else:
            _write_then_rename(Path(os.path.realpath(path)), data, flush)
    except OSError as error:
        raise _explain(path, error) from None


def require_writable(path: str | os.PathLike[str]) -> None:
    """Raises `LintxError`, as `write_file` would, where it shows already that `path` cannot be written.

    For what is written behind hours of work. Makes nothing; a disk that will be full shows only then.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file() and not target.is_dir():
        return  # a pipe or a device
    folder = next(parent for parent in target.parents if parent.exists())
    if target.is_dir():
        code = errno.EISDIR
    elif not folder.is_dir():
        code = errno.ENOTDIR
    elif not os.access(folder, os.W_OK | os.X_OK):
        code = errno.EACCES
    else:
        return
    raise _explain(path, OSError(code, os.strerror(code)))


def _explain(path: str | os.PathLike[str], error: OSError) -> LintxError:
    reason = (error.strerror or str(error)).lower()
    advice = _ADVICE.get(error.errno or 0)
    return LintxError(f"cannot write {os.fspath(path)}: {reason}{f'; {advice}' if advice else ''}")


def write_flushed(file: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk; some file systems report a full one only then."""
    with open(file, "xb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())


def flush_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk."""
    if os.name == "nt":  # a folder cannot be opened for flushing there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_then_rename(target: Path, data: bytes, flush: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # Its own short name, not one derived from the target's, which may already be as long as the system allows.
    temporary = target.parent / TEMPORARY_FILES.replace("*", secrets.token_hex(6))
    try:
        if flush:
            write_flushed(temporary, data)
        else:
            temporary.write_bytes(data)
        os.replace(temporary, target)
    except BaseException:  # Ctrl-C as well
        temporary.unlink(missing_ok=True)
        raise
