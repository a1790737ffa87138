"""Data sets by name, and the rule that splits them into training, validation and test images."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from linformer_cli.config import LOOK_SETTINGS, DataConfig, ImageShape, holds_bytes
from linformer_cli.documents import parse_config
from linformer_cli.errors import DataError, UsageError, unknown_name
from linformer_cli.files import user_cache
from . import SPLITS, Split
from .arrays import arrange_images, open_array
from .byte_windows import DEFAULT_LENGTH, ByteWindows, load_byte_windows
from .folders import load_folder, note_skipped
from .framing import measure_frame
from .glyphs import CHARACTERS, COUNTS, DEFAULT_SIZE, draw_glyphs
from .look import Look, format_sides
from .pictures import border_brightness
from .survey import Survey, describe_sizes, sample_evenly
from .torchvision_sets import CLASS_NAMES, load_torchvision_set

DATA_SETS = (*CLASS_NAMES, "array:DIR", "folder:PATH", "bytes:PATH", "glyphs")

_BORDER_IMAGES = 1000


@dataclass(frozen=True, eq=False)
class ImageSet:
    """The images of one split of a data set.

    images: uint8 [N, H, W, C], N >= 1; may be a read-only view of a file. Windows of bytes are images of one row, and
        images with a palette hold the numbers of colours
    labels: int64 [N], or None if the set has none
    classes: number of classes, numbered from 0; 0 if the set has no labels. For `array:DIR`, the largest label of the
        loaded part decides
    notes: lines that the user should see, such as a reduction of colours
    skipped: lines about files that could not be read
    measured: the look, without a frame, of a set of the user
    """

    name: str
    split: Split
    images: NDArray[np.uint8] | ByteWindows
    labels: NDArray[np.int64] | None
    notes: tuple[str, ...] = ()
    classes: int = 0
    measured: Look | None = None
    skipped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> ImageShape:
        """Size of each image; raises `UsageError` if it is too large for a model."""
        if self.measured is not None:
            return self.measured.shape
        _, height, width, channels = self.images.shape
        return parse_config(ImageShape, {"height": height, "width": width, "channels": channels}, f"'{self.name}'")

    @functools.cached_property  # every save of a run asks for it
    def look(self) -> Look:
        """How pictures become images like these. The frame is that of the first 1,000 images."""
        look = self.measured or Look(self.shape)
        frame = None if look.shape.palette else measure_frame(self.images[:_BORDER_IMAGES])
        return dataclasses.replace(look, frame=frame)

    def require_shape(self, wanted: ImageShape) -> None:
        """Raise `UsageError` if the height, width, channels or palette of the images differ from `wanted`."""
        found, shape = self.images.shape[1:], (wanted.height, wanted.width, wanted.channels)
        palette = () if self.measured is None else self.measured.shape.palette
        if found == shape and palette != wanted.palette:
            palettes = f"({len(wanted.palette)} colours) is not that of '{self.name}' ({len(palette)} colours)"
            hint = "read them with the model's look, or train a new model"
            raise UsageError(f"the palette of the model's images {palettes}; {hint}")
        if found != shape:
            model, images = (" x ".join(map(str, sizes)) for sizes in (shape, found))
            hint = "use images of the model's size"
            raise UsageError(f"the model is for images of {model}, but '{self.name}' has {images}; {hint}")

    def require_labels(self, classes: int, reader: str = "the model") -> NDArray[np.int64]:
        """Return the labels for `reader`; raises `DataError` if there are none or some are not in 0 .. classes - 1."""
        if self.labels is None:
            raise DataError(f"'{self.name}' has no labels, and {reader} needs the class of each image")
        lowest, highest = int(self.labels.min()), int(self.labels.max())
        if lowest < 0 or highest >= classes:
            raise DataError(f"'{self.name}' has labels {lowest} to {highest}; {reader} has classes 0 to {classes - 1}")
        return self.labels

    def border_mean(self) -> float:
        """Mean brightness, 0 to 255, of the border pixels of the first 1,000 images; 0 for images with a palette."""
        if self.look.shape.palette:
            return 0.0
        return float(np.mean([border_brightness(image) for image in self.images[:_BORDER_IMAGES]]))


def load_images(
    name: str, split: Split, data_dir: str | Path | None = None, look: Look | None = None, **settings: Any
) -> ImageSet:
    """Load the images of one split of the data set `name`, one of `DATA_SETS`.

    `validation` is the last 5,000 of the set's own training images, or the last tenth (at least one image) if there are
    fewer than 50,000. `train` is the other training images. `test` is the set's own test part. `data_dir` (default: the
    environment variable LINTX_DATA, then data/ in `user_cache()`) holds torchvision's sets. Missing sets are downloaded
    into it. `settings` are other fields of `DataConfig`. With the `look` of a model, `glyphs` and windows of bytes have
    its size, and the user's own images are read as it says; otherwise, their look is measured. `load_folder` and
    `load_byte_windows` explain the splits of `folder:PATH` and `bytes:PATH`.

    Raises `UsageError` for an unknown name or split or an impossible size, and `DataError` if images are missing,
    damaged or of the wrong form.
    """
    place = None if data_dir is None else str(data_dir)
    return _load(parse_config(DataConfig, {"name": name, "data_dir": place, **settings}, "data"), [split], look)[0]


def name_folder(folder: str | Path) -> str:
    """Return the name of a folder's data set: of arrays if it holds train-images.npy, and otherwise of pictures."""
    return f"{'array' if (Path(folder) / 'train-images.npy').exists() else 'folder'}:{folder}"


