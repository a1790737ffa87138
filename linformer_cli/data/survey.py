"""Measures the look of a data set over all its pictures, and says what was found."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from linformer_cli.config import DataConfig, ImageShape
from linformer_cli.documents import parse_config
from linformer_cli.units import count_words
from .look import Look, Pixels, find_colours, format_sides, name_colour, pack_colours, scale_numbers, unpack_colours

DEFAULT_SIDE = 32
# Images have the usual size of the pictures if neither side of it is longer than this, in pixels.
_LARGEST_SIDE = 64
_MOST_COLOURS = 256
# A palette has the first of these numbers of colours whose mean error, of 255, is at most this.
_PALETTES, _SMALL_ERROR = (64, 128, 256), 8.5
# Pixel art has few colours for its pixels, few opacities, and many equal neighbours.
_PIXELS_PER_COLOUR, _FEW_COLOURS, _FEW_OPACITIES, _EQUAL = 8, 16, 16, 0.1
# A picture has colours if more than this share of its pixels differs by more than this between the channels.
_COLOURED, _SPREAD = 0.002, 8
# Limits of what is measured: the pixels of a picture; the pictures, the pixels of each, the pixels for a palette.
_LOOKED_AT, _SAMPLE_PICTURES, _SAMPLE_PIXELS, _MOST_PIXELS = 2**16, 4096, 1024, 2**18
# Extreme numbers, such as dead pixels of a camera, are clipped if the others span less than half of the range.
_EXTREME = 1e-4


class Survey:
    """What the pictures of a set have in common. Memory does not grow with their number."""

    def __init__(self) -> None:
        self.sizes: Counter[tuple[int, int]] = Counter()
        self._colours: NDArray[np.uint32] | None = np.zeros(0, np.uint32)
        self._blocks: Counter[tuple[int, int]] = Counter()  # of pixel art, by size: see `_measure_block`
        self._art = self._coloured = self._transparent = 0
        self._brightness = self._opacity = 0.0
        self._whole = True  # whether all numbers are integers
        self._spans: list[tuple[float, float, float, float]] = []
        self._seen: set[bytes] = set()  # digests; copies count once, except in `sizes`

    def add(self, pixels: Pixels) -> bytes:
        """Look at a picture, and return a digest that only equal pictures share."""
        height, width, channels = pixels.shape
        self.sizes[height, width] += 1
        step = max(1, int((height * width / _LOOKED_AT) ** 0.5))
        packed = pack_colours(pixels) if pixels.dtype == np.uint8 else pixels
        name = hashlib.blake2b(packed.tobytes(), digest_size=12, salt=repr(pixels.shape[:2]).encode()[:16]).digest()
        if name in self._seen:
            return name
        self._seen.add(name)
        if pixels.dtype != np.uint8:
            self._add_numbers(pixels[::step, ::step])
            return name
        found = np.unique(packed[::step, ::step])
        if step > 1 and len(found) <= _MOST_COLOURS:
            found = np.unique(packed)
        equal = float((packed[::step, 1:] == packed[::step, :-1]).mean()) if width > 1 else 1.0
        most = max(_FEW_COLOURS, height * width // _PIXELS_PER_COLOUR) if channels > 1 else _FEW_COLOURS
        opacities = np.unique(unpack_colours(found)[:, 3])
        is_art = len(found) <= min(_MOST_COLOURS, most) and len(opacities) <= _FEW_OPACITIES and equal >= _EQUAL
        self._art += is_art
        block = _measure_block(packed) if is_art else 1
        self._blocks[height, width] = math.gcd(self._blocks[height, width], block)
        if self._colours is not None:
            colours = np.union1d(self._colours, found)
            self._colours = colours if len(colours) <= _MOST_COLOURS else None
        if channels > 1:
            part = pixels[::step, ::step].astype(np.int16)
            shown = part[..., 3] > 0 if channels == 4 else np.ones(part.shape[:2], bool)
            spread = part[..., :3].max(axis=2) - part[..., :3].min(axis=2)
            self._coloured += bool(((spread > _SPREAD) & shown).mean() > _COLOURED)
        if channels == 4:
            self._transparent += int(part[..., 3].min()) < 255
            self._brightness += float((part[..., :3].mean(axis=2) * part[..., 3]).sum())
            self._opacity += float(part[..., 3].sum())
        return name

    def _add_numbers(self, pixels: Pixels) -> None:
        values = pixels[np.isfinite(pixels)] if pixels.dtype.kind == "f" else pixels
        self._whole &= pixels.dtype.kind != "f" or bool((values == values.round()).all())
        self._coloured += pixels.shape[2] > 1
        self._transparent += pixels.shape[2] == 4
        if values.size:
            low, high = np.quantile(values, [_EXTREME, 1 - _EXTREME])
            self._spans.append((float(values.min()), float(low), float(high), float(values.max())))

    def choose(self, wanted: DataConfig, sample: Iterable[Pixels]) -> tuple[Look, list[str]]:
        """Choose the set's look, and explain it in lines. Raises `UsageError` if images are too large for a model."""
        span, notes = self._choose_range(wanted)
        art = 2 * self._art > len(self._seen) and not self._spans
        (height, width), enlarged = self._choose_size(wanted, art)
        notes += enlarged
        given = wanted.model_dump(include={"fit", "ground", "tile"}, exclude_none=True)
        exact = self._colours is not None and not self._spans
        grey = not self._coloured and not self._transparent
        indexed = wanted.colours is not None or (wanted.channels is None and not grey and (exact or art))
        channels = wanted.channels or (4 if self._transparent else 1 if grey else 3)
        size: dict[str, Any] = {"height": height, "width": width}
        where = f"--image-size {format_sides((height, width))}"
        if indexed:
            palette, note = self._choose_palette(wanted.colours, span, sample)
            notes.append(note)
            size |= {"levels": len(palette), "palette": palette}
        else:
            size |= {"channels": channels}
        look = Look(parse_config(ImageShape, size, where), range=span, smooth=not art, **given)
        if self._transparent and not look.keeps_opacity and look.ground is None:
            ground = "#000000" if self._brightness > 127 * self._opacity else "#ffffff"
            look = Look(look.shape, look.fit, ground, span, look.smooth, look.tile)
        if self._transparent and not look.keeps_opacity:
            notes.append(f"{count_words(self._transparent, 'picture')} with transparent parts put on {look.ground}")
        kind = "one value a pixel" if indexed else {1: "grey", 3: "RGB", 4: "RGB with opacity"}[channels]
        never = ", pixel art, which is never smoothed" if art else ""
        return look, [f"images of {height} x {width}, {kind}, T = {look.shape.positions:,}{never}", *notes]

    def _choose_range(self, wanted: DataConfig) -> tuple[tuple[float, float] | None, list[str]]:
        if not self._spans:
            unused = "--range is not used: no picture has 16 bits or floating-point numbers"
            return None, [] if wanted.range is None else [unused]
        if wanted.range is not None:
            return wanted.range, []
        lowest, low, high, highest = np.array(self._spans).T
        span = float(lowest.min()), float(highest.max())
        inner = float(low.min()), float(high.max())
        note = ""
        if not self._whole and span[0] >= 0 and 0.25 < span[1] <= 1:
            span = 0.0, 1.0
        elif self._whole and span[0] >= 0 and 128 < span[1] <= 255:
            span = 0.0, 255.0
        elif self._whole and span[1] - span[0] <= 255:
            span = span[0], span[0] + 255
        elif 2 * (inner[1] - inner[0]) < span[1] - span[0] and inner[1] > inner[0]:
            note, span = f" (found {span[0]:g} to {span[1]:g}; extremes are clipped)", inner
        elif self._whole and 0 <= span[0] < 655 and 60_000 < span[1] <= 65_535:
            span = 0.0, 65_535.0
        if span[1] == span[0]:
            span = span[0], span[0] + 1
        return span, [f"numbers from {span[0]:g} (black) to {span[1]:g} (white){note}; --range LO,HI changes this"]

    def _choose_size(self, wanted: DataConfig, art: bool) -> tuple[tuple[int, int], list[str]]:
        if wanted.image_size is not None:
            return wanted.image_size, []
        sizes: Counter[tuple[int, int]] = Counter()
        enlarged: Counter[int] = Counter()
        for (height, width), count in self.sizes.items():
            block = self._blocks[height, width] if art else 1
            sizes[height // block, width // block] += count
            enlarged[block] += count
        del enlarged[1]
        (size, count), *_ = sizes.most_common(1) or [((DEFAULT_SIDE, DEFAULT_SIDE), 0)]
        if 2 * count < sizes.total():  # there is no usual size
            if not art:
                return (DEFAULT_SIDE, DEFAULT_SIDE), []
            sides = np.array(list(sizes.elements()))
            size = tuple(int(side) for side in np.quantile(sides, 0.95, axis=0, method="nearest"))  # type: ignore[assignment]
        if max(size) > _LARGEST_SIDE:
            height, width = (max(1, round(side * DEFAULT_SIDE / max(size))) for side in size)
            return (height, width), []
        blocks = ", ".join(f"{block} x {block}" for block in sorted(enlarged))
        many = count_words(enlarged.total(), "picture")
        return size, [f"{many} of enlarged pixel art: a block of {blocks} becomes one pixel"] if enlarged else []

    def _choose_palette(
        self, most: int | None, span: tuple[float, float] | None, sample: Iterable[Pixels]
    ) -> tuple[list[str], str]:
        if self._colours is not None and not self._spans and len(self._colours) <= (most or _MOST_COLOURS):
            chosen, error = unpack_colours(self._colours), 0.0
        else:
            seen = np.concatenate([_sample_pixels(pixels, span) for pixels in sample])
            has_clear = bool((seen[:, 3] < 128).any())
            opaque = seen[seen[:, 3] >= 128]
            opaque = opaque[:: -(-len(opaque) // _MOST_PIXELS) or 1]
            for count in [most] if most else _PALETTES:
                chosen = _join_colours(opaque[:, :3], max(1, count - has_clear))
                error = _measure_error(opaque, chosen)
                if error <= _SMALL_ERROR:
                    break
            if has_clear:
                chosen = np.concatenate([np.zeros((1, 4), np.uint8), chosen])
        if len(chosen) == 1:  # a value has at least two levels
            chosen = np.concatenate([chosen, 255 - chosen | np.array([0, 0, 0, 255], np.uint8)])
        # Transparent first, then from dark to light.
        brightness = chosen[:, :3] @ np.array([299, 587, 114]) + 1000 * chosen[:, 3].astype(np.int64)
        chosen = chosen[np.lexsort((brightness, chosen[:, 3] > 0))]
        names = [name_colour(colour) for colour in chosen]
        clear = " and 'transparent'" if names[0] == "#00000000" else ""
        exactly = f"mean error {error:.1f} of 255; --colours N changes it" if error else "exact"
        return names, f"a palette of {count_words(len(names) - bool(clear), 'colour')}{clear} ({exactly})"


def describe_sizes(sizes: Mapping[tuple[int, int], int], look: Look) -> list[str]:
    """Return lines about the sizes (height x width) of pictures, and about what becomes of those that do not fit."""
    shape, total = look.shape, sum(sizes.values())
    common = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{count:,} of {height} x {width}" for (height, width), count in common[:3]]
    if len(common) > 3:
        shown.append(f"{total - sum(count for _, count in common[:3]):,} of {len(common) - 3} other sizes")
    lines = [f"{count_words(total, 'picture')} (height x width): {', '.join(shown)}"]
    changed: Counter[str] = Counter()
    for (height, width), count in sizes.items():
        if (height, width) == (shape.height, shape.width):
            continue
        turned = height * shape.width != width * shape.height
        if look.smooth:
            changed["resized"] += count
            changed[{"crop": "cropped", "pad": "padded", "stretch": "stretched"}[look.fit]] += turned * count
        elif look.fit == "stretch":
            changed["stretched"] += count
        else:
            larger = height > shape.height or width > shape.width
            reduced = look.fit == "pad" or (height >= 2 * shape.height and width >= 2 * shape.width)
            changed["reduced by leaving out pixels" if reduced else "cropped"] += larger * count
            changed["padded"] += (height < shape.height or width < shape.width) * count
    if changed.total():
        parts = ", ".join(f"{count:,} {what}" for what, count in changed.items() if count)
        height, width = (max(sides) for sides in zip(*sizes, strict=True))
        small = (height, width) != (shape.height, shape.width) and max(height, width) <= _LARGEST_SIDE
        whole = f"--image-size {format_sides((height, width))} --fit pad keeps them whole"
        hint = whole if small else "--image-size and --fit change this"
        lines.append(f"{parts} to {shape.height} x {shape.width}; {hint}")
    return lines


def sample_evenly(items: Any) -> Any:
    return items[:: -(-len(items) // _SAMPLE_PICTURES) or 1]


def _measure_block(packed: NDArray[np.uint32]) -> int:
    """Measure the side of squares of one colour that form a picture [H, W]: above 1 for enlarged pixel art."""
    edges = list(packed.shape)
    for axis in (0, 1):
        edges += (np.flatnonzero(np.diff(packed, axis=axis).any(axis=1 - axis)) + 1).tolist()
    return math.gcd(*edges)


def _sample_pixels(pixels: Pixels, span: tuple[float, float] | None) -> NDArray[np.uint8]:
    """Some pixels of a picture, uint8 [n, 4]."""
    step = max(1, int((pixels.shape[0] * pixels.shape[1] / _SAMPLE_PIXELS) ** 0.5))
    part = pixels[::step, ::step]
    part = part if part.dtype == np.uint8 else scale_numbers(part, span)
    return unpack_colours(pack_colours(part)).reshape(-1, 4)


def _join_colours(pixels: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """Up to `count` opaque colours, uint8 [n, 4], for pixels [n, 3]: median cut, then k-means."""
    if not len(pixels):
        return np.array([[0, 0, 0, 255]], np.uint8)
    width = min(len(pixels), 1024)
    rows = Image.fromarray(np.ascontiguousarray(pixels[: len(pixels) // width * width]).reshape(-1, width, 3))
    found = rows.quantize(count, Image.Quantize.MEDIANCUT, kmeans=2).convert("RGB")
    return unpack_colours(np.unique(pack_colours(np.asarray(found))))


def _measure_error(pixels: NDArray[np.uint8], colours: NDArray[np.uint8]) -> float:
    """Return the mean absolute difference of opaque pixels [n, 4] from their colours, over red, green and blue."""
    if not len(pixels):
        return 0.0
    if len(colours) > 1:
        shape = ImageShape(height=1, width=1, levels=len(colours), palette=tuple(map(name_colour, colours)))
        colours = colours[find_colours(pixels[None], shape)[0]]
    return float(abs(pixels[:, :3].astype(int) - colours[:, :3]).mean())
