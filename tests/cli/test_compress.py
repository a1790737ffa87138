"""Tests of `lintx compress` and `lintx decompress` with tiny models."""

import io
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from commands import Command, run_command
from loops import loop_over
from machine import needs_library
from PIL import Image

from linformer_cli.checkpoint import load_model, save_checkpoint
from linformer_cli.codec import baselines
from linformer_cli.codec.coder import Coder
from linformer_cli.codec.header import encode_header
from linformer_cli.codec.items import Contents, Tiling
from linformer_cli.codec.pack import PackedFile
from linformer_cli.config import ImageShape
from linformer_cli.errors import DataError
from linformer_cli.sampling.decode import Sampler

pytest.importorskip("constriction")
pytestmark = needs_library


@pytest.fixture(scope="module")
def build_checkpoint(build_tiny_model, tiny_info, tmp_path_factory):
    """Provides `build_checkpoint(name, data, **changes)`, a checkpoint folder of a tiny model."""

    def build(name: str, data: str = "glyphs", **changes: object) -> Path:
        folder = tmp_path_factory.mktemp("models") / name
        model = build_tiny_model(**changes)
        data_summary = tiny_info.data.model_copy(update={"name": data})
        save_checkpoint(folder, model, tiny_info.model_copy(update={"model": model.config, "data": data_summary}))
        return folder

    return build


@pytest.fixture(scope="module")
def grey(build_checkpoint) -> Path:
    return build_checkpoint("grey", image=ImageShape(height=8, width=8))


@pytest.fixture(scope="module")
def colour(build_checkpoint) -> Path:
    return build_checkpoint("colour", image=ImageShape(height=4, width=4, channels=3))


@pytest.fixture(scope="module")
def text(build_checkpoint) -> Path:
    image = ImageShape(height=1, width=16)
    return build_checkpoint("text", "bytes:book", image=image, embedding="none", context="recent")


def draw(path: Path, size: tuple[int, int], mode: str = "L", seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    bands = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], bands), dtype=np.uint8)
    Image.fromarray(pixels[:, :, 0] if bands == 1 else pixels).save(path)


def pixels_of(folder: Path) -> dict[str, tuple[str, bytes]]:
    found = {}
    for path in sorted(folder.rglob("*.png")):
        with Image.open(path) as picture:
            found[path.relative_to(folder).as_posix()] = picture.mode, np.asarray(picture).tobytes()
    return found


def draw_typical(checkpoint: Path, count: int) -> np.ndarray:
    """Images that the model finds likely, uint8 [count, H, W, C]. Random pixels would be deflated."""
    return Sampler(load_model(checkpoint), engine="native", products=torch.int8).sample_images(count)


@pytest.fixture
def folder(grey, tmp_path: Path) -> Path:
    (tmp_path / "in" / "a").mkdir(parents=True)
    for name, image in zip(("b.png", "a/ä 1.png", "a/2.png", "z.png"), draw_typical(grey, 4), strict=True):
        Image.fromarray(image[:, :, 0]).save(tmp_path / "in" / name)
    return tmp_path / "in"


@pytest.mark.smoke
def test_a_folder_comes_back(lintx, grey, folder, tmp_path) -> None:
    (folder / "notes.txt").write_text("no picture")
    (folder / ".hidden.png").write_text("hidden")
    found = lintx("compress", folder, "-o", tmp_path / "x.lintx", "--checkpoint", grey, "--json")
    assert found.code == 0, found.stderr
    result = found.document
    assert (result["items"], result["verified"], result["values"], result["deflated_blocks"]) == (4, True, 256, 0)
    assert result["bytes"] == (tmp_path / "x.lintx").stat().st_size
    assert result["bits_per_dim"] == pytest.approx(8 * result["bytes"] / 256)
    assert "4 images" in found.stderr and "overhead" in found.stderr
    found = lintx("decompress", tmp_path / "x.lintx", "-o", tmp_path / "out", "--checkpoint", grey)
    assert found.code == 0, found.stderr
    (folder / ".hidden.png").unlink()
    assert pixels_of(tmp_path / "out") == pixels_of(folder)


