"""Reads picture files of any format: all their frames, or one picture for a model."""

import contextlib
import dataclasses
import functools
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from linformer_cli.config import Fit, ImageShape
from linformer_cli.errors import DataError
from linformer_cli.files import is_special
from linformer_cli.units import count_words
from .arrays import arrange_picture, open_array
from .framing import frame_picture
from .look import Look, Pixels, pack_colours, scale_numbers
from .parts import Part

HEIC_ENDINGS = (".heic", ".heif")
# The formats whose frames are pictures of the same thing. Those of others are previews, layers or sizes.
_FRAMED = ("GIF", "PNG", "TIFF", "WEBP")


@dataclass(frozen=True)
class Picture:
    """An image for a model, uint8 [H, W, C]. `notes` tell the user about changes that may be unexpected.

    Of a framed picture, `unframed` is the whole, reduced, and `others` are further drawings. `kept` bool [H, W] is the
    part.
    """

    path: Path
    image: NDArray[np.uint8]
    notes: tuple[str, ...]
    unframed: NDArray[np.uint8] | None = None
    others: "tuple[Picture, ...]" = ()
    kept: NDArray[np.bool_] | None = None


def list_endings() -> set[str]:
    """Return the endings of the names of pictures that Pillow can read, such as `.png`."""
    _register_heic()
    return {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}


@functools.cache
def _register_heic() -> None:
    with contextlib.suppress(ImportError):
        import pillow_heif  # type: ignore[import-not-found, unused-ignore]

        pillow_heif.register_heif_opener()


@contextlib.contextmanager
def open_picture(file: Path | bytes, name: str) -> Iterator[Image.Image]:
    """Open a picture in a context; messages call it `name`. Raises `DataError` for what cannot be read safely."""
    try:
        if isinstance(file, Path) and is_special(file):
            raise DataError(f"'{name}' is a pipe or a device, and images are read from files only; save it to a file")
        with warnings.catch_warnings():
            # Up to twice its size limit, Pillow only warns of a decompression bomb; no model needs such an image.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            warnings.filterwarnings("ignore", category=UserWarning)
            _register_heic()
            with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as opened:
                yield opened
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"no image at '{name}'") from None
    except IsADirectoryError:
        raise DataError(f"'{name}' is a folder, not an image") from None
    except UnidentifiedImageError:
        advice = "; pip install pillow-heif, or save it as JPEG" if name.lower().endswith(HEIC_ENDINGS) else ""
        raise DataError(f"'{name}' is not an image that Pillow can read{advice}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(f"'{name}' has more pixels than is safe to open ({Image.MAX_IMAGE_PIXELS:,})") from None
    except Exception as error:
        # Pillow's decoders raise OSError, SyntaxError, struct.error, IndexError and more.
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(f"'{name}' cannot be read: {reason}") from None


def read_frames(path: Path) -> Iterator[Pixels | None]:
    """Read all frames, upright, or a `.npy` file; None for previews and other sizes. Raises as `open_picture`."""
    if path.suffix.lower() == ".npy":
        yield from arrange_picture(open_array(path), path)
        return
    with open_picture(path, str(path)) as opened:
        size, framed = opened.size, opened.format in _FRAMED
        for number in range(getattr(opened, "n_frames", 1)):
            if number and framed:
                opened.seek(number)
            yield _read_pixels(opened) if number == 0 or (framed and opened.size == size) else None


def _read_pixels(opened: Image.Image) -> Pixels:
    picture = ImageOps.exif_transpose(opened)
    if picture.mode.startswith("I") or picture.mode == "F":
        # These modes have 16 bits or more, and Pillow's own conversion clips values at 255.
        return np.asarray(picture)[..., None]
    if picture.has_transparency_data:
        return np.asarray(picture.convert("RGBA"))
    if picture.mode in ("1", "L"):
        return np.asarray(picture.convert("L"))[..., None]
    return np.asarray(picture.convert("RGB"))


def read_mask(file: Path) -> NDArray[np.uint8]:
    """Return a mask uint8 [h, w] from the first frame of a picture: white is kept. Raises what `read_frames` raises."""
    pixels = next(read_frames(file))
    assert pixels is not None, "the first frame is used"
    if pixels.dtype != np.uint8:
        pixels = scale_numbers(pixels, None)
    return np.asarray(Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).convert("L"))


