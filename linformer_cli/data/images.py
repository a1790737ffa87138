"""Data sets by name, and the rule that splits them into training, validation and test images."""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from linformer_cli.checkpoint_files import Frame
from linformer_cli.config import DataConfig, ImageShape, holds_bytes
from linformer_cli.documents import parse_config
from linformer_cli.errors import DataError, UsageError, unknown_name
from linformer_cli.files import is_special, user_cache

from . import SPLITS, Split
from .byte_windows import DEFAULT_LENGTH, ByteWindows, load_byte_windows
from .folders import FolderImages, load_folder
from .framing import measure_frame
from .glyphs import CHARACTERS, COUNTS, DEFAULT_SIZE, draw_glyphs
from .pictures import border_brightness
from .torchvision_sets import CLASS_NAMES, load_torchvision_set

DATA_SETS = (*CLASS_NAMES, "array:DIR", "folder:PATH", "bytes:PATH", "glyphs")

_BORDER_IMAGES = 1000


@dataclass(frozen=True, eq=False)
class ImageSet:
    """The images of one split of a data set.

    images: uint8 [N, H, W, C], N >= 1, C is 1 or 3; may be a read-only view of a file. Windows of bytes are images of
        one row
    labels: int64 [N], or None if the set has none
    classes: number of classes, numbered from 0; 0 if the set has no labels. For `array:DIR`, the largest label of the
        loaded part decides
    notes: lines that the user should see, such as skipped files
    """

    name: str
    split: Split
    images: NDArray[np.uint8] | ByteWindows
    labels: NDArray[np.int64] | None
    notes: tuple[str, ...] = ()
    classes: int = 0

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> ImageShape:
        """Size of each image, with 256 levels; raises `UsageError` if it is too large for a model."""
        _, height, width, channels = self.images.shape
        return parse_config(ImageShape, {"height": height, "width": width, "channels": channels}, f"'{self.name}'")

    def require_shape(self, wanted: ImageShape) -> None:
        """Raise `UsageError` if the height, width or channels of the images differ from `wanted`."""
        found, shape = self.images.shape[1:], (wanted.height, wanted.width, wanted.channels)
        if found != shape:
            raise UsageError(
                f"the model is for images of {' x '.join(map(str, shape))}, but '{self.name}' has "
                f"{' x '.join(map(str, found))}; use images of the model's size"
            )

    def require_labels(self, classes: int, reader: str = "the model") -> NDArray[np.int64]:
        """The labels for `reader`; raises `DataError` if there are none, or if some are not in 0 .. classes - 1."""
        if self.labels is None:
            raise DataError(f"'{self.name}' has no labels, and {reader} needs the class of each image")
        lowest, highest = int(self.labels.min()), int(self.labels.max())
        if lowest < 0 or highest >= classes:
            raise DataError(
                f"'{self.name}' has labels from {lowest} to {highest}, but {reader} has the classes 0 to {classes - 1}"
            )
        return self.labels

    def border_mean(self) -> float:
        """Mean brightness, 0 to 255, of the border pixels of the first 1,000 images.

        It is near 0 for light drawings on a dark background, and near 255 for dark drawings on a light background.
        """
        return float(np.mean([border_brightness(image) for image in self.images[:_BORDER_IMAGES]]))

    @functools.cached_property  # every save of a run asks for it
    def frame(self) -> Frame | None:
        """The frame of the first 1,000 images, as `framing.measure_frame` finds it."""
        return measure_frame(self.images[:_BORDER_IMAGES])


def takes_size(name: str) -> bool:
    """Whether the images of a data set are available at any size."""
    return name == "glyphs" or name.startswith("folder:")


def fit_size(name: str, image: ImageShape) -> dict[str, int]:
    """The settings that make the images of data set `name` fit a model for `image`.

    `image_size`, `channels` and `length` are included only if the data set takes them.
    """
    if holds_bytes(name):
        return {"length": image.width}
    sizes = {"image_size": image.height} if takes_size(name) else {}
    return {**sizes, "channels": image.channels} if name.startswith("folder:") else sizes