def test_a_data_set_comes_back_in_order(lintx, build_checkpoint, tmp_path) -> None:
    model = build_checkpoint("classes", image=ImageShape(height=8, width=8), classes=3)
    images, labels = draw_typical(model, 11), np.arange(11) % 3
    for name in ("train", "test"):
        np.save(tmp_path / f"{name}-images.npy", images)
        np.save(tmp_path / f"{name}-labels.npy", labels)
    options = ("--data", f"array:{tmp_path}", "--block", 4, "--batch", 8, "--limit", 10, "--checkpoint", model)
    result = lintx("compress", *options, "-o", tmp_path / "x.lintx", "--json").document
    assert result["deflated_blocks"] == 0
    alone = ("eval", model, "--data", f"array:{tmp_path}", "--split", "test", "--limit", 10, "--engine", "native")
    own = lintx(*alone, "--precision", "int8", "--json").document["bits_per_dim_with_class"]
    assert result["model_bits_per_dim"] == pytest.approx(own, abs=1e-5)
    assert result["overhead_percent"] == pytest.approx(100 * (result["bits_per_dim"] / own - 1), abs=1e-2)
    decompress = ("decompress", tmp_path / "x.lintx", "--checkpoint", model, "--batch")
    for batch in (1, 100):
        out = tmp_path / str(batch)
        assert lintx(*decompress, batch, "-o", out).code == 0
        found = [np.asarray(Image.open(out / f"{index:05d}.png")) for index in range(10)]
        np.testing.assert_array_equal(np.stack(found), images[:10, ..., 0])
        assert len(list(out.iterdir())) == 10


COLOURS = [(0, 0, 0, 0), (255, 128, 0, 255), (16, 32, 48, 255), (16, 32, 48, 128)]


@pytest.fixture(scope="module")
def palette(build_checkpoint) -> Path:
    names = ["#00000000", "#ff8000", "#102030", "#10203080"]
    return build_checkpoint("palette", image=ImageShape(height=8, width=8, levels=4, palette=names))


def indexed(numbers: np.ndarray, colours: list[tuple[int, ...]]) -> Image.Image:
    picture = Image.fromarray(numbers.astype(np.uint8))
    picture.putpalette([band for colour in colours for band in colour[:3]])
    picture.info["transparency"] = bytes(colour[3] for colour in colours)
    return picture


def colours_of(folder: Path) -> dict[str, object]:
    found = {}
    for path in folder.rglob("*.png"):
        with Image.open(path) as picture:
            palette = picture.getpalette(), picture.info.get("transparency")
            found[path.name] = picture.mode, np.asarray(picture).tolist(), palette
    return found


def test_pictures_of_a_palette_come_back_with_their_own(lintx, palette, tmp_path) -> None:
    numbers = draw_typical(palette, 4)[..., 0]
    folder = tmp_path / "in"
    folder.mkdir()
    indexed(numbers[0], COLOURS).save(folder / "model.png")
    # With colours that the model lacks and no pixel has, and a colour under the transparent pixels.
    own = [(1, 2, 3, 255), *reversed(COLOURS[1:]), (71, 108, 108, 0), (4, 5, 6, 7)]
    indexed(4 - numbers[1], own).save(folder / "own.png")
    under = np.array([own[4], *COLOURS[1:]], np.uint8)[numbers[1]]
    Image.fromarray(under).save(folder / "under.png")
    Image.fromarray(np.array(COLOURS, np.uint8)[numbers[2]]).save(folder / "rgba.png")
    Image.fromarray(np.array(COLOURS, np.uint8)[1 + numbers[3] % 2, :3]).save(folder / "rgb.png")
    Image.fromarray(np.array(COLOURS, np.uint8)[np.tile(numbers[0], (2, 2))[:9, :11]]).save(tmp_path / "large.png")
    for sources, options in (([folder], ()), ([folder, tmp_path / "large.png"], ("--tile",))):
        command = ("compress", *sources, "-o", tmp_path / "x.lintz", "--checkpoint", palette, "--json", "--force")
        found = lintx(*command, *options)
        assert found.code == 0, found.stderr
        assert found.document["values"] == 5 * 64 + (99 if options else 0)
        decompress = ("decompress", tmp_path / "x.lintz", "-o", tmp_path / "out", "--checkpoint", palette, "--force")
        assert lintx(*decompress).code == 0
        if options:
            (folder / "large.png").write_bytes((tmp_path / "large.png").read_bytes())
        assert colours_of(tmp_path / "out") == colours_of(folder)


