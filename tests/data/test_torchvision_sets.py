"""Tests of torchvision's data sets: small files in their formats, failing downloads, an incompatible torchvision."""

import gzip
import hashlib
import importlib.abc
import pickle
import socket
import sys
import textwrap
import urllib.error
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commands import run_script

from linformer_cli.data import torchvision_sets
from linformer_cli.data.torchvision_sets import NETWORK_TIMEOUT_SECONDS, load_torchvision_set
from linformer_cli.errors import DataError

MISSING_OPERATOR = "operator torchvision::nms does not exist"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def load(name: str, root: Path, train: bool = True) -> tuple[np.ndarray, np.ndarray]:
    return load_torchvision_set(name, train, root, "--data-dir")


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write_mnist(root: Path, folder: str = "MNIST") -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    written = {}
    for part, count in (("train", 6), ("t10k", 3)):
        written[f"{part}-images"] = random.integers(0, 256, (count, 4, 5), dtype=np.uint8)
        written[f"{part}-labels"] = random.integers(0, 10, count, dtype=np.uint8)
        for kind, rank in (("images", 3), ("labels", 1)):
            (raw / f"{part}-{kind}-idx{rank}-ubyte").write_bytes(idx_bytes(written[f"{part}-{kind}"]))
    return written


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_idx_files_are_read_by_torchvision(name: str, folder: str, tmp_path: Path) -> None:
    written = write_mnist(tmp_path, folder)
    for train, part in ((True, "train"), (False, "t10k")):
        images, labels = load(name, tmp_path, train)
        assert images.dtype == np.uint8
        assert labels.dtype == np.int64
        np.testing.assert_array_equal(images, written[f"{part}-images"][..., None])
        np.testing.assert_array_equal(labels, written[f"{part}-labels"])


