"""The folder of a training run: its settings, the digest of its images, metrics, sample grids and checkpoints."""

import contextlib
import datetime
import fnmatch
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import tomli_w
from filelock import FileLock, Timeout

from linformer_cli.checkpoint_files import find_checkpoint, holds_checkpoint, replace_folder
from linformer_cli.config import RunConfig
from linformer_cli.data.digest import DataDigest
from linformer_cli.documents import parse_config, read_json, read_toml
from linformer_cli.errors import CheckpointError, LintxError, UsageError
from linformer_cli.files import TEMPORARY_FILES, make_folder, temporary_path, write_file
from linformer_cli.metrics import METRICS_FILE, create_metrics, has_steps

RUNS = Path("runs")  # the default place of new runs

_LOCK = ".lock"
_KEPT_SPIKES = 3


def claim_run(preset: str) -> Path:
    """Create a new folder in runs/. Its name is the date and the preset, with a number if this name is taken."""
    base = RUNS / f"{datetime.datetime.now():%Y-%m-%d-%H%M%S}-{preset}"
    with _explaining(RUNS):
        make_folder(RUNS)
        for number in itertools.count(1):
            path = base if number == 1 else base.with_name(f"{base.name}-{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                break
    return path


def find_newest_run() -> Path:
    """Return the run in runs/ whose configuration was written last. Raises `UsageError` if there are no runs."""
    found = sorted(RUNS.glob("*/config.toml"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise UsageError(f"there is no run in '{RUNS}' to resume; name one: lintx train --resume FOLDER")
    return found[-1].parent


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"
        self.data_file = path / "data.json"
        self.metrics_file = path / METRICS_FILE
        self.last = path / "last"
        self.best = path / "best"
        self.samples = path / "samples"
        self.kept = path / "kept"
        self.previous = path / ".before-last"
        self._lock_identity: tuple[int, int] | None = None

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Refuse a second process on this run. The system releases the lock when a process ends, however it ends."""
        lock = FileLock(self.path / _LOCK, blocking=False)
        with _explaining(self.path):
            try:
                lock.acquire()
            except Timeout:
                raise LintxError(f"another process is training in '{self.path}'; stop it or start a new run") from None
            self._lock_identity = _identify(self.path / _LOCK)
        try:
            yield
        finally:
            lock.release()

    def require_lock(self) -> None:
        """Raise `LintxError` if the lock was removed, because another process may then train in this folder."""
        if self._lock_identity is not None and _identify(self.path / _LOCK) != self._lock_identity:
            removed = f"'{self.path / _LOCK}' was removed, and another process may be training in this folder"
            hint = f"to continue from the last save: lintx train --resume '{self.path}'"
            raise LintxError(f"{removed}; stopped without saving; {hint}")

    def compare_data(self, now: DataDigest) -> str:
        """Say how the images differ from those at the start, or "". Raises `CheckpointError` for a damaged record."""
        try:
            document = read_json(self.data_file)
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as error:
            raise CheckpointError(f"'{self.data_file}' cannot be read: {error}") from None
        if not isinstance(document, dict):
            raise CheckpointError(f"'{self.data_file}' does not describe images")
        return parse_config(DataDigest, document, str(self.data_file)).describe_changes(now)

    def record_data(self, now: DataDigest) -> None:
        write_file(self.data_file, (now.model_dump_json(indent=2) + "\n").encode())

    def keep(self, step: int, keep_last: int) -> None:
        """Add the save in `last/` to `kept/`, and delete all but the `keep_last` newest there."""
        if keep_last > 1:
            self._keep_as("step", step, keep_last)

    def hold_previous(self) -> None:
        """Before a new save, keep the save in `last/` until the loss of the new weights is known."""
        if holds_checkpoint(self.last):
            _link_folder(self.last, self.previous)

    def drop_previous(self) -> None:
        """Delete the save that `hold_previous` kept, because the loss of the weights in `last/` is normal."""
        shutil.rmtree(self.previous, ignore_errors=True)

    def put_back_previous(self, step: int) -> bool:
        """Replace the save of `step` in `last/`, whose loss is NaN, with the one before it. Return False if none is."""
        if not holds_checkpoint(self.previous):
            return False
        with _explaining(self.last):
            replace_folder(self.previous, self.last)
            shutil.rmtree(self.kept / f"step-{step:07d}", ignore_errors=True)
        return True

    def keep_before_spike(self, step: int) -> Path:
        """Keep the save from before the loss rose at `step`: the previous one if `last/` already has the high loss."""
        return self._keep_as("before-spike", step, _KEPT_SPIKES, self.previous)

    def _keep_as(self, kind: str, step: int, newest: int, preferred: Path | None = None) -> Path:
        """Keep `preferred`, or else `last/`, as `kept/KIND-STEP`. Delete all but the `newest` saves of this kind."""
        folder = self.kept / f"{kind}-{step:07d}"
        _link_folder(preferred if preferred and holds_checkpoint(preferred) else self.last, folder)
        with _explaining(folder):
            for old in sorted(self.kept.glob(f"{kind}-*"), key=lambda path: (len(path.name), path.name))[:-newest]:
                shutil.rmtree(old)
        return folder

    @property
    def is_untouched(self) -> bool:
        """Whether the run was killed before its first save: nothing was saved, and nothing logged after step 0."""
        return not holds_checkpoint(self.last) and not has_steps(self.metrics_file)

    def create(self, config: RunConfig) -> None:
        """Create the folder. Raises `UsageError` if it exists and is not empty."""
        self.refuse_if_taken()
        with _explaining(self.path):
            make_folder(self.path)
        with self.lock():
            self.refuse_if_taken()  # another process may have created it meanwhile
            self.write_config(config)
            create_metrics(self.metrics_file)

    def refuse_if_taken(self) -> None:
        """Raise `UsageError` if the folder exists and is not empty."""
        if not self.path.exists():
            return
        names = [path.name for path in self.path.iterdir()] if self.path.is_dir() else [""]
        # Killed processes leave locks and temporary files behind.
        if any(name != _LOCK and not fnmatch.fnmatch(name, TEMPORARY_FILES) for name in names):
            raise UsageError(f"'{self.path}' exists already; give --resume '{self.path}' or another --out")

    def write_config(self, config: RunConfig) -> None:
        """Write `config.toml` with every setting, including defaults. Settings that are None are omitted."""
        try:
            document = tomli_w.dumps(config.model_dump(exclude_none=True)).encode()
        except UnicodeEncodeError as error:
            line = ascii(error.object[: error.end].splitlines()[-1])
            problem = f"is not UTF-8 and cannot be written to {self.config_file.name}: {line}"
            raise UsageError(f"a name in the settings {problem}; rename it, or link to it") from None
        write_file(self.config_file, document)

    def read_config(self) -> RunConfig:
        """Read `config.toml`. Raises `CheckpointError` if it cannot be read, and `UsageError` for a wrong value."""
        try:
            document = read_toml(self.config_file)
        except FileNotFoundError:
            raise CheckpointError(f"'{self.path}' is not a run folder: it has no config.toml") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"'{self.config_file}' cannot be read: {error}") from None
        return parse_config(RunConfig, document, str(self.config_file))


def _identify(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _link_folder(checkpoint: Path, target: Path) -> None:
    """Replace `target` with a copy of a checkpoint folder. The copy consists of hard links, which take no space."""
    with _explaining(target):
        make_folder(target.parent)
        writing = temporary_path(target.parent)
        shutil.rmtree(target, ignore_errors=True)
        try:
            # If a swap was interrupted, the checkpoint is still in a temporary folder, which `find_checkpoint` finds.
            shutil.copytree(find_checkpoint(checkpoint), writing, copy_function=_link_or_copy)
            os.rename(writing, target)
        except OSError:
            shutil.rmtree(writing, ignore_errors=True)  # the next save may need its space
            raise


def _link_or_copy(source: str, target: str) -> None:
    """Link a file, or copy it. Checkpoint files are replaced, never changed, so two names can share one file."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@contextlib.contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Turn an error of the operating system into a `LintxError` that names the file."""
    try:
        yield
    except OSError as error:
        raise LintxError(f"cannot read or write '{path}': {error.strerror or error}") from None
