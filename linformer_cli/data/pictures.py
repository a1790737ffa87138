"""A user's own image files, converted to the size and the channels of a model."""

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from linformer_cli.checkpoint_files import Frame
from linformer_cli.config import ImageShape
from linformer_cli.errors import DataError
from linformer_cli.files import is_special

from . import Fit
from .framing import frame_picture


@dataclass(frozen=True)
class Picture:
    """An image for a model, uint8 [H, W, C]. `notes` tell the user about changes that may be unexpected.

    If the picture was framed, `unframed` is the whole picture, reduced to the same size.
    """

    path: Path
    image: NDArray[np.uint8]
    notes: tuple[str, ...]
    unframed: NDArray[np.uint8] | None = None


def list_endings() -> set[str]:
    """The endings of the names of pictures that Pillow can read, such as `.png`."""
    return {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}


@contextlib.contextmanager
def open_picture(file: Path | bytes, name: str) -> Iterator[Image.Image]:
    """A context with the open picture of a file or its data. `name` is its name in messages.

    Raises `DataError` for a file that is missing, broken or too large to open safely, also if this shows only when the
    pixels are read in the context.
    """
    try:
        if isinstance(file, Path) and is_special(file):
            raise DataError(f"'{name}' is a pipe or a device, and images are read from files only; save it to a file")
        with warnings.catch_warnings():
            # Between its size limit and twice this limit, Pillow only warns of a decompression bomb. The warning is
            # raised as an error, because a small model needs no image of this size.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            warnings.filterwarnings("ignore", category=UserWarning)
            with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as opened:
                yield opened
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"no image at '{name}'") from None
    except IsADirectoryError:
        raise DataError(f"'{name}' is a folder, not an image") from None
    except UnidentifiedImageError:
        raise DataError(f"'{name}' is not an image that Pillow can read") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(f"'{name}' has more pixels than is safe to open ({Image.MAX_IMAGE_PIXELS:,})") from None
    except Exception as error:
        # Pillow's decoders raise OSError, SyntaxError, struct.error, IndexError and more.
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(f"'{name}' cannot be read: {reason}") from None


def load_picture(
    path: str | Path, shape: ImageShape, fit: Fit = "crop", invert: bool = False, frame: Frame | None = None
) -> Picture:
    """Read an image file and convert it to `shape`, in grey or RGB. Any format that Pillow reads is accepted.

    The image is rotated according to its EXIF data. `fit` is for images whose aspect ratio differs from that of
    `shape`: `crop` keeps the middle, `pad` adds the colour of the border, `stretch` distorts. Transparent parts become
    black behind a light drawing and white behind a dark one.

    With a `frame`, a picture of another size that shows a drawing is brought into this frame instead; `fit` and
    `invert` are then not used. Raises `DataError` for a file that is missing, broken or
    too large to open safely.
    """
    path = Path(path)
    with open_picture(path, str(path)) as opened:
        frames = getattr(opened, "n_frames", 1)
        picture = _flatten(ImageOps.exif_transpose(opened))
    notes = [f"has {frames} frames; only the first is used"] if frames > 1 else []
    picture = picture.convert("L" if shape.channels == 1 else "RGB")
    if picture.size != (shape.width, shape.height):
        framed = None if frame is None else frame_picture(picture, frame, shape)
        if framed is not None:
            image, note = framed
            return Picture(path, image, (*notes, note), _to_array(_resize(picture, shape, "pad"), shape))
        if frame is not None:
            notes.append("shows no drawing on a plain background, so it is not framed")
        notes.append(
            f"resized from {picture.width} x {picture.height} to {shape.width} x {shape.height} pixels ({fit})"
        )
    image = _to_array(_resize(picture, shape, fit), shape)
    return Picture(path, 255 - image if invert else image, tuple(notes))


def _to_array(picture: Image.Image, shape: ImageShape) -> NDArray[np.uint8]:
    return np.array(picture).reshape(shape.height, shape.width, shape.channels)


def border_brightness(image: NDArray[np.uint8]) -> float:
    """Mean value, 0 to 255, of the outermost ring of pixels of uint8 [H, W, C]."""
    inside = np.zeros(image.shape[:2], dtype=bool)
    inside[1:-1, 1:-1] = True
    return float(image[~inside].mean())


def _flatten(picture: Image.Image) -> Image.Image:
    """Return a copy without transparency and with 8 bits per channel, in mode L or RGB."""
    if picture.mode.startswith("I") or picture.mode == "F":
        # These modes have 16 bits or more, and Pillow's own conversion clips values at 255.
        values = np.nan_to_num(np.asarray(picture, dtype=np.float64), nan=0, posinf=0, neginf=0)
        highest = float(values.max(initial=0))
        # Floating-point images conventionally range from 0 to 1.
        full = 1.0 if picture.mode == "F" else 255.0
        top = full if highest <= full else 255.0 if highest <= 255 else max(65535.0, highest)
        return Image.fromarray((values.clip(0) / top * 255).round().astype(np.uint8))
    if not picture.has_transparency_data:
        return picture.convert("L" if picture.mode in ("1", "L") else "RGB")
    coloured = picture.convert("RGBA")
    values = np.asarray(coloured, dtype=np.float64)
    opacity = values[..., 3:]
    mean = float((values[..., :3] * opacity).sum() / max(opacity.sum() * 3, 1.0))
    ground = Image.new("RGBA", coloured.size, (0, 0, 0, 255) if mean > 127 else (255, 255, 255, 255))
    return Image.alpha_composite(ground, coloured).convert("RGB")


def _resize(picture: Image.Image, shape: ImageShape, fit: Fit) -> Image.Image:
    size = (shape.width, shape.height)
    if picture.size == size:
        return picture
    if fit == "stretch":
        return picture.resize(size, Image.Resampling.LANCZOS)
    if fit == "crop":
        return ImageOps.fit(picture, size, Image.Resampling.LANCZOS)
    array = np.asarray(picture)
    border = np.concatenate([array[0], array[-1], array[:, 0], array[:, -1]]).mean(axis=0).round().astype(int)
    colour = int(border) if border.ndim == 0 else tuple(border.tolist())
    return ImageOps.pad(picture, size, Image.Resampling.LANCZOS, color=colour)