def load_images(
    name: str,
    split: Split,
    data_dir: str | Path | None = None,
    image_size: int | None = None,
    channels: int | None = None,
    length: int | None = None,
) -> ImageSet:
    """Load the images of one split of the data set `name`, one of `DATA_SETS`.

    `validation` is the last 5,000 of the set's own training images, or the last tenth (at least one image) if there are
    fewer than 50,000. `train` is the other training images. `test` is the set's own test part. `data_dir` (default: the
    environment variable LINTX_DATA, then data/ in `user_cache()`) holds torchvision's sets. Missing sets are downloaded
    into it. `image_size`, in pixels, is for `glyphs` and `folder:PATH`. `channels` (1 grey, 3 RGB) is for
    `folder:PATH`. `length` (default: 1,024) is the number of bytes in a window of `bytes:PATH`. `load_folder` and
    `load_byte_windows` explain the splits of `folder:PATH` and `bytes:PATH`.

    Raises `UsageError` for an unknown name or split or an impossible size, and `DataError` if images are missing,
    damaged or of the wrong form.
    """
    return _load(name, [split], data_dir, image_size, channels, length)[0]


def load_for_training(data: DataConfig) -> tuple[ImageSet, ImageSet]:
    """Load the training and validation images of `data` in one pass. Raises the errors of `load_images`."""
    sizes = data.image_size, data.channels, data.length
    train, validation = _load(data.name, ["train", "validation"], data.data_dir, *sizes)
    return train, validation


def _load(
    name: str,
    splits: Sequence[Split],
    data_dir: str | Path | None,
    image_size: int | None,
    channels: int | None,
    length: int | None,
) -> list[ImageSet]:
    """Load `splits`: either `test` alone, or splits of the set's own training images."""
    for split in splits:
        if split not in SPLITS:
            raise unknown_name("split", split, SPLITS)
    part: Literal["train", "test"] = "test" if "test" in splits else "train"
    kind, colon, folder = name.partition(":")
    own = kind in ("array", "folder", "bytes") and bool(colon)
    if not own and name not in DATA_SETS:
        raise unknown_name("data set", name, DATA_SETS)
    if own and not folder:
        raise UsageError(
            f"--data {name} needs a {'path' if kind == 'bytes' else 'folder'}, as in {kind}:DIR; found none"
        )
    if image_size is not None and not takes_size(name):
        raise UsageError(
            f"--image-size {image_size} is for glyphs and folder:PATH, not for --data {name}; drop --image-size"
        )
    if image_size is not None:  # before anything is drawn or decoded
        sides = {"height": image_size, "width": image_size, "channels": channels or 1}
        parse_config(ImageShape, sides, f"--image-size {image_size}")
    if channels is not None and not (own and kind == "folder"):
        raise UsageError(f"--channels {channels} is for folder:PATH, not for --data {name}; drop --channels")
    if length is not None and not holds_bytes(name):
        raise UsageError(f"--length {length} is for bytes:PATH, not for --data {name}; drop --length")
    if holds_bytes(name):
        windows, skipped = load_byte_windows(Path(os.path.expanduser(folder)), splits, length or DEFAULT_LENGTH)
        notes = _note_skipped(skipped)
        return [ImageSet(name, *each, None, notes) for each in zip(splits, windows, strict=True)]
    if name == "glyphs":
        side = DEFAULT_SIZE if image_size is None else image_size
        return [_draw(name, split, part, side) for split in splits]
    if kind == "folder":
        found = load_folder(Path(os.path.expanduser(folder)), splits, image_size, channels, user_cache() / "folders")
        return [_from_folder(name, *each) for each in zip(splits, found, strict=True)]
    if kind == "array":
        images, labels = _load_arrays(folder, part)
    else:
        images, labels = load_torchvision_set(name, part == "train", *find_data_dir(data_dir))
    return [_cut(name, split, images, labels) for split in splits]


def _draw(name: str, split: Split, part: Literal["train", "test"], side: int) -> ImageSet:
    place = _part(name, split, COUNTS[part])
    images, labels = draw_glyphs(part, side, place.start, place.stop)
    return ImageSet(name, split, images, labels, classes=len(CHARACTERS))


