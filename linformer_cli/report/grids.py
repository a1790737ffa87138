"""Grids of samples and completions, as PNG files with metadata about their origin, or as animated GIFs.

Images are uint8 arrays [N, H, W, C]: N images of H rows and W columns with C = 1 (grey), 3 (RGB) or 4 (RGBA) channels.
Grids show what is transparent as a light checkerboard.
"""

import io
import math
import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin, UnidentifiedImageError

from linformer_cli.documents import parse_json
from linformer_cli.errors import DataError, UsageError, describe_reason
from .tables import to_json

Value = TypeVar("Value", bound=np.generic)

METADATA_KEYWORD = "lintx"
BACKGROUND = 64  # a dark grey, distinct from both black and white images
CAPTION_COLOUR = 224
CAPTION_FONT_PIXELS, CAPTION_HEIGHT, CAPTION_MARGIN = 14, 20, 4  # pixels between the captions of small images
HIDDEN_TONES = (112, 144)  # two mid-tones of the checkerboard for hidden values
TRANSPARENT_TONES = (200, 232)
CELL = 4  # pixels in the finished picture, so that a checkerboard looks the same at every scale
GAP = 2  # pixels between images in the finished picture
LONG_SIDE = 600  # the default scale aims for this many pixels
LARGEST_DEFAULT_SCALE = 8
MOST_FRAMES, FRAME_MILLISECONDS, LAST_MILLISECONDS = 64, 60, 2000  # time to look at the result


def render_grid(images: NDArray[np.uint8], columns: int | None = None, scale: int | None = None) -> Image.Image:
    """Draw all `images` [N, H, W, C] in raster order in one picture.

    By default, `columns` makes the picture nearly square, and `scale`, which enlarges pixels up to 8 times, makes its
    long side about 600 pixels. There are `GAP` dark grey pixels between images, but no border. Raises `DataError` for
    another array, and `UsageError` for a number out of range.
    """
    require_images(images)
    count, height, width, _ = images.shape
    columns = _near_square(count, height, width) if columns is None else min(_at_least("columns", columns, 1), count)
    rows = math.ceil(count / columns)
    scale = choose_scale(scale, max(columns * width, rows * height))
    across, down = width * scale + GAP, height * scale + GAP
    mode = "L" if images.shape[3] == 1 else "RGB"
    grid = Image.new(mode, (columns * across - GAP, rows * down - GAP), _grey(mode, BACKGROUND))
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        grid.paste(_enlarge(image, scale), (column * across, row * down))
    return grid


def render_completion(
    original: NDArray[np.uint8],
    kept: NDArray[np.bool_],
    completions: NDArray[np.uint8],
    scale: int | None = None,
    picture: NDArray[np.uint8] | None = None,
) -> Image.Image:
    """Draw one row with captions: what the model saw of the original, its completions, and the original.

    If the original is a framed `picture`, that comes first. `original` is [H, W, C], `completions` is [N, H, W, C].
    `kept` [H, W, 1 or C] are the values that the model saw; the others are a checkerboard in each channel.
    `render_grid` explains `scale`. Raises `DataError` for arrays that do not fit, and `UsageError` for a number out of
    range.
    """
    require_images(completions)
    count, height, width, _ = completions.shape
    framed = () if picture is None else (picture,)
    for name, image in (("original", original), *(("unframed", image) for image in framed)):
        if image.dtype != np.uint8 or image.shape != completions.shape[1:]:
            wanted = f"uint8 {list(completions.shape[1:])} like the completions"
            raise DataError(f"the {name} image must be {wanted}, found {image.dtype} {list(image.shape)}")
    if kept.shape not in ((height, width, 1), original.shape):
        raise DataError(f"the kept part must be {list(original.shape)} like the original, found {list(kept.shape)}")
    scale = choose_scale(scale, max((count + 2 + len(framed)) * width, height))
    hidden = _repeat_pixels(~np.broadcast_to(kept, original.shape), scale)
    given = _repeat_pixels(original, scale).copy()
    given[..., 3:][hidden[..., 3:]] = 255
    hidden, given = hidden[..., :3], flatten(given)
    shown = np.where(hidden, _checker(given, HIDDEN_TONES), given)
    pictures = [_enlarge(image, scale) for image in (*framed, *completions, original)]
    pictures.insert(len(framed), to_picture(shown))
    captions = [*("picture" for _ in framed), "given", *(str(number) for number in range(1, count + 1)), "original"]
    return render_captioned_row(pictures, captions)


