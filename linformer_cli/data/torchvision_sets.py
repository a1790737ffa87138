"""MNIST, Fashion-MNIST and CIFAR-10, downloaded and read by torchvision, whose slow import only this module makes."""

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linformer_cli.errors import DataError

CLASS_NAMES = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "cifar10": "CIFAR10"}

# Archives that may already be in the data folder. Unpacking them needs no network.
_ARCHIVES = {"mnist": "MNIST/raw/*.gz", "fashion-mnist": "FashionMNIST/raw/*.gz", "cifar10": "cifar-10-python.tar.gz"}

# SHA-256 of files that torchvision does not check: images and labels of the training (`train`) and test part.
_DIGESTS = {
    "mnist": {
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    "fashion-mnist": {
        "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
}
# The sizes of these files. A file of another size was put there on purpose, for example a part of the set.
_SIZES = {
    "train-images-idx3-ubyte": 47_040_016,
    "train-labels-idx1-ubyte": 60_008,
    "t10k-images-idx3-ubyte": 7_840_016,
    "t10k-labels-idx1-ubyte": 10_008,
}

# torchvision sets no limit, and would wait for minutes behind a firewall that drops packets.
NETWORK_TIMEOUT_SECONDS = 10.0

# torchvision registers shape functions for these operators without checking that its own library was loaded.
_UNGUARDED_OPERATORS = ("nms", "qnms")

# The operators of a torch.library.Library disappear when it is garbage-collected, so keep it for the whole process.
_operator_libraries: list[Any] = []


def load_torchvision_set(
    name: str, train: bool, root: Path, origin: str
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Load training or test images [N, H, W, C] and labels [N] of the set `name`, a key of `CLASS_NAMES`.

    `root`, which `origin` set, has torchvision's layout. Missing files are downloaded; else `DataError`.
    """
    build = getattr(import_torchvision_datasets(), CLASS_NAMES[name])
    try:
        with _quiet():
            data = build(root=str(root), train=train, download=False)
    # torchvision reads files with assertions, views and unpickling, so a damaged file may raise any exception.
    except Exception as error:
        if not (isinstance(error, RuntimeError) and "not found" in str(error)):
            damaged = f"are damaged ({_last_line(error)}); delete them and run again"
            raise DataError(f"the {name} files in {root} ({origin}) {damaged}") from error
        data = _download(name, build, train, root, origin)
    if fault := _find_changed(name, train, root):
        raise DataError(f"{fault} ({origin}) is damaged or is not {name}: its SHA-256 is wrong; delete it and retry")
    return _as_arrays(name, data, root)


def _find_changed(name: str, train: bool, root: Path) -> Path | None:
    """Return the first file that has the size of an original file but other contents."""
    raw, part = root / CLASS_NAMES[name] / "raw", "train" if train else "t10k"
    for file, digest in _DIGESTS.get(name, {}).items():
        if file.startswith(part) and (raw / file).is_file() and (raw / file).stat().st_size == _SIZES[file]:
            with open(raw / file, "rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != digest:
                    return raw / file
    return None


def _as_arrays(name: str, data: Any, root: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    images = np.asarray(data.data)
    labels = np.asarray(data.targets).astype(np.int64)
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.dtype != np.uint8 or images.size == 0 or labels.shape != images.shape[:1]:
        found = f"images {list(images.shape)} of {images.dtype}, labels {list(labels.shape)}"
        raise DataError(f"the {name} files in {root} are damaged ({found}); delete them and run again")
    return images, labels


def _download(name: str, build: Any, train: bool, root: Path, origin: str) -> Any:
    """Download the set to a temporary folder, then move it to `root`. Archives in `root` are only unpacked."""
    try:
        with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as staging_name, _quiet(), _network_timeout():
            staging = Path(staging_name)
            for archive in root.glob(_ARCHIVES[name]):
                copy = staging / archive.relative_to(root)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(archive, copy)
            data = build(root=staging_name, train=train, download=True)
            for source in sorted(staging.rglob("*")):
                if source.is_file() and source.suffix != ".gz":  # unpacked archives are not needed
                    target = root / source.relative_to(staging)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(source, target)
    # urllib, http.client, tarfile and torchvision each raise errors of their own.
    except Exception as error:
        # torchvision reports a wrong checksum as a corrupted file.
        wrong = "corrupted" in str(error)
        found = "the downloaded file has a wrong checksum" if wrong else f"downloading it failed ({_last_line(error)})"
        hint = "pass a folder that holds it with --data-dir, or use --data glyphs, which needs no download"
        raise DataError(f"no complete {name} in {root} ({origin}), and {found}; {hint}") from error
    return data


def import_torchvision_datasets() -> Any:
    """Import the module `torchvision.datasets`, even if torchvision was built for another version of torch.

    With a CPU-only torch, the library of PyPI's torchvision does not load, and operators that reading needs none of are
    missing. They are declared, and the import is tried again. Raises `DataError` if that fails.
    """
    with _quiet():
        try:
            return _import()
        except ModuleNotFoundError as error:
            if error.name != "torchvision":
                raise _mismatch(error) from error
            hint = "pip install torchvision, or use --data array:DIR or --data glyphs"
            raise DataError(f"this data set needs torchvision, which is not installed; {hint}") from error
        except RuntimeError as error:
            if "operator torchvision::nms does not exist" not in str(error):
                raise _mismatch(error) from error
        # A damaged binary package may raise any exception on import.
        except Exception as error:
            raise _mismatch(error) from error
        try:
            import torch

            make_library: Any = torch.library.Library  # untyped in torch
            _operator_libraries.append(library := make_library("torchvision", "FRAGMENT"))
            for operator in _UNGUARDED_OPERATORS:
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            for module in [module for module in sys.modules if module.partition(".")[0] == "torchvision"]:
                del sys.modules[module]  # it is imported only in part
            return _import()
        except Exception as error:
            raise _mismatch(error) from error


def _import() -> Any:
    import torchvision.datasets  # type: ignore[import-untyped, unused-ignore]

    return torchvision.datasets


def _mismatch(error: Exception) -> DataError:
    """Return the error for a torchvision that does not fit torch. It names both versions and the required torch."""
    torch_version = importlib.metadata.version("torch")
    torchvision_version = importlib.metadata.version("torchvision")
    requirements = importlib.metadata.requires("torchvision") or []
    wanted = next((line for line in requirements if line.startswith("torch")), "torch")
    wanted = "".join(character for character in wanted.partition(";")[0] if character not in "() ")
    return DataError(
        f"torchvision {torchvision_version} does not load with torch {torch_version} ({_last_line(error)}); install "
        f"torchvision=={torchvision_version} and {wanted}, both from the same index, "
        "or use --data array:DIR or --data glyphs"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Send torchvision's output to stderr, because stdout is for results, and hide its warnings."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _network_timeout() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(NETWORK_TIMEOUT_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _last_line(error: Exception) -> str:
    """Return the last line of an error, where torchvision puts the cause, or the error's type if it has no text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1].removeprefix("<urlopen error ").removesuffix(">")[:200]
