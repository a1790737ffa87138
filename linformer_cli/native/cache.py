"""The folder of compiled libraries, and a check that no other user could have put a library there."""

import os
import stat
from pathlib import Path

from linformer_cli.errors import LintxError
from linformer_cli.files import user_cache


class UnsafeCache(LintxError):
    """Another user could have put a library into the cache; the message says how."""


def open_cache() -> Path:
    """Return the folder of compiled libraries, with symbolic links resolved. Create it if it is missing.

    Raises `UnsafeCache` if another user could have put a library there, `LintxError` if there is no place for the
    folder, and `OSError` if the folder cannot be created.
    """
    folder = user_cache() / "native"
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    folder = Path(os.path.realpath(folder))
    require_private(folder)
    return folder


def require_private(folder: Path) -> None:
    """Raise `UnsafeCache` if another user may change the contents of `folder`, a path without symbolic links."""
    if not hasattr(os, "getuid"):
        return
    # The owner of / can change everything. In a user namespace, this owner is often not user 0.
    owner = Path(folder.anchor).stat().st_uid
    risks = (describe_risk(parent, owner, has_guarded_entries(parent)) for parent in folder.parents)
    found = describe_risk(folder) or next(filter(None, risks), None)
    if found is not None:
        raise UnsafeCache(found)


def describe_risk(path: Path, trusted: int = 0, guarded: bool = False) -> str | None:
    """Describe how another user could have written the file or folder `path`, or return None. Raises `OSError`.

    User `trusted` and the superuser are trusted. With `guarded`, write access for others does not count as a risk.
    Systems without user ids, such as Windows, report no risk.
    """
    if not hasattr(os, "getuid"):
        return None
    found = path.stat()
    if found.st_uid not in (os.getuid(), 0, trusted):
        return f"{path} belongs to another user (number {found.st_uid})"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not guarded:
        return f"others may write to {path}; 'chmod go-w' it, or set LINTX_CACHE to a folder of your own"
    return None


def has_guarded_entries(folder: Path) -> bool:
    """Whether other users cannot rename this user's entries of `folder`, even if they may write to the folder."""
    found = folder.stat()
    if found.st_mode & stat.S_ISVTX:  # like /tmp: only the owner of an entry may rename it
        return True
    # A user's private group has no other members. By convention, its number equals the user's number.
    return not found.st_mode & stat.S_IWOTH and found.st_gid == os.getgid() == os.getuid()