def render_captioned_row(pictures: Sequence[Image.Image], captions: Sequence[str], gap: int = GAP) -> Image.Image:
    """Draw pictures side by side above their captions, in RGB if any has colours. Raises `DataError` for none."""
    if not pictures:
        raise DataError("there are no pictures to put in a row")
    font = ImageFont.load_default(CAPTION_FONT_PIXELS)
    captioned = [math.ceil(font.getlength(caption)) + CAPTION_MARGIN for caption in captions]
    widths = [max(picture.width, width) for picture, width in zip(pictures, captioned, strict=True)]
    mode = "L" if all(picture.mode == "L" for picture in pictures) else "RGB"
    size = sum(widths) + gap * (len(widths) - 1), CAPTION_HEIGHT + max(picture.height for picture in pictures)
    row = Image.new(mode, size, _grey(mode, BACKGROUND))
    draw = ImageDraw.Draw(row)
    left = 0
    for picture, caption, column_width in zip(pictures, captions, widths, strict=True):
        middle = (left + column_width // 2, CAPTION_HEIGHT // 2)
        draw.text(middle, caption, fill=_grey(mode, CAPTION_COLOUR), font=font, anchor="mm")
        row.paste(picture.convert(mode), (left + (column_width - picture.width) // 2, CAPTION_HEIGHT))
        left += column_width + gap
    return row


def render_title(text: str) -> Image.Image:
    """Draw one line of text as a grey picture, to put above a row."""
    font = ImageFont.load_default(CAPTION_FONT_PIXELS)
    picture = Image.new("L", (math.ceil(font.getlength(text)) + 2 * CAPTION_MARGIN, CAPTION_HEIGHT), BACKGROUND)
    middle = (CAPTION_MARGIN, CAPTION_HEIGHT // 2)
    ImageDraw.Draw(picture).text(middle, text, fill=CAPTION_COLOUR, font=font, anchor="lm")
    return picture


def stack_rows(rows: Sequence[Image.Image], gap: int = 8) -> Image.Image:
    """Stack pictures, left-aligned, with a dark gap, in RGB if any has colours. Raises `DataError` for none."""
    if not rows:
        raise DataError("there are no pictures to stack")
    mode = "L" if all(row.mode == "L" for row in rows) else "RGB"
    height = sum(row.height for row in rows) + gap * (len(rows) - 1)
    stack = Image.new(mode, (max(row.width for row in rows), height), _grey(mode, BACKGROUND))
    top = 0
    for row in rows:
        stack.paste(row.convert(mode), (0, top))
        top += row.height + gap
    return stack


def encode_png(image: Image.Image, metadata: Mapping[str, object]) -> bytes:
    """PNG with `metadata` as compact JSON in the text chunk `lintx`. Equal arguments give equal bytes."""
    information = PngImagePlugin.PngInfo()
    information.add_text(METADATA_KEYWORD, to_json(dict(metadata), compact=True))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", pnginfo=information)
    return buffer.getvalue()


def frame_rows(height: int, first: int = 0) -> list[int]:
    """Return the rows shown in each frame, from `first` to `height`. Each adds one row, or several for tall images."""
    count = min(height - first, MOST_FRAMES)
    return [first + round(index * (height - first) / count) for index in range(count + 1)]


def hide_rows(images: NDArray[np.uint8], shown: int, kept: NDArray[np.bool_] | None = None) -> NDArray[np.uint8]:
    """Return a copy of images [N, H, W, C] in which only the first `shown` rows and `kept` pixels [H, W] show."""
    hidden = images.copy()
    unseen = np.ones(images.shape[1:3], bool) if kept is None else ~kept
    unseen[:shown] = False
    hidden[:, unseen] = BACKGROUND
    hidden[..., 3:][:, unseen] = 255
    return hidden


def encode_gif(frames: Sequence[Image.Image], metadata: Mapping[str, object]) -> bytes:
    """Encode `frames` of one size as an endlessly repeating GIF with `metadata` as its comment."""
    durations = [FRAME_MILLISECONDS] * (len(frames) - 1) + [LAST_MILLISECONDS]
    buffer = io.BytesIO()
    frames[0].save(
        buffer,
        format="GIF",
        save_all=True,
        append_images=list(frames[1:]),
        duration=durations,
        loop=0,
        comment=to_json(dict(metadata), compact=True).encode(),
    )
    return buffer.getvalue()


def read_png(path: str | os.PathLike[str]) -> Image.Image:
    """Read all of a PNG. Raises `DataError` if the file cannot be read or is not a PNG."""
    try:
        with Image.open(path, formats=["PNG"]) as picture:
            picture.load()
            return picture
    except UnidentifiedImageError:
        raise DataError(f"'{os.fspath(path)}' is not a PNG image") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot read '{os.fspath(path)}': {describe_reason(error).lower()}") from None


def read_png_metadata(path: str | os.PathLike[str]) -> dict[str, object] | None:
    """Return the metadata that `encode_png` put into a PNG, or None if it has none. Raises what `read_png` raises."""
    image = read_png(path)
    text = image.text.get(METADATA_KEYWORD) if isinstance(image, PngImagePlugin.PngImageFile) else None
    try:
        metadata = None if text is None else parse_json(text, any_text=True)  # it may name a path that is not UTF-8
    except ValueError:
        metadata = None
    return metadata if isinstance(metadata, dict) else None


def require_images(images: NDArray[np.uint8]) -> None:
    """Raise `DataError` unless `images` is uint8 [N, H, W, C] of at least one image with 1, 3 or 4 channels."""
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3, 4):
        wanted = "uint8 [count, height, width, 1, 3 or 4 channels]"
        raise DataError(f"images to draw must be {wanted}, found {images.dtype} {list(images.shape)}")
    if images.size == 0:
        raise DataError(f"there are no images to draw: found an array of {list(images.shape)}")


def _near_square(count: int, height: int, width: int) -> int:
    """Count the columns that make a picture nearly square, or one more if fewer cells stay empty (8 images: 4)."""
    nearest = min(count, max(1, math.ceil(math.sqrt(count * height / width))))
    return min((nearest, min(count, nearest + 1)), key=lambda columns: -count % columns)


def choose_scale(scale: int | None, long_side: int) -> int:
    if scale is not None:
        return _at_least("scale", scale, 1)
    return max(1, min(LARGEST_DEFAULT_SCALE, round(LONG_SIDE / long_side)))


def _at_least(name: str, number: int, least: int) -> int:
    if number < least:
        raise UsageError(f"{name} must be at least {least}, found {number}")
    return number


def _enlarge(image: NDArray[np.uint8], scale: int) -> Image.Image:
    return to_picture(flatten(_repeat_pixels(image, scale)))


def _repeat_pixels(image: NDArray[Value], scale: int) -> NDArray[Value]:
    return image.repeat(scale, axis=0).repeat(scale, axis=1)


def to_picture(image: NDArray[np.uint8], colours: Sequence[Sequence[int]] = ()) -> Image.Image:
    """Return [H, W, C] as a Pillow image. It is grey for C = 1, or has a palette of `colours` (RGBA)."""
    picture = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    if colours:
        picture.putpalette([band for colour in colours for band in colour[:3]])
        if (opacities := bytes(colour[3] for colour in colours)).strip(b"\xff"):
            picture.info["transparency"] = opacities
    return picture


def flatten(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """RGBA images [..., H, W, 4] on a light checkerboard, [..., H, W, 3]; other images as they are."""
    if images.shape[-1] < 4:
        return images
    ground = _checker(images, TRANSPARENT_TONES)
    opacity = images[..., 3:].astype(np.uint32)
    return ((images[..., :3] * opacity + ground * (255 - opacity) + 127) // 255).astype(np.uint8)


def _checker(images: NDArray[np.uint8], tones: tuple[int, int]) -> NDArray[np.uint8]:
    """Draw a checkerboard [H, W, 1] in two tones, of the size of images [..., H, W, C]."""
    height, width = images.shape[-3:-1]
    cells = np.arange(height)[:, None] // CELL + np.arange(width)[None, :] // CELL
    dark, light = (np.uint8(tone) for tone in tones)
    return np.where(cells % 2 == 0, dark, light)[:, :, None]


def _grey(mode: str, tone: int) -> int | tuple[int, int, int]:
    return tone if mode == "L" else (tone, tone, tone)
