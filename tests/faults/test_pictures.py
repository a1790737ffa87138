"""Tests at least forty kinds of files in `lintx complete`: images are completed, other files give a one-line error."""

import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cli.conftest import run_main
from loops import first_fast
from PIL import Image

from linformer_cli.checkpoint import save_checkpoint

RANDOM = np.random.default_rng(0)


def noise(*size: int) -> np.ndarray:
    return RANDOM.integers(0, 256, size, dtype=np.uint8)


def picture(mode: str = "RGB", width: int = 20, height: int = 12) -> Image.Image:
    return Image.fromarray(noise(height, width, 4)).convert(mode)


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(picture(), "JPEG", exif=exif)


def frames(kind: str, **options: object) -> bytes:
    return encode(picture(), kind, save_all=True, append_images=[picture(), picture()], **options)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def claim(width: int, height: int) -> bytes:
    """Build a PNG whose header claims this size."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def palette_with_transparency() -> bytes:
    return encode(picture("RGB").quantize(8), "PNG", transparency=3)


def pixel_of_transparency() -> bytes:
    """A large picture, in whose image the transparent pixel disappears."""
    opacity = np.full((400, 600), 255, np.uint8)
    opacity[7, 9] = 0
    return encode(Image.merge("LA", (picture("L", 600, 400), Image.fromarray(opacity))), "PNG")


GOOD: dict[str, Callable[[], bytes]] = {
    "grey.png": lambda: encode(picture("L"), "PNG"),
    "one-bit.png": lambda: encode(picture("1"), "PNG"),
    "sixteen-bit.png": lambda: encode(Image.fromarray(noise(9, 9).astype(np.uint16) * 257), "PNG"),
    "palette.png": lambda: encode(picture("P"), "PNG"),
    "palette-transparent.png": palette_with_transparency,
    "grey-alpha.png": lambda: encode(picture("LA"), "PNG"),
    "colour.png": lambda: encode(picture("RGB"), "PNG"),
    "alpha.png": lambda: encode(picture("RGBA"), "PNG"),
    "one-transparent-pixel.png": pixel_of_transparency,
    "all-transparent.png": lambda: encode(Image.new("RGBA", (9, 9)), "PNG"),
    "tall.png": lambda: encode(picture("L", 1, 5000), "PNG"),
    "wide.png": lambda: encode(picture("L", 5000, 1), "PNG"),
    "one-pixel.png": lambda: encode(picture("L", 1, 1), "PNG"),
    "large.png": lambda: encode(Image.new("L", (4000, 3000), 90), "PNG"),
    "rubbish-behind.png": lambda: encode(picture("L"), "PNG") + b"rubbish" * 99,
    "animated.png": lambda: frames("PNG"),
    "grey.jpg": lambda: encode(picture("L"), "JPEG"),
    "colour.jpg": lambda: encode(picture(), "JPEG"),
    "inks.jpg": lambda: encode(picture("CMYK"), "JPEG"),
    "progressive.jpg": lambda: encode(picture(), "JPEG", progressive=True),
    **{f"turned-{way}.jpg": (lambda way=way: turned(way)) for way in range(1, 9)},
    "odd-turn.jpg": lambda: turned(77),
    "still.gif": lambda: encode(picture("P"), "GIF"),
    "animated.gif": lambda: frames("GIF"),
    "lossy.webp": lambda: encode(picture(), "WEBP"),
    "lossless.webp": lambda: encode(picture("RGBA"), "WEBP", lossless=True),
    "animated.webp": lambda: frames("WEBP"),
    "colour.bmp": lambda: encode(picture(), "BMP"),
    "grey.bmp": lambda: encode(picture("L"), "BMP"),
    "colour.tiff": lambda: encode(picture(), "TIFF"),
    "packed.tiff": lambda: encode(picture(), "TIFF", compression="tiff_lzw"),
    "sixteen-bit.tiff": lambda: encode(Image.fromarray(noise(9, 9).astype(np.uint16) * 200), "TIFF"),
    "thirty-two-bit.tiff": lambda: encode(Image.fromarray(noise(9, 9).astype(np.int32) * 70_000), "TIFF"),
    "float.tiff": lambda: encode(Image.fromarray(noise(9, 9).astype(np.float32) / 255), "TIFF"),
    "inks.tiff": lambda: encode(picture("CMYK"), "TIFF"),
    "lab.tiff": lambda: encode(Image.new("LAB", (9, 9)), "TIFF"),
    "pages.tiff": lambda: frames("TIFF"),
    "icon.ico": lambda: encode(picture("RGBA", 32, 32), "ICO"),
    "colour.ppm": lambda: encode(picture(), "PPM"),
    "grey.pgm": lambda: encode(picture("L"), "PPM"),
    "one-bit.pbm": lambda: encode(picture("1"), "PPM"),
    "colour.tga": lambda: encode(picture(), "TGA"),
    "colour.pcx": lambda: encode(picture(), "PCX"),
    "colour.sgi": lambda: encode(picture(), "SGI"),
    "one-bit.xbm": lambda: encode(picture("1"), "XBM"),
    "colour.dds": lambda: encode(picture(), "DDS"),
    "a.png that is a.jpg": lambda: encode(picture(), "JPEG"),
    "no-ending": lambda: encode(picture(), "PNG"),
    "näme with späces 画.png": lambda: encode(picture(), "PNG"),
}
MANY_FRAMES = {"animated.png", "animated.gif", "animated.webp", "pages.tiff"}
BAD: dict[str, Callable[[], bytes]] = {
    "empty.png": lambda: b"",
    "text.png": lambda: b"I am not a picture.\n",
    "page.jpg": lambda: b"<!doctype html><title>404</title>",
    "drawing.svg": lambda: b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
    "half.png": lambda: (data := encode(picture(), "PNG"))[: len(data) // 2],
    "start.jpg": lambda: encode(picture(), "JPEG")[:40],
    "start.gif": lambda: encode(picture("P"), "GIF")[:12],
    "start.webp": lambda: encode(picture(), "WEBP")[:30],
    "start.tiff": lambda: encode(picture(), "TIFF")[:9],
    "no-width.png": lambda: claim(0, 5),
    "no-height.png": lambda: claim(5, 0),
    "no-pixels.png": lambda: claim(5, 5),
    "bomb.png": lambda: claim(60_000, 60_000),
    "smaller-bomb.png": lambda: claim(10_000, 10_000),
    "wrong-sum.png": lambda: encode(picture(), "PNG").replace(b"IHDR", b"IHDX"),
    "array.npy": lambda: b"\x93NUMPY\x01\x00v\x00{'descr': '|u1'}",
    "document.pdf": lambda: b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n",
    "zeros.png": lambda: bytes(5000),
}


def test_there_are_at_least_forty_kinds() -> None:
    assert len(GOOD) + len(BAD) >= 40


@pytest.mark.parametrize("fit", first_fast(["crop", "pad", "stretch"]))
def test_valid_pictures_are_completed_and_all_others_give_one_error_each(
    tmp_path: Path, build_tiny_model, tiny_info, capsys, fit
):
    save_checkpoint(tmp_path / "model", build_tiny_model(), tiny_info)
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, build in (GOOD | BAD).items():
        (folder / name).write_bytes(build())
    bad = {*BAD, "missing.png", "a-folder", "a-pipe", "a-circle"}
    (folder / "a-folder").mkdir()
    os.mkfifo(folder / "a-pipe")
    (folder / "a-circle").symlink_to(folder / "a-circle")
    names = [*GOOD, *sorted(bad)]
    RANDOM.shuffle(names)
    outcome = run_main(
        ("complete", *(folder / name for name in names), "--checkpoint", tmp_path / "model", "-n", "1", "--fit", fit)
        + ("-o", tmp_path / "out.png", "--json"),
        capsys,
    )
    assert outcome.code == 1
    assert "Traceback" not in outcome.stderr
    document = outcome.document
    done = {Path(row["image"]).name: row for row in document["rows"]}
    failed = {Path(row["image"]).name: row["error"] for row in document["failures"]}
    assert {*done} == {*GOOD}
    assert {*failed} == bad
    errors = [line for line in outcome.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == len(bad) + 1 and all(len(error) < 500 for error in errors)
    assert f"{len(bad)} of {len(names)} images could not be read" in errors[-1]
    for name, error in failed.items():
        assert name in error and "\n" not in error
    for name, row in done.items():
        assert any("frames; only the first is used" in note for note in row["notes"]) == (name in MANY_FRAMES), name
    with Image.open(tmp_path / "out.png") as written:
        assert written.height > len(GOOD) * 8
    print(f"{len(GOOD)} kinds completed, {len(bad)} refused with a line each, --fit {fit}")