def load_picture(
    path: str | Path,
    look: Look,
    fit: Fit | None = None,
    invert: bool = False,
    framing: bool = False,
    part: Part | None = None,
) -> Picture:
    """Read the first frame of an image file as the look says. Any format that Pillow reads is accepted.

    `fit` replaces that of the look. With `framing`, a drawing of another size is brought into the frame of the look,
    unless a mask of its own size or transparency decides what is kept. Raises `DataError` for a file that cannot be
    read safely, for a mask of another size, and if the whole picture is kept.
    """
    path, shape = Path(path), look.shape
    with open_picture(path, str(path)) as opened:
        frames, pixels = getattr(opened, "n_frames", 1), _read_pixels(opened)
    notes = [f"has {frames} frames; only the first is used"] if frames > 1 else []
    picture = look.convert(pixels)
    kept = None
    if part is not None:
        kept, mask = _choose_pixels(part, pixels, picture.size, look, fit)
        framing = framing and (mask is None or mask.shape == (shape.height, shape.width))
        if mask is not part.mask:
            notes.append("transparent pixels are drawn, the others are kept")
        elif part.yields and look.keeps_opacity and np.asarray(picture)[..., 3].min() < 255:
            notes.append("transparent pixels are part of it for this model; --erase or --mask says what to draw")
    if invert and (shape.palette or look.keeps_opacity):  # numbers of colours and opacity have no negative
        colours = np.array(picture)
        colours[..., :3] = 255 - colours[..., :3]
        picture, invert = Image.fromarray(colours), False
    if picture.size != (shape.width, shape.height):
        if framing and look.frame is not None:
            whole = look.finish(picture, "pad")
            framed = [
                Picture(path, image, (*notes, note), whole, kept=kept)
                for image, note in frame_picture(picture, look.frame, shape)
            ]
            if framed:
                return dataclasses.replace(framed[0], others=tuple(framed[1:]))
            notes.append("shows no drawing on a plain background, so it is not framed")
        done = "resized" if look.smooth else "pixel art brought"
        notes.append(
            f"{done} from {picture.height} x {picture.width} to {shape.height} x {shape.width} pixels "
            f"(height x width; {fit or look.fit})"
        )
    image = look.finish(picture, fit)
    if shape.palette:
        own = np.unique(pack_colours(np.asarray(picture.convert("RGBA"))))
        if lacking := np.setdiff1d(own, pack_colours(np.array(shape.colours, np.uint8))).size:
            total = count_words(own.size, "colour")
            notes.append(f"{lacking:,} of its {total} become the nearest of the model's palette")
    return Picture(path, 255 - image if invert else image, tuple(notes), kept=kept)


def _choose_pixels(
    part: Part, pixels: Pixels, size: tuple[int, int], look: Look, fit: Fit | None
) -> tuple[NDArray[np.bool_], NDArray[np.uint8] | None]:
    """Choose the kept pixels bool [H, W] of a picture's image, and the mask: the part's, or its opacity."""
    if part.yields and pixels.shape[2] == 4 and not look.keeps_opacity:
        opaque = _fit_mask(pixels[..., 3], size, look, fit)
        if not opaque.all():  # a few transparent pixels of a large picture are lost in its image
            return opaque, pixels[..., 3]
    kept = part.pixels if part.mask is None else part.pixels & _fit_mask(part.mask, size, look, fit)
    if kept.all():
        raise DataError("the mask keeps the whole picture: nothing is left to complete")
    return kept, part.mask


def _fit_mask(mask: NDArray[np.uint8], size: tuple[int, int], look: Look, fit: Fit | None) -> NDArray[np.bool_]:
    """Return the pixels bool [H, W] that a mask uint8 [h, w] keeps of a picture with this `size` (width, height)."""
    shape = ImageShape(height=look.shape.height, width=look.shape.width)
    sizes = {size[::-1], (shape.height, shape.width)}
    if mask.shape not in sizes:
        allowed = " or ".join(f"{width} x {height}" for height, width in sorted(sizes))
        raise DataError(f"a mask for this picture has {allowed} pixels, found {mask.shape[1]} x {mask.shape[0]}")
    grey = dataclasses.replace(look, shape=shape, ground="#ffffff")
    kept: NDArray[np.bool_] = grey.finish(Image.fromarray(mask), fit)[..., 0] > 127
    return kept


def border_brightness(image: NDArray[np.uint8]) -> float:
    """Return mean value, 0 to 255, of the outermost ring of pixels of uint8 [H, W, C]."""
    inside = np.zeros(image.shape[:2], dtype=bool)
    inside[1:-1, 1:-1] = True
    return float(image[~inside].mean())