def _from_folder(name: str, split: Split, found: FolderImages) -> ImageSet:
    return ImageSet(name, split, found.images, found.labels, _note_skipped(found.skipped), found.classes)


def _note_skipped(skipped: Sequence[str]) -> tuple[str, ...]:
    many = f"{len(skipped)} files skipped, the first: " if len(skipped) > 1 else "1 file skipped: "
    return (many + skipped[0],) if skipped else ()


def _part(name: str, split: Split, count: int) -> slice:
    """Select the images of `split` among the `count` images of the set's own training or test part."""
    if split == "test":
        return slice(0, count)
    if count < 2:
        raise DataError(f"{name} has {count} training image; at least 2 are needed, one of them for validation")
    held_out = 5_000 if count >= 50_000 else max(1, count // 10)
    return slice(0, count - held_out) if split == "train" else slice(count - held_out, count)


def _cut(name: str, split: Split, images: NDArray[np.uint8], labels: NDArray[np.int64] | None) -> ImageSet:
    part = _part(name, split, len(images))
    if labels is None:
        return ImageSet(name, split, images[part], None)
    return ImageSet(name, split, images[part], labels[part], classes=max(0, int(labels.max()) + 1))


def find_data_dir(data_dir: str | Path | None) -> tuple[Path, str]:
    """Return the existing folder of torchvision's sets, and what set it: an option, a variable or the default.

    Only the default folder is created if missing: a named folder that does not exist is probably misspelt.
    """
    named, origin = (data_dir, "--data-dir") if data_dir is not None else (os.environ.get("LINTX_DATA"), "LINTX_DATA")
    try:
        if named:
            root = Path(os.path.expanduser(named))
            if not root.is_dir():
                found = "is not a folder" if root.exists() else "does not exist"
                raise DataError(f"the data folder {root} ({origin}) {found}; create it or name another with --data-dir")
            return root, origin
        root = user_cache() / "data"
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot use the data folder {error.filename} ({error.strerror}); name another with --data-dir"
        ) from error
    return root, "the default"


def _load_arrays(folder: str, part: Literal["train", "test"]) -> tuple[NDArray[np.uint8], NDArray[np.int64] | None]:
    """Images [N, H, W, C], memory-mapped, and labels [N] if there are any."""
    images_path = Path(os.path.expanduser(folder)) / f"{part}-images.npy"
    labels_path = images_path.with_name(f"{part}-labels.npy")
    images = _open_array(images_path)
    if images.dtype != np.uint8:
        raise DataError(f"{images_path}: pixels must be uint8 (0 to 255), found {images.dtype}; convert and save again")
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise DataError(
            f"{images_path}: images must be [N, H, W], [N, H, W, 1] or [N, H, W, 3], found {list(images.shape)}; "
            "reshape and save again"
        )
    if images.size == 0:
        raise DataError(f"{images_path}: found no images (shape {list(images.shape)}); save at least one")
    if not os.path.lexists(labels_path):  # a broken link is an error, not a set without labels
        return images, None
    labels = _open_array(labels_path)
    if labels.ndim != 1 or len(labels) != len(images) or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"{labels_path}: labels must be {len(images)} integers, one per image, found {labels.dtype} "
            f"{list(labels.shape)}; fix or remove the file"
        )
    if labels.max() > np.iinfo(np.int64).max:
        raise DataError(f"{labels_path}: labels must be less than 2^63, found {labels.max()}; fix or remove the file")
    return images, labels.astype(np.int64)


def _open_array(path: Path) -> NDArray[Any]:
    try:
        if is_special(path):
            raise DataError(f"{path} is a pipe or a device; save the array to a file with numpy.save")
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(
            f"{path} does not exist; save the images there with numpy.save, or name another folder"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror or error}); check the file and its rights") from error
    # For damaged files, numpy raises ValueError, EOFError, SyntaxError or UnicodeError.
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(
            f"{path} is not a complete .npy file of numbers ({reason}); save it again with numpy.save"
        ) from error
    if not isinstance(array, np.ndarray):  # an .npz archive whose name ends in .npy
        array.close()
        raise DataError(f"{path} is an archive of several arrays; save only the images, with numpy.save")
    return array