def test_colours_that_a_palette_lacks_are_refused(lintx, palette, tmp_path) -> None:
    faults = {
        "has the colour #010203, which": Image.new("RGB", (8, 8), (1, 2, 3)),
        "several colours under": Image.fromarray(
            np.arange(256, dtype=np.uint8).reshape(8, 8, 4) * np.array([1, 1, 1, 0], np.uint8)
        ),
        "two numbers for one colour": indexed(np.arange(64).reshape(8, 8) % 2, [COLOURS[1], COLOURS[1]]),
        "in mode L, not in a palette or RGB": Image.new("L", (8, 8)),
        "8 x 9, not 8 x 8": Image.new("RGBA", (8, 9)),
    }
    for reason, picture in faults.items():
        picture.save(tmp_path / "odd.png")
        found = lintx("compress", tmp_path / "odd.png", "-o", tmp_path / "x.lintz", "--checkpoint", palette)
        assert found.code == 1 and reason in found.stderr, found.stderr
        assert not (tmp_path / "x.lintz").exists()


def test_pictures_with_alpha_come_back(lintx, build_checkpoint, tmp_path) -> None:
    model = build_checkpoint("alpha", image=ImageShape(height=4, width=4, channels=4))
    for number, image in enumerate(draw_typical(model, 3)):
        (tmp_path / "in").mkdir(exist_ok=True)
        Image.fromarray(image).save(tmp_path / "in" / f"{number}.png")
    assert lintx("compress", tmp_path / "in", "-o", tmp_path / "x.lintz", "--checkpoint", model).code == 0
    assert lintx("decompress", tmp_path / "x.lintz", "-o", tmp_path / "out", "--checkpoint", model).code == 0
    assert pixels_of(tmp_path / "out") == pixels_of(tmp_path / "in")


def test_a_class_is_needed_for_pictures_of_a_model_with_classes(lintx, build_checkpoint, folder, tmp_path) -> None:
    model = build_checkpoint("labels", image=ImageShape(height=8, width=8), classes=3)
    command = ("compress", folder, "-o", tmp_path / "x.lintx", "--checkpoint", model)
    assert lintx(*command).code == 2
    assert lintx(*command, "--class", "2").code == 0
    assert lintx("decompress", tmp_path / "x.lintx", "-o", tmp_path / "out", "--checkpoint", model).code == 0
    assert pixels_of(tmp_path / "out") == pixels_of(folder)


def test_a_forged_size_is_refused(lintx, grey, folder, tmp_path) -> None:
    file = tmp_path / "x.lintx"
    assert lintx("compress", folder, "-o", file, "--checkpoint", grey).code == 0
    packed = PackedFile(io.BytesIO(file.read_bytes()))
    contents = Contents(Tiling(ImageShape(height=8, width=9), False), (), packed.header.contents.count)
    blocks = file.read_bytes()[len(encode_header(packed.header)) :]
    file.write_bytes(encode_header(replace(packed.header, contents=contents)) + blocks)
    found = lintx("decompress", file, "-o", tmp_path / "out", "--checkpoint", grey)
    assert found.code == 1 and "size of its images is not that of the model" in found.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["grey", "colour"])
def test_tiles_bring_back_pictures_of_any_size_and_bands(lintx, kind, request, tmp_path) -> None:
    model = request.getfixturevalue(kind)
    for index, (mode, size) in enumerate(
        [("LA", (9, 1)), ("L", (20, 9)), ("RGB", (8, 8)), ("RGBA", (1, 13)), ("RGB", (4, 4))]
    ):
        draw(tmp_path / "in" / f"{index}.png", size, mode, index)
    command = ("compress", tmp_path / "in", "-o", tmp_path / "x.lintx", "--checkpoint", model)
    refused = lintx(*command)
    assert refused.code == 1 and "--tile" in refused.stderr and "'0.png'" in refused.stderr
    assert lintx(*command, "--tile", "--block", 3).code == 0
    assert lintx("decompress", tmp_path / "x.lintx", "-o", tmp_path / "out", "--checkpoint", model).code == 0
    assert pixels_of(tmp_path / "out") == pixels_of(tmp_path / "in")