def load_for_training(data: DataConfig, look: Look | None = None) -> tuple[ImageSet, ImageSet]:
    """Load the training and validation images of `data` in one pass. Raises the errors of `load_images`."""
    train, validation = _load(data, ["train", "validation"], look)
    return train, validation


def _load(data: DataConfig, splits: Sequence[Split], look: Look | None) -> list[ImageSet]:
    name = data.name
    for split in splits:
        if split not in SPLITS:
            raise unknown_name("split", split, SPLITS)
    part: Literal["train", "test"] = "test" if "test" in splits else "train"
    kind, colon, folder = name.partition(":")
    own = kind in ("array", "folder", "bytes") and bool(colon)
    if not own and name not in DATA_SETS:
        raise unknown_name("data set", name, DATA_SETS)
    if own and not folder:
        raise UsageError(f"--data {name} needs a {'path' if kind == 'bytes' else 'folder'}, as in {kind}:DIR")
    _check_settings(data, kind)
    if holds_bytes(name):
        length = data.length or (DEFAULT_LENGTH if look is None else look.shape.width)
        windows, skipped = load_byte_windows(Path(os.path.expanduser(folder)), splits, length)
        notes = note_skipped(skipped)
        return [ImageSet(name, *each, None, skipped=notes) for each in zip(splits, windows, strict=True)]
    if name == "glyphs":
        side = look.shape.height if look is not None else data.image_size[0] if data.image_size else DEFAULT_SIZE
        return [_draw(name, split, part, side) for split in splits]
    if kind == "folder":
        found = load_folder(Path(os.path.expanduser(folder)), splits, data, look, user_cache() / "folders")
        return [
            ImageSet(name, split, one.images, one.labels, one.notes, len(one.look.class_names), one.look, one.skipped)
            for split, one in zip(splits, found, strict=True)
        ]
    notes = ()
    if kind == "array":
        images, labels = _load_arrays(folder, part)
        images, look, notes = _read_arrays(folder, images, data, look)
    else:
        images, labels = load_torchvision_set(name, part == "train", *find_data_dir(data.data_dir))
        look = None
    classes = 0 if labels is None else max(0, int(labels.max()) + 1)
    parts = [(split, _part(name, split, len(images))) for split in splits]
    return [
        ImageSet(name, split, images[part], None if labels is None else labels[part], notes, classes, look)
        for split, part in parts
    ]


