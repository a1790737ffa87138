"""Checkpoints on the Hugging Face Hub: `hf:USER/NAME`, or `hf:USER/NAME@REVISION` for a branch, a tag or a commit."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import CheckpointError, describe_reason
from .files import user_cache
from .system.environment import import_extra

PREFIX = "hf:"


def fetch_repository(name: str, files: Sequence[str]) -> Path:
    """Return the folder with the newest `files` of a repository, or earlier ones if the Hub cannot be reached."""
    repository, _, revision = name.removeprefix(PREFIX).partition("@")
    folder = _cache() / name.removeprefix(PREFIX).replace("/", "--")
    with _explaining(name) as hub:
        hub.snapshot_download(repository, revision=revision or None, local_dir=folder, allow_patterns=list(files))
    return folder


def find_hub_name(folder: Path) -> str:
    """Find the name of the repository whose files are in `folder`, or ""."""
    return PREFIX + folder.name.replace("--", "/") if folder.parent == _cache() else ""


def send_repository(name: str, folder: Path) -> str:
    """Send the files in `folder` to a repository, which is created if missing, and return its address."""
    with _explaining(name) as hub:
        address = hub.create_repo(name.removeprefix(PREFIX), exist_ok=True)
        hub.upload_folder(repo_id=name.removeprefix(PREFIX), folder_path=folder, commit_message="Export from lintx")
    return str(address)


def _cache() -> Path:
    return user_cache() / "hub"


@contextlib.contextmanager
def _explaining(name: str) -> Iterator[Any]:
    """Provide the package of the Hub, and turn its errors into a `CheckpointError`."""
    hub = import_extra("huggingface_hub", "hub")
    import_extra("huggingface_hub.utils", "hub").disable_progress_bars()
    try:
        yield hub
    except hub.errors.RepositoryNotFoundError:
        hint = "check the name, or log in with 'hf auth login'"
        raise CheckpointError(f"'{name}' is not on the Hub, or you may not read it; {hint}") from None
    except hub.errors.LocalEntryNotFoundError:
        raise CheckpointError(f"'{name}' was not fetched before, and the Hub cannot be reached") from None
    except (OSError, ValueError, hub.errors.HTTPError) as error:
        reason = next(iter(describe_reason(error).splitlines()), type(error).__name__)
        if isinstance(error, hub.errors.HTTPError) and getattr(error, "response", None) is None:
            reason = f"the Hub cannot be reached ({reason})"
        hint = "; log in with 'hf auth login'" if "401" in reason or "403" in reason else ""
        raise CheckpointError(f"'{name}': {reason}{hint}") from None