def test_flat_tiles_are_deflated_if_the_model_is_worse(lintx, grey, tmp_path) -> None:
    Image.new("L", (800, 80), 77).save(tmp_path / "flat.png")
    command = ("compress", tmp_path / "flat.png", "--tile", "-o", tmp_path / "x.lintx", "--checkpoint", grey, "--json")
    result = lintx(*command).document
    assert result["deflated_blocks"] == 2 and result["bytes"] < 1000
    assert lintx("decompress", tmp_path / "x.lintx", "-o", tmp_path / "out", "--checkpoint", grey).code == 0
    assert np.asarray(Image.open(tmp_path / "out" / "flat.png")).tolist() == [[77] * 800] * 80


@pytest.mark.parametrize("length", [(), ("--length", 64)])
def test_any_files_come_back_from_a_model_of_bytes(lintx, text, length, tmp_path) -> None:
    files = {"empty": b"", "one": b"x", "sub/even": bytes(range(64)), "odd": b"lintx " * 31 + b"\r\n\0"}
    for name, data in files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    command = ("compress", tmp_path / "in", "-o", tmp_path / "x.lintx", "--checkpoint", text, "--block", 3, *length)
    result = lintx(*command, "--json").document
    assert result["items"] == 4 and result["values"] == sum(map(len, files.values()))
    assert result["rivals"]["gzip"] > 0 and result["rivals"]["xz"] > 0
    assert lintx("decompress", tmp_path / "x.lintx", "-o", tmp_path / "out", "--checkpoint", text).code == 0
    for name, data in files.items():
        assert (tmp_path / "out" / name).read_bytes() == data


@pytest.mark.parametrize("names", [("Read", "read"), ("cafe\u0301", "caf\u00e9")], ids=["case", "accents"])
@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
def test_names_that_are_the_same_on_some_systems_are_refused_there(lintx, text, system, names, tmp_path, monkeypatch):
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_bytes(name.encode())
    lintx("compress", tmp_path / "in", "--checkpoint", text, "-o", tmp_path / "x.lintx")
    monkeypatch.setattr("linformer_cli.codec.restore.sys", SimpleNamespace(platform=system))
    command = ("decompress", tmp_path / "x.lintx", "--checkpoint", text, "-o", tmp_path / "out", "--force")
    result = lintx(*command)
    if system == "linux":
        assert [(tmp_path / "out" / name).read_bytes() for name in names] == [name.encode() for name in names]
    else:
        assert result.code == 2 and f"'{names[0]}' and '{names[1]}' are the same file" in result.stderr


def test_data_go_through_stdin_and_stdout(text) -> None:
    data = b"lintx packs and unpacks" * 20
    code, packed, errors = run_command("compress", "-", "-o", "-", "--checkpoint", text, data=data)
    assert code == 0 and packed.startswith(b"LINTXPAK"), errors
    _, found, errors = run_command("decompress", "-", "-o", "-", "--checkpoint", text, "--batch", 2, data=packed)
    assert found == data, errors


def test_a_picture_goes_through_stdin(lintx, grey, tmp_path, monkeypatch) -> None:
    draw(tmp_path / "a.png", (8, 8))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((tmp_path / "a.png").read_bytes())))
    assert lintx("compress", "-", "-o", tmp_path / "x.lintx", "--checkpoint", grey).code == 0
    assert lintx("decompress", tmp_path / "x.lintx", "-o", tmp_path / "out", "--checkpoint", grey).code == 0
    assert [*pixels_of(tmp_path / "out").values()] == [pixels_of(tmp_path)["a.png"]]


def test_nothing_is_overwritten_without_force(lintx, grey, folder, tmp_path) -> None:
    command = ("compress", folder, "-o", tmp_path / "x.lintx", "--checkpoint", grey)
    decompress = ("decompress", tmp_path / "x.lintx", "-o", tmp_path / "out", "--checkpoint", grey)
    (tmp_path / "x.lintx").write_text("mine")
    refused = lintx(*command)
    assert refused.code == 2 and "--force" in refused.stderr and (tmp_path / "x.lintx").read_text() == "mine"
    assert lintx(*command, "--force").code == 0
    draw(tmp_path / "out" / "z.png", (3, 3))
    before = (tmp_path / "out" / "z.png").read_bytes()
    refused = lintx(*decompress)
    assert refused.code == 2 and "--force" in refused.stderr
    assert (tmp_path / "out" / "z.png").read_bytes() == before and not (tmp_path / "out" / "b.png").exists()
    assert lintx(*decompress, "--force").code == 0
    assert pixels_of(tmp_path / "out") == pixels_of(folder)