def _check_settings(data: DataConfig, kind: str) -> None:
    takers = {
        "image_size": ("glyphs", "folder"),
        **dict.fromkeys(("fit", "tile"), ("folder",)),
        **dict.fromkeys(("ground", "range", "colours", "channels"), ("folder", "array")),
        "length": ("bytes",),
    }
    for key, kinds in takers.items():
        value = getattr(data, key)
        if value is not None and kind not in kinds:
            flag, shown = f"--{key.replace('_', '-')}", format_sides(value) if key == "image_size" else value
            taking = " and ".join({"glyphs": "glyphs", "array": "array:DIR"}.get(one, f"{one}:PATH") for one in kinds)
            whole = ": arrays are used as they are; cut or resize them with numpy" if kind == "array" else ""
            raise UsageError(f"{flag} {shown} is for {taking}, not for --data {data.name}{whole}; drop {flag}")
    if data.image_size is not None:  # before anything is drawn or decoded
        height, width = data.image_size
        where = f"--image-size {format_sides(data.image_size)}"
        if height != width and kind == "glyphs":
            raise UsageError(f"glyphs are square, found {where}; give one side")
        parse_config(ImageShape, {"height": height, "width": width, "channels": data.channels or 1}, where)


def _read_arrays(
    folder: str, images: NDArray[Any], data: DataConfig, look: Look | None
) -> tuple[NDArray[np.uint8], Look | None, tuple[str, ...]]:
    """Read the images uint8 of an array, its look and lines about it. Grey and RGB images of 8 bits are as they are."""
    asked = any(getattr(data, key) is not None for key in LOOK_SETTINGS)
    plain = images.dtype == np.uint8 and images.shape[3] != 4 and not asked
    # The look of a model changes the colours of such images, not their size.
    same_size = look is not None and images.shape[1:3] == (look.shape.height, look.shape.width)
    other_colours = look is not None and (look.shape.palette or (same_size and images.shape[3] != look.shape.channels))
    if plain and not other_colours:
        return images, None, ()
    notes: list[str] = []
    if look is None:
        training = Path(os.path.expanduser(folder)) / "train-images.npy"
        whole = _load_arrays(folder, "train")[0] if training.exists() else images
        survey, sample = Survey(), sample_evenly(whole)
        for pixels in sample:
            survey.add(pixels)
        look, notes = survey.choose(data.model_copy(update={"image_size": whole.shape[1:3]}), sample)
    notes = [*describe_sizes({images.shape[1:3]: len(images)}, look), *notes]
    read = np.empty((len(images), look.shape.height, look.shape.width, look.shape.channels), np.uint8)
    for row, pixels in zip(read, images, strict=True):
        row[:] = look.read(pixels)
    return read, look, tuple(notes)


def _draw(name: str, split: Split, part: Literal["train", "test"], side: int) -> ImageSet:
    place = _part(name, split, COUNTS[part])
    images, labels = draw_glyphs(part, side, place.start, place.stop)
    return ImageSet(name, split, images, labels, classes=len(CHARACTERS))


def _part(name: str, split: Split, count: int) -> slice:
    """Select the images of `split` among the `count` images of the set's own training or test part."""
    if split == "test":
        return slice(0, count)
    if count < 2:
        raise DataError(f"{name} has {count} training image; at least 2 are needed, one of them for validation")
    held_out = 5_000 if count >= 50_000 else max(1, count // 10)
    return slice(0, count - held_out) if split == "train" else slice(count - held_out, count)


def find_data_dir(data_dir: str | Path | None) -> tuple[Path, str]:
    """Find the folder of torchvision's sets, and what set it. Only the default is created: another may be misspelt."""
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
        hint = "name another with --data-dir"
        raise DataError(f"cannot use the data folder {error.filename} ({error.strerror}); {hint}") from error
    return root, "the default"


def _load_arrays(folder: str, part: Literal["train", "test"]) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
    images_path = Path(os.path.expanduser(folder)) / f"{part}-images.npy"
    labels_path = images_path.with_name(f"{part}-labels.npy")
    images = arrange_images(open_array(images_path), images_path)
    if not os.path.lexists(labels_path):  # a broken link is an error, not a set without labels
        return images, None
    labels = open_array(labels_path)
    if labels.ndim != 1 or len(labels) != len(images) or not np.issubdtype(labels.dtype, np.integer):
        found = f"found {labels.dtype} {list(labels.shape)}; fix or remove the file"
        raise DataError(f"{labels_path}: labels must be {len(images)} integers, one per image, {found}")
    if labels.max() > np.iinfo(np.int64).max:
        raise DataError(f"{labels_path}: labels must be less than 2^63, found {labels.max()}; fix or remove the file")
    return images, labels.astype(np.int64)
