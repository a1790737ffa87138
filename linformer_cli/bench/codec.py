"""`lintx bench codec`: sizes and speeds of compressed images, beside general formats and published figures."""

import gzip
import importlib.util
import io
import lzma
import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from linformer_cli.codec.baselines import measure_zstd
from linformer_cli.codec.coder import Coder, identify_program
from linformer_cli.codec.header import Header
from linformer_cli.codec.pack import Packed, PackedFile, encode_values, write_packed
from linformer_cli.codec.sources import ArraySource
from linformer_cli.data.sequence import images_to_values, paint, values_to_images
from linformer_cli.errors import DisagreementError, Interrupted
from linformer_cli.evaluation.bits import stepped_nats
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.report.grids import render_grid, stack_rows
from linformer_cli.report.tables import Ending, Output, RecordTable, Report, Shown, TableStyle, list_columns
from linformer_cli.sampling.decode import Sampler
from linformer_cli.sampling.engines import NATIVE, EngineCache
from linformer_cli.system.signals import Check, never_stop
from linformer_cli.system.timing import Timing, compare_turns
from linformer_cli.units import format_percent
from .published import PUBLISHED_SIZES, PublishedSize
from .quality import Labels, Pixels
from .rows import Quartiles


@dataclass(frozen=True)
class CodecSettings:
    """`images` images are coded, `batch` at once. Speeds are medians over `repeats` interleaved rounds."""

    images: int
    batch: int
    repeats: int
    block: int
    together: str = "gzip, xz and zstd compress the pixels of all images together; pictures are one file each"


@dataclass(frozen=True, kw_only=True)
class CodecRow:
    """One format. Speeds are in images per second. A share is a speed relative to drawing images."""

    name: Annotated[str, Shown("format", names=True)]
    bytes: Annotated[int | None, Shown("bytes", ",")]
    bits_per_dim: Annotated[float | None, Shown("bits/dim", ".4f")]
    encoded_per_second: Annotated[float | None, Shown("encoded", ".3g", "images/s")] = None
    encoded_quartiles: Quartiles | None = None
    decoded_per_second: Annotated[float | None, Shown("decoded", ".3g", "images/s")] = None
    decoded_quartiles: Quartiles | None = None
    encoding_share: Annotated[float | None, Shown("encoding / drawing", format_percent)] = None
    decoding_share: Annotated[float | None, Shown("decoding / drawing", format_percent)] = None
    left_out: Annotated[str | None, Shown("left out")] = None


@dataclass(frozen=True, kw_only=True)
class CodecReport(Report):
    rows: Sequence[CodecRow]
    published: Sequence[PublishedSize]
    model_bits_per_dim: float | None
    drawn_per_second: float | None
    drawn_quartiles: Quartiles | None
    ended: Ending
    settings: CodecSettings

    def show(self, style: TableStyle) -> Output:
        published = RecordTable(self.published, list_columns(PublishedSize))
        bits, drawn = self.model_bits_per_dim, self.drawn_per_second
        known = bits is not None and drawn is not None
        own = [f"the model's own {bits:.4f} bits/dim; drawing: {drawn:.3g} images/s"] if known else []
        return Output([RecordTable(self.rows, list_columns(CodecRow)), published], remarks=own)


@dataclass
class Format:
    """A way of storing images uint8 [N, H, W, C], its size, and the seconds for each image in every round."""

    name: str
    encode: Callable[[Pixels], Sequence[bytes]]
    decode: Callable[[Sequence[bytes], tuple[int, ...]], Pixels]
    size: int = 0
    encoded: list[float] = field(default_factory=list)
    decoded: list[float] = field(default_factory=list)

    def measure(self, images: Pixels) -> None:
        """Add a round. Raises `DisagreementError` if the format does not give the same pixels back."""
        began = time.perf_counter()
        files = self.encode(images)
        stored = time.perf_counter()
        found = self.decode(files, images.shape)
        read = time.perf_counter()
        if not np.array_equal(found, images):
            raise DisagreementError(f"{self.name} does not give the same pixels back")
        self.size = sum(map(len, files))
        self.encoded.append((stored - began) / len(images))
        self.decoded.append((read - stored) / len(images))

    def row(self, images: Pixels, drawn: Sequence[float] = ()) -> CodecRow:
        """Return the row of the rounds so far, compared with the seconds `drawn` for drawing an image, if any."""
        speeds: dict[str, Any] = {}
        for key, samples in (("encod", self.encoded), ("decod", self.decoded)):
            timing = Timing(samples)
            speeds |= {f"{key}ed_per_second": timing.rate(1), f"{key}ed_quartiles": timing.rate_quartiles(1)}
            if drawn:
                speeds[f"{key}ing_share"] = compare_turns(timing.rate(1), samples, Timing(drawn).rate(1), drawn)
        return _size_row(self.name, self.size, images, **speeds)


def _size_row(name: str, size: int | None, images: Pixels, **more: Any) -> CodecRow:
    bits = None if size is None else 8 * size / images.size
    return CodecRow(name=name, bytes=size, bits_per_dim=bits, **more)


def _picture_format(name: str, kind: str, **options: Any) -> Format:
    """Return a format of Pillow, with one file for each image."""

    def encode(image: Pixels) -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(buffer, kind, **options)
        return buffer.getvalue()

    def decode(files: Sequence[bytes], shape: tuple[int, ...]) -> Pixels:
        mode = "L" if shape[3] == 1 else "RGB"
        return np.stack([np.asarray(Image.open(io.BytesIO(file)).convert(mode)) for file in files]).reshape(shape)

    return Format(name, lambda images: [encode(image) for image in images], decode)


