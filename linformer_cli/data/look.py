"""The look of a data set: everything that decides how a picture becomes values, the same for all its pictures."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from linformer_cli.checkpoint_files import CheckpointInfo, Frame
from linformer_cli.config import Fit, ImageShape

# A picture as it is in its file: [height, width, 1, 3 or 4 channels]. The type is uint8, or that of larger numbers.
Pixels = NDArray[Any]

_PALETTE_CHUNK = 2**16


@dataclass(frozen=True)
class Look:
    """How pictures become values.

    shape: size, channels and palette of the images
    fit: for pictures of another size: `crop` keeps the middle, `pad` adds the ground, `stretch` distorts
    ground: colour '#rrggbb' behind transparent parts and around padded pictures. None: whatever contrasts with the
        picture, and the colour of the picture's border
    range: the numbers that become black and white in pictures of 16 bits or floating-point numbers, None without such.
        Pictures of 8 bits are as they are
    smooth: whether resizing mixes pixels. Pixel art keeps its pixels: it is cropped and padded, not resized
    tile: the side of the squares that each picture is cut into
    class_names: the names of the classes, by number
    frame: where drawings are, and their grey levels
    """

    shape: ImageShape
    fit: Fit = "crop"
    ground: str | None = None
    range: tuple[float, float] | None = None
    smooth: bool = True
    tile: int | None = None
    class_names: tuple[str, ...] = ()
    frame: Frame | None = None

    @classmethod
    def of(cls, info: CheckpointInfo) -> "Look":
        """Return the look of a checkpoint's training images. A model without classes accepts any class names."""
        look = cls(info.model.image, **{name: getattr(info.data, name) for name in _STORED})
        return look if info.model.classes else dataclasses.replace(look, class_names=())

    @property
    def stored(self) -> dict[str, Any]:
        """The fields of `DataSummary` that record this look. The shape is in the model's configuration."""
        return {name: getattr(self, name) for name in _STORED}

    @property
    def keeps_opacity(self) -> bool:
        return self.shape.channels == 4 or any(opacity < 255 for *_, opacity in self.shape.colours)

    def read(self, pixels: Pixels) -> NDArray[np.uint8]:
        """Return the image uint8 [H, W, C] for a picture: brightnesses, or numbers of colours for a palette."""
        return self.finish(self.convert(pixels))

    def convert(self, pixels: Pixels) -> Image.Image:
        """Return the whole picture with 8 bits a channel: in grey or RGB, or in RGBA if transparency is kept."""
        if pixels.dtype != np.uint8:
            pixels = scale_numbers(pixels, self.range)
        picture = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
        if self.keeps_opacity:
            return picture.convert("RGBA")
        if picture.mode == "RGBA":
            picture = _flatten(picture, self.ground)
        return picture.convert("L" if self.shape.channels == 1 and not self.shape.palette else "RGB")

    def finish(self, picture: Image.Image, fit: Fit | None = None) -> NDArray[np.uint8]:
        """Turn a picture from `convert` into an image. `fit` replaces the `fit` of the look."""
        shape, size = self.shape, (self.shape.width, self.shape.height)
        if picture.size != size:
            picture = self._resize(picture, fit or self.fit) if self.smooth else self._place(picture, fit or self.fit)
        if shape.palette:
            return find_colours(np.asarray(picture.convert("RGBA")), shape)[..., None]
        return np.array(picture).reshape(shape.height, shape.width, shape.channels)

    def _resize(self, picture: Image.Image, fit: Fit) -> Image.Image:
        size = (self.shape.width, self.shape.height)
        if fit == "stretch":
            return picture.resize(size, Image.Resampling.LANCZOS)
        if fit == "crop":
            return ImageOps.fit(picture, size, Image.Resampling.LANCZOS)
        array = np.asarray(picture)
        border = np.concatenate([array[0], array[-1], array[:, 0], array[:, -1]]).mean(axis=0).round().astype(int)
        colour = self._choose_ground(picture, int(border) if border.ndim == 0 else tuple(border.tolist()))
        return ImageOps.pad(picture, size, Image.Resampling.LANCZOS, color=colour)

    def _place(self, picture: Image.Image, fit: Fit) -> Image.Image:
        """Bring pixel art to the size without mixing pixels: a larger picture loses pixels, a smaller one is padded."""
        size = (self.shape.width, self.shape.height)
        if fit == "stretch":
            return picture.resize(size, Image.Resampling.NEAREST)
        whole = min(picture.width // size[0], picture.height // size[1])
        if fit == "pad" and (picture.width > size[0] or picture.height > size[1]):
            picture = ImageOps.contain(picture, size, Image.Resampling.NEAREST)
        elif whole > 1:
            picture = picture.resize((picture.width // whole, picture.height // whole), Image.Resampling.NEAREST)
        placed = Image.new(picture.mode, size, self._choose_ground(picture, picture.getpixel((0, 0))))
        placed.paste(picture, ((size[0] - picture.width) // 2, (size[1] - picture.height) // 2))
        return placed

    def _choose_ground(self, picture: Image.Image, border: Any) -> Any:
        """Return the colour around a padded picture: transparent, the ground, or that of its `border`."""
        if picture.mode == "RGBA":
            return (0, 0, 0, 0)
        if self.ground is None:
            return border
        red, green, blue = bytes.fromhex(self.ground[1:7])
        return Image.new("RGB", (1, 1), (red, green, blue)).convert(picture.mode).getpixel((0, 0))


_STORED = tuple(field.name for field in dataclasses.fields(Look) if field.name != "shape")


def format_sides(sides: tuple[int, int]) -> str:
    """Return height and width as the value of `--image-size`: `48x64`, or `32` for a square."""
    return str(sides[0]) if sides[0] == sides[1] else f"{sides[0]}x{sides[1]}"


def name_colour(colour: NDArray[np.uint8]) -> str:
    """Return a colour [4] as '#rrggbb', or as '#rrggbbaa' if it is not opaque."""
    return "#" + (colour[:3] if colour[3] == 255 else colour).tobytes().hex()


def scale_numbers(pixels: Pixels, span: tuple[float, float] | None) -> NDArray[np.uint8]:
    """Scale numbers from `span` to 0 to 255, NaN and infinities to 0. Without a span, those up to 1 are fractions."""
    values = np.nan_to_num(np.asarray(pixels, dtype=np.float64), nan=0, posinf=0, neginf=0)
    if span is None:
        highest = float(values.max(initial=0))
        full = 1.0 if np.issubdtype(pixels.dtype, np.floating) else 255.0
        span = 0.0, full if highest <= full else 255.0 if highest <= 255 else max(65535.0, highest)
    lowest, highest = span
    return ((values - lowest) / (highest - lowest) * 255).clip(0, 255).round().astype(np.uint8)


def pack_colours(pixels: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Pack pixels of uint8 [..., 1, 3 or 4 channels] into one number each; 0 for all fully transparent ones."""
    full = np.full((*pixels.shape[:-1], 4), 255, np.uint8)
    full[..., : max(3, pixels.shape[-1])] = pixels
    packed: NDArray[np.uint32] = full.view("<u4")[..., 0]
    packed[full[..., 3] == 0] = 0
    return packed


def unpack_colours(packed: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Return the colours uint8 [..., 4] of `pack_colours`."""
    return np.ascontiguousarray(packed, "<u4")[..., None].view(np.uint8)


def find_colours(pixels: NDArray[np.uint8], shape: ImageShape) -> NDArray[np.uint8]:
    """Find the number [h, w] of the palette's colour that looks nearest on black to each pixel of uint8 [h, w, 4]."""
    found, places = np.unique(pack_colours(pixels), return_inverse=True)
    known, squares = _weigh_palette(shape)
    nearest = np.empty(len(found), np.uint8)
    for start in range(0, len(found), _PALETTE_CHUNK):
        part = _weigh(unpack_colours(found[start : start + _PALETTE_CHUNK]))
        nearest[start : start + _PALETTE_CHUNK] = (squares - 2 * part @ known.T).argmin(axis=1)
    return nearest[places.reshape(pixels.shape[:2])]


@functools.lru_cache(maxsize=8)
def _weigh_palette(shape: ImageShape) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    known = _weigh(np.array(shape.colours, np.uint8))
    return known, (known**2).sum(axis=1)


def _weigh(colours: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Multiply red, green and blue of colours [n, 4] by the opacity."""
    weighed = colours.astype(np.float64)
    weighed[:, :3] *= weighed[:, 3:] / 255
    return weighed


def _flatten(picture: Image.Image, ground: str | None) -> Image.Image:
    """Put a picture on the ground: without one, on black behind a light drawing and on white behind a dark one."""
    if ground is None:
        values = np.asarray(picture, dtype=np.float64)
        opacity = values[..., 3:]
        mean = float((values[..., :3] * opacity).sum() / max(opacity.sum() * 3, 1.0))
        ground = "#000000" if mean > 127 else "#ffffff"
    return Image.alpha_composite(Image.new("RGBA", picture.size, ground), picture).convert("RGB")