def test_cifar_files_are_read_by_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises_one_line) -> None:
    import torchvision.datasets

    random = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    contents: dict[str, dict[str, Any]] = {"batches.meta": {"label_names": ["a", "b"]}}
    for name in ("data_batch_1", "data_batch_2", "test_batch"):
        pixels = random.integers(0, 256, (2, 3072), dtype=np.uint8)
        contents[name] = {"data": pixels, "labels": random.integers(0, 10, 2).tolist()}
    checksums = {}
    for name, content in contents.items():
        (folder / name).write_bytes(pickle.dumps(content))
        checksums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    cifar = torchvision.datasets.CIFAR10
    monkeypatch.setattr(cifar, "train_list", [[name, checksums[name]] for name in ("data_batch_1", "data_batch_2")])
    monkeypatch.setattr(cifar, "test_list", [["test_batch", checksums["test_batch"]]])
    monkeypatch.setattr(cifar, "meta", {**cifar.meta, "md5": checksums["batches.meta"]})

    images, labels = load("cifar10", tmp_path)
    assert images.shape == (4, 32, 32, 3)
    assert labels.tolist() == contents["data_batch_1"]["labels"] + contents["data_batch_2"]["labels"]
    planes = contents["data_batch_2"]["data"][1].reshape(3, 32, 32)
    np.testing.assert_array_equal(images[3], planes.transpose(1, 2, 0))
    assert load("cifar10", tmp_path, train=False)[0].shape == (2, 32, 32, 3)

    (folder / "data_batch_2").write_bytes(b"changed")
    with raises_one_line(DataError, "no complete cifar10", "Name or service not known"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("damaged", ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"])
@pytest.mark.parametrize("content", [b"", b"\0\0", b"hello", idx_bytes(np.zeros((6, 4, 5), np.uint8))[:-1]])
def test_damaged_files_are_refused(damaged: str, content: bytes, tmp_path: Path, raises_one_line) -> None:
    write_mnist(tmp_path)
    (tmp_path / "MNIST" / "raw" / damaged).write_bytes(content)
    with raises_one_line(DataError, "mnist files", str(tmp_path), "--data-dir", "damaged", "delete"):
        load("mnist", tmp_path)


def test_files_of_different_lengths_are_refused(tmp_path: Path, raises_one_line) -> None:
    write_mnist(tmp_path)
    labels = tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte"
    labels.write_bytes(idx_bytes(np.zeros(5, np.uint8)))
    with raises_one_line(DataError, "damaged", "[6, 4, 5, 1]", "[5]"):
        load("mnist", tmp_path)


# Downloads


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_without_a_network_a_one_line_error_says_what_to_do(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture, raises_one_line
) -> None:
    with raises_one_line(DataError, name, str(tmp_path), "Name or service not known", "--data-dir", "--data glyphs"):
        load(name, tmp_path)
    assert list(tmp_path.iterdir()) == []  # there is no partial download
    assert capfd.readouterr().out == ""


def test_archives_in_the_folder_need_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision.datasets

    written = write_mnist(tmp_path)
    raw = tmp_path / "MNIST" / "raw"
    resources = []
    for path in sorted(raw.iterdir()):
        packed = raw / f"{path.name}.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        resources.append((packed.name, hashlib.md5(packed.read_bytes()).hexdigest()))
        path.unlink()
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources)
    for _ in range(2):
        np.testing.assert_array_equal(load("mnist", tmp_path)[0], written["train-images"][..., None])
    assert (raw / "t10k-labels-idx1-ubyte").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["MNIST"]


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_files_of_the_right_size_with_other_contents_are_refused(name, folder, tmp_path, raises_one_line) -> None:
    raw = tmp_path / folder / "raw"
    raw.mkdir(parents=True)
    for kind, shape in (("images-idx3", (10_000, 28, 28)), ("labels-idx1", (10_000,))):
        (raw / f"t10k-{kind}-ubyte").write_bytes(idx_bytes(np.zeros(shape, np.uint8)))
        (raw / f"train-{kind}-ubyte").touch()
    with raises_one_line(DataError, "t10k-images-idx3-ubyte", "SHA-256", f"is not {name}"):
        load(name, tmp_path, train=False)


class Downloading:
    """Replaces torchvision.datasets.MNIST. The files are missing until `download` makes them and prints some text."""

    failure: BaseException | None = None
    timeouts: list[float | None] = []

    def __init__(self, root: str, train: bool, download: bool) -> None:
        if not download:
            raise RuntimeError("Dataset not found. You can use download=True to download it")
        self.timeouts.append(socket.getdefaulttimeout())
        sys.stdout.write("Downloading http://example\n")
        raw = Path(root, "MNIST", "raw")
        raw.mkdir(parents=True)
        (raw / "train-images-idx3-ubyte").write_bytes(b"new")
        (raw / "train-images-idx3-ubyte.gz").write_bytes(b"packed")
        if self.failure is not None:
            raise self.failure
        self.data, self.targets = np.zeros((2, 4, 4), np.uint8), [1, 2]


@pytest.fixture
def downloading(monkeypatch: pytest.MonkeyPatch) -> type[Downloading]:
    monkeypatch.setattr(torchvision_sets, "import_torchvision_datasets", lambda: SimpleNamespace(MNIST=Downloading))
    monkeypatch.setattr(Downloading, "timeouts", [])
    return Downloading


def test_a_download_has_a_time_limit_and_prints_nothing_to_stdout_and_is_moved_into_place(
    downloading: type[Downloading], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    images, labels = load("mnist", tmp_path)
    assert images.shape == (2, 4, 4, 1)
    assert labels.tolist() == [1, 2]
    assert downloading.timeouts == [NETWORK_TIMEOUT_SECONDS]
    assert socket.getdefaulttimeout() is None
    assert [path.name for path in (tmp_path / "MNIST" / "raw").iterdir()] == ["train-images-idx3-ubyte"]
    assert [path.name for path in tmp_path.iterdir()] == ["MNIST"]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Downloading" in captured.err


@pytest.mark.parametrize(
    ("failure", "part"),
    [
        (urllib.error.URLError("no route"), "no route"),
        (RuntimeError("Error downloading x:\nTried y, got:\n<urlopen error timed out>\n"), "(timed out)"),
        (TimeoutError(), "TimeoutError"),
        (RuntimeError("Tried y, got:\nFile not found or corrupted.\n"), "has a wrong checksum"),
        (OSError(28, "No space left on device"), "No space left"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_a_failed_download_gives_a_one_line_error_and_leaves_no_files(
    failure: Exception,
    part: str,
    downloading: type[Downloading],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    raises_one_line,
) -> None:
    monkeypatch.setattr(downloading, "failure", failure)
    with raises_one_line(DataError, part, str(tmp_path), "--data-dir", "--data glyphs"):
        load("mnist", tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert socket.getdefaulttimeout() is None


def test_ctrl_c_ends_a_download(
    downloading: type[Downloading], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloading, "failure", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        load("mnist", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_gives_a_one_line_error(
    downloading: type[Downloading], tmp_path: Path, raises_one_line
) -> None:
    (tmp_path / "MNIST").write_text("in the way")
    with raises_one_line(DataError, str(tmp_path), "--data-dir"):
        load("mnist", tmp_path)


# A torchvision that is incompatible with the installed torch


FAKE_TORCHVISION = {
    "__init__.py": "from . import extension, registrations, datasets",
    "extension.py": "import builtins\nbuiltins.imports = getattr(builtins, 'imports', 0) + 1",
    "datasets.py": "MNIST = 'here'",
    "registrations.py": """
        import torch, warnings
        warnings.warn("Failed to load image Python extension")
        print("chatter")
        for name in ("nms", "qnms"):
            torch.library.register_fake("torchvision::" + name)(lambda dets, scores, iou_threshold: dets)
    """,
}


@pytest.mark.slow
def test_the_import_of_torchvision_is_retried_with_its_missing_operators_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test uses a separate process, because operators are registered for the whole process.

    The fake torchvision fails in the same way as the real one.
    """
    (tmp_path / "torchvision").mkdir()
    for file, text in FAKE_TORCHVISION.items():
        (tmp_path / "torchvision" / file).write_text(textwrap.dedent(text))
    script = """
        import builtins, sys, torch, warnings
        warnings.simplefilter("error")
        sys.path.insert(0, sys.argv[1])
        assert "torchvision" not in sys.modules
        try:
            with warnings.catch_warnings(action="ignore"):
                import torchvision
        except RuntimeError as error:
            assert "operator torchvision::nms does not exist" in str(error), error
        else:
            raise AssertionError("the fake did not fail")
        from linformer_cli.data.torchvision_sets import import_torchvision_datasets
        assert import_torchvision_datasets().MNIST == "here"
        assert import_torchvision_datasets().MNIST == "here"
        assert builtins.imports == 2, builtins.imports
        import gc; gc.collect()
        torch.ops.torchvision.nms.default
    """
    monkeypatch.undo()  # the new process is asked for through a socket
    code, output, errors = run_script(textwrap.dedent(script), tmp_path)
    assert code == 0, errors
    # The script's own import may print "chatter" once, but the import in lintx may not print anything.
    assert output.replace(b"chatter\n", b"", 1) == b""


def break_torchvision(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every import of torchvision raise `failure`, even if torchvision has already been imported."""

    class Refusal(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, *_: object) -> None:
            if name.partition(".")[0] == "torchvision":
                raise failure

    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Refusal(), *sys.meta_path])


@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError("Detected that PyTorch and torchvision were compiled with different CUDA major versions."),
        RuntimeError(MISSING_OPERATOR),
        ImportError("undefined symbol: _ZN3c10"),
        ModuleNotFoundError("No module named 'torchvision._C'", name="torchvision._C"),
        AttributeError("partially initialized module"),
    ],
)
def test_a_mismatched_torchvision_is_refused_with_the_matching_versions(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, raises_one_line
) -> None:
    break_torchvision(failure, monkeypatch)
    declared: list[str] = []
    monkeypatch.setattr(torch.library, "Library", lambda *_: SimpleNamespace(define=declared.append))
    monkeypatch.setattr("importlib.metadata.version", {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}.__getitem__)
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["numpy", "torch (==2.13.0)", "pillow"])
    with raises_one_line(
        DataError, str(failure), "torch 2.13.0+cpu", "torchvision==0.28.0 and torch==2.13.0", "--data glyphs"
    ):
        torchvision_sets.import_torchvision_datasets()
    assert bool(declared) == (str(failure) == MISSING_OPERATOR)


def test_a_missing_torchvision_gives_a_one_line_error(monkeypatch: pytest.MonkeyPatch, raises_one_line) -> None:
    break_torchvision(ModuleNotFoundError("No module named 'torchvision'", name="torchvision"), monkeypatch)
    with raises_one_line(DataError, "pip install torchvision", "--data glyphs"):
        torchvision_sets.import_torchvision_datasets()