def _stream_format(name: str, compress: Callable[[bytes], bytes], expand: Callable[[bytes], bytes]) -> Format:
    """Return a general compressor over the raw pixels of all images together."""
    return Format(
        name,
        lambda images: [compress(images.tobytes())],
        lambda files, shape: np.frombuffer(expand(files[0]), dtype=np.uint8).reshape(shape),
    )


class _OwnFormat:
    def __init__(self, model: PixelModel, labels: Labels | None, settings: CodecSettings, check: Check):
        self._coder, self._settings, self._labels = Coder(model, check), settings, labels
        self._program = identify_program(model)
        self.packed: Packed | None = None

    def encode(self, images: Pixels) -> Sequence[bytes]:
        source, file = ArraySource(images, self._labels, self._coder.model.config.image), io.BytesIO()
        header = Header(self._program, "", source.contents, self._settings.block, ())
        self.packed = write_packed(file, header, source, self._coder, self._settings.batch, lambda done: None)
        return [file.getvalue()]

    def decode(self, files: Sequence[bytes], shape: tuple[int, ...]) -> Pixels:
        packed = PackedFile(io.BytesIO(files[0]))
        blocks = packed.read_blocks(self._coder, self._settings.batch, lambda done: None)
        values = b"".join(encode_values(block.values) for block in blocks)
        found = torch.frombuffer(bytearray(values), dtype=torch.uint8).reshape(shape[0], -1)
        return values_to_images(found, packed.header.contents.tiling.shape)


def list_formats() -> list[Format]:
    """List the formats of other programs that are available here."""
    webp = _picture_format("WebP, lossless", "WEBP", lossless=True, quality=100, method=6, exact=True)
    formats = [_picture_format("PNG, optimised", "PNG", optimize=True), webp]
    if importlib.util.find_spec("pillow_jxl") is not None:
        importlib.import_module("pillow_jxl")
        formats.append(_picture_format("JPEG XL, lossless", "JXL", lossless=True, effort=9))
    formats.append(_stream_format("gzip -9", lambda data: zlib.compress(data, 9, wbits=31), gzip.decompress))
    strongest = 9 | lzma.PRESET_EXTREME
    formats.append(_stream_format("xz -9e", lambda data: lzma.compress(data, preset=strongest), lzma.decompress))
    return formats


def run_codec_bench(
    model: PixelModel,
    name: str,
    images: Pixels,
    labels: Labels | None,
    settings: CodecSettings,
    check: Check = never_stop,
) -> CodecReport:
    """Store and read `images` uint8 [N, H, W, C] of data set `name` in every format, until `check` raises."""
    own = _OwnFormat(model, labels, settings, check)
    first = Format("lintx", own.encode, own.decode)
    formats = [first, *list_formats()]
    sampler, drawn = Sampler(model, engine=NATIVE, products=torch.int8), list[float]()
    ended: Ending = "finished"
    try:
        for number in range(settings.repeats):
            for one in formats:
                check()
                one.measure(images)
            indices = range(number * settings.batch, (number + 1) * settings.batch)
            # A check in every step, as in coding.
            drawn.append(sampler.sample(indices, before_step=check).seconds / len(indices))
    except Interrupted:
        ended = "interrupted"

    rows = [_size_row("raw pixels", images.nbytes, images)]
    rows += [one.row(images, drawn if one is first else ()) for one in formats if one.decoded]
    if ended == "finished":
        zstd = measure_zstd(lambda: [images.tobytes()])
        rows.append(_size_row("zstd -19", zstd, images, left_out=None if zstd else "zstd is not installed"))
    if importlib.util.find_spec("pillow_jxl") is None:
        why = "the package pillow-jxl-plugin is not installed"
        rows.append(_size_row("JPEG XL, lossless", None, images, left_out=why))
    return CodecReport(
        rows=rows,
        published=PUBLISHED_SIZES.get(name, ()),
        model_bits_per_dim=own.packed.own_bits_per_dim if own.packed else None,
        drawn_per_second=Timing(drawn).rate(1) if drawn else None,
        drawn_quartiles=Timing(drawn).rate_quartiles(1) if drawn else None,
        ended=ended,
        settings=settings,
    )


def draw_bits(model: PixelModel, images: Pixels, labels: Labels | None) -> Image.Image:
    """Draw images [N, H, W, C] and the bits of each pixel, given the classes `labels` [N] if any."""
    shape, given = model.config.image, None if labels is None else torch.from_numpy(labels)
    nats = stepped_nats(EngineCache(NATIVE, model, products=torch.int8), images_to_values(images, shape), given)
    return render_bits(paint(images, shape), nats.double().numpy().reshape(images.shape) / math.log(2))


def render_bits(images: NDArray[np.uint8], bits: NDArray[np.float64], scale: int | None = None) -> Image.Image:
    """Return images [N, H, W, C] in a row, above the bits of their pixels: black is 0, white the 99.5th percentile."""
    by_pixel = bits.sum(axis=3, keepdims=True)
    most = max(float(np.quantile(by_pixel, 0.995)), 1e-9)
    maps = (by_pixel / most * 255).clip(0, 255).round().astype(np.uint8)
    return stack_rows([render_grid(each, columns=len(each), scale=scale) for each in (images, maps)], gap=2)