def make_deep_colour(path: Path) -> None:
    """A PNG with 16 bits per channel, which Pillow opens with 8 bits."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0)
    rows = zlib.compress(b"".join(b"\0" + bytes(range(48)) for _ in range(8)))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b""))


def make_deep_tiff(path: Path) -> None:
    """A TIFF with 16 bits per channel, which Pillow opens with 8 bits."""
    import struct

    depths, pixels, short, long = 122, 128, 3, 4  # two offsets and two types
    tags = [(256, long, 1, 8), (257, long, 1, 8), (258, short, 3, depths), (259, long, 1, 1), (262, long, 1, 2)]
    tags += [(273, long, 1, pixels), (277, long, 1, 3), (278, long, 1, 8), (279, long, 1, 384)]
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    header = b"II*\0" + struct.pack("<I", 8)
    path.write_bytes(header + directory + struct.pack("<3H", 16, 16, 16) + bytes(range(128)) * 3)


SECOND = Image.new("L", (8, 8), 9)
ROTATED = Image.Exif()
ROTATED[0x0112] = 6
ODD = {
    "palette": lambda path: Image.new("P", (8, 8)).save(path),
    "deep": lambda path: Image.fromarray(np.full((8, 8), 40_000, dtype=np.uint16)).save(path),
    "transparent": lambda path: Image.new("L", (8, 8)).save(path, transparency=0),
    "animated": lambda path: Image.new("L", (8, 8)).save(path, save_all=True, append_images=[SECOND]),
    "rotated": lambda path: Image.new("L", (8, 8)).save(path, exif=ROTATED),
    # Pillow opens these with 8 bits.
    "deep colour": make_deep_colour,
    "deep TIFF": make_deep_tiff,
    "deep PPM": lambda path: path.write_bytes(b"P6 8 8 65535\n" + bytes(range(128)) * 3),
    "deep SGI": lambda path: Image.new("L", (8, 8), 9).save(path, "SGI", bpc=2),
    # Pillow does not tell how many bits a coloured JPEG 2000 has.
    "JPEG 2000": lambda path: Image.new("RGB", (8, 8), (1, 2, 3)).save(path, "JPEG2000"),
}


@loop_over("kind", ODD)
@loop_over("tile", [(), ("--tile",)])
def test_pictures_that_would_not_come_back_are_refused_by_name(lintx, grey, kind, tile, tmp_path) -> None:
    ODD[kind](tmp_path / "odd.png")
    with Image.open(tmp_path / "odd.png") as picture:
        picture.load()  # Pillow can read it
    found = lintx("compress", tmp_path / "odd.png", "-o", tmp_path / "x.lintx", "--checkpoint", grey, *tile)
    assert found.code == 1 and "'odd.png'" in found.stderr and found.stderr.count("Error") == 1
    assert not (tmp_path / "x.lintx").exists()


def test_a_file_replaces_the_target_of_a_link(lintx, text, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("new")
    assert lintx("compress", tmp_path / "a.txt", "-o", tmp_path / "x.lintx", "--checkpoint", text).code == 0
    (tmp_path / "out").mkdir()
    (tmp_path / "b.txt").write_text("old")
    (tmp_path / "out" / "a.txt").symlink_to(tmp_path / "b.txt")
    command = ("decompress", tmp_path / "x.lintx", "-o", tmp_path / "out", "--checkpoint", text, "--force")
    assert lintx(*command).code == 0
    assert (tmp_path / "b.txt").read_text() == "new" and (tmp_path / "out" / "a.txt").is_symlink()


def test_a_compressor_that_fails_has_no_size(monkeypatch, tmp_path) -> None:
    def find(name: str) -> ModuleType:
        raise ImportError(name)

    failing = tmp_path / "zstd"
    failing.write_text("#!/bin/sh\nexit 1\n")
    failing.chmod(0o700)
    monkeypatch.setattr(baselines.importlib, "import_module", find)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert baselines.measure_zstd(lambda: [bytes(2**20)] * 2) is None


@pytest.mark.parametrize("lost", [False, True])
def test_a_file_that_does_not_decode_is_not_kept(lintx, grey, tmp_path, monkeypatch, lost) -> None:
    """If a block is lost, its values are 0, like those of this picture."""
    Image.new("L", (8, 8)).save(tmp_path / "black.png")
    decode = Coder.decode

    def damage(self, *given):
        if lost:
            raise DataError("it does not decode")
        return decode(self, *given) ^ 1

    monkeypatch.setattr(Coder, "decode", damage)
    monkeypatch.setattr("linformer_cli.codec.pack.zlib", SimpleNamespace(compress=lambda *given: bytes(10**4)))
    command = ("compress", tmp_path / "black.png", "-o", tmp_path / "x.lintx", "--checkpoint", grey)
    found = lintx(*command)
    assert found.code == 1 and "does not decode to the same values" in found.stderr
    assert not (tmp_path / "x.lintx").exists() and lintx(*command, "--no-verify").code == 0


def test_one_bad_picture_of_several_stops_the_work(lintx, grey, folder, tmp_path) -> None:
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nxxx")
    draw(folder / "large.png", (9, 9))
    found = lintx("compress", folder, "-o", tmp_path / "x.lintx", "--checkpoint", grey)
    assert found.code == 1 and not (tmp_path / "x.lintx").exists()
    assert "broken.png" in found.stderr and "large.png" in found.stderr and "2 of 6" in found.stderr


def test_pictures_of_other_formats_come_back_as_png(lintx, grey, tmp_path) -> None:
    draw(tmp_path / "in" / "a.bmp", (8, 8))
    assert lintx("compress", tmp_path / "in", "-o", tmp_path / "x.lintx", "--checkpoint", grey).code == 0
    assert lintx("decompress", tmp_path / "x.lintx", "-o", tmp_path / "out", "--checkpoint", grey).code == 0
    with Image.open(tmp_path / "in" / "a.bmp") as before, Image.open(tmp_path / "out" / "a.png") as after:
        np.testing.assert_array_equal(np.asarray(before), np.asarray(after))


def test_another_model_is_refused(lintx, grey, build_checkpoint, folder, tmp_path) -> None:
    assert lintx("compress", folder, "-o", tmp_path / "x.lintx", "--checkpoint", grey, "--no-verify").code == 0
    other = build_checkpoint("other", image=ImageShape(height=8, width=8), seed=1)
    found = lintx("decompress", tmp_path / "x.lintx", "-o", tmp_path / "out", "--checkpoint", other)
    assert found.code == 1 and "another model" in found.stderr and not (tmp_path / "out").exists()
    found = lintx("decompress", tmp_path / "x.lintx", "-o", tmp_path / "out")
    assert found.code == 2 and "--checkpoint" in found.stderr


# Options and values that do not go with a picture, or with a model without classes, or at all.
FOR_OTHERS = {"--data": "glyphs", "--limit": "5", "--split": "train", "--length": "16", "--class": "1", "--block": "0"}


@loop_over(
    ("arguments", "code"),
    [
        *(((), 2), (("-o", "x.lintx"), 2), (("missing.png", "-o", "x.lintx"), 1), (("a.png",), 2)),
        *((("a.png", option, value, "-o", "x.lintx"), 2) for option, value in FOR_OTHERS.items()),
        (("--data", "glyphs", "--tile", "-o", "x.lintx"), 2),
        (("--data", "mnist2", "-o", "x.lintx"), 2),
        (("a.png", "a.png", "-o", "x.lintx"), 2),
        (("empty", "-o", "x.lintx"), 2),
        (("a.png", "-o", "empty"), 1),
        (("a.png", "-o", "a.png/x.lintx"), 1),
        (("a.png", "-o", "-", "--json"), 2),
        (("-", "-", "-o", "x.lintx"), 2),
    ],
)
def test_wrong_command_lines_give_one_line(lintx, grey, arguments, code, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir(exist_ok=True)
    draw(tmp_path / "a.png", (8, 8))
    found = lintx("compress", *arguments, "--checkpoint", grey)
    assert found.code == code and found.stderr.count("Error") == 1 and "Traceback" not in found.stderr
    assert not (tmp_path / "x.lintx").exists()


@pytest.mark.parametrize("content", [b"", b"LINTXPRG" + bytes(100), b"LINTXPAK", b"\x89PNG", bytes(1000)])
def test_other_files_are_refused_in_one_line(lintx, content, tmp_path) -> None:
    (tmp_path / "x.lintx").write_bytes(content)
    found = lintx("decompress", tmp_path / "x.lintx", "-o", tmp_path / "out")
    assert found.code == 1 and found.stderr.startswith("Error") and found.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_a_missing_file_and_a_file_as_folder_are_refused(lintx, tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    for arguments, code in (
        ((tmp_path, "-o", tmp_path / "out"), 1),
        ((tmp_path / "no", "-o", tmp_path / "out"), 1),
        ((tmp_path / "file", "-o", tmp_path / "file"), 2),
        ((tmp_path / "file",), 2),
    ):
        found = lintx("decompress", *arguments)
        assert found.code == code and found.stderr.count("\n") == 1, found.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for other processes")
def test_ctrl_c_leaves_no_file(grey, tmp_path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (100_000, 8, 8, 1), dtype=np.uint8)
    np.save(tmp_path / "test-images.npy", images)
    (tmp_path / "out").mkdir()
    options = ("--data", f"array:{tmp_path}", "--block", 50, "--checkpoint", grey)
    with Command("compress", *options, "-o", tmp_path / "out" / "x.lintx") as command:
        for line in command.stderr:
            if b"in blocks" in line:
                break
        time.sleep(0.5)
        command.send_signal(signal.SIGINT)
        code, _, rest = command.finish()
        assert code == 130 and "Traceback" not in rest and "Stopped" in rest
    assert not list((tmp_path / "out").iterdir())


def test_a_device_is_written_to_and_not_replaced(grey, folder, tmp_path) -> None:
    """A pipe stands for a device: the file goes into it."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        code, _, errors = run_command("compress", folder, "-o", tmp_path / "pipe", "--checkpoint", grey)
        assert code == 0, errors
        assert os.read(reader, 2**16).startswith(b"LINTXPAK")
    finally:
        os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_the_output_is_none_of_the_inputs(lintx, grey, folder) -> None:
    before = (folder / "b.png").read_bytes()
    found = lintx("compress", folder, "-o", folder / "b.png", "--checkpoint", grey, "--force")
    assert found.code == 2 and (folder / "b.png").read_bytes() == before


def test_a_file_that_grows_after_it_was_compressed_is_kept(lintx, text, tmp_path, monkeypatch) -> None:
    def grown(read: object) -> None:
        raise DataError("'app.log' became longer while it was read; start again")

    monkeypatch.setattr("linformer_cli.codec.baselines.measure_baselines", grown)
    (tmp_path / "app.log").write_bytes(b"started\n" * 40)
    out = tmp_path / "x.lintx"
    outcome = lintx("compress", tmp_path / "app.log", "-o", out, "--checkpoint", text, "--json")
    assert outcome.code == 0 and outcome.document["rivals"] is None and "became longer" in outcome.stderr
    assert lintx("decompress", out, "-o", tmp_path / "out", "--checkpoint", text).code == 0


def test_ctrl_c_in_the_comparison_comes_after_the_file_is_reported(lintx, text, tmp_path, monkeypatch) -> None:
    def stop(read: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("linformer_cli.codec.baselines.measure_baselines", stop)
    (tmp_path / "book").write_bytes(b"started\n" * 40)
    outcome = lintx("compress", tmp_path / "book", "-o", tmp_path / "x.lintx", "--checkpoint", text)
    assert outcome.code == 130 and outcome.stderr.endswith("\nStopped\n")
    assert f"wrote {tmp_path / 'x.lintx'}: 1 file" in outcome.stderr and (tmp_path / "x.lintx").exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
def test_a_name_that_another_system_cannot_have_is_to_be_changed(lintx, grey, tmp_path) -> None:
    (tmp_path / "in").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "in" / "Shot 10:30.png")
    outcome = lintx("compress", tmp_path / "in", "-o", tmp_path / "x.lintx", "--checkpoint", grey)
    assert outcome.code == 2 and "'Shot 10:30.png' has a backslash, a colon" in outcome.stderr
    assert outcome.stderr.rstrip().endswith("; rename it")
