"""Tests of the look of a data set: what is measured over a folder or an array, said, and used for every picture."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from loops import loop_over
from PIL import Image, ImageDraw

from linformer_cli.config import ImageShape
from linformer_cli.data.images import ImageSet, load_images
from linformer_cli.data.look import Look
from linformer_cli.data.pictures import load_picture
from linformer_cli.errors import DataError, UsageError

CLEAR = (0, 0, 0, 0)
INKS = [(200, 30, 40, 255), (250, 250, 210, 255), (20, 20, 60, 255)]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LINTX_CACHE", str(tmp_path / "cache"))


def draw_sprite(number: int, height: int = 12, width: int = 12, inks: list = INKS) -> Image.Image:
    """A rectangle of two colours on a transparent ground."""
    pixels = np.zeros((height, width, 4), np.uint8)
    pixels[2 : height - 2, 2 + number % 4 : width - 2] = inks[number % len(inks)]
    pixels[4 : 5 + number // 4 % 4, 5:7] = inks[(number + 1) % len(inks)]
    return Image.fromarray(pixels)


def fill(folder: Path, pictures: list[Image.Image], ending: str = "png") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for number, picture in enumerate(pictures):
        picture.save(folder / f"{number:03}.{ending}")
    return f"folder:{folder}"


def said(images: ImageSet) -> str:
    return "\n".join((*images.notes, *images.skipped))


def show(images: ImageSet) -> np.ndarray:
    return np.array(images.shape.colours, np.uint8)[images.images[..., 0]]


def test_sprites_become_an_exact_palette_whose_first_colour_is_transparent(tmp_path: Path) -> None:
    sprites = [draw_sprite(number) for number in range(16)]
    found = load_images(fill(tmp_path / "sprites", sprites), "train")
    assert found.shape.palette == ("#00000000", "#14143c", "#c81e28", "#fafad2")
    assert (found.shape.levels, found.shape.positions) == (4, 144) and not found.look.smooth
    wanted = {np.asarray(sprite).tobytes() for sprite in sprites}
    assert {image.tobytes() for image in show(found)} <= wanted
    assert "3 colours and 'transparent' (exact)" in said(found)


def test_pixel_art_with_many_colours_becomes_one_joint_palette(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    sprites = [draw_sprite(n, inks=[(*random.integers(0, 256, 3), 255) for _ in range(3)]) for n in range(200)]
    name = fill(tmp_path / "sprites", sprites)
    found = load_images(name, "train")
    assert 64 <= len(found.shape.palette) <= 256 and "mean error" in said(found)
    fewer = load_images(name, "train", colours=8)
    assert len(fewer.shape.palette) == 8 and fewer.shape.palette[0] == "#00000000"
    assert load_images(name, "train", colours=2).shape.levels == 2
    # Borders stay sharp, since a part is either transparent or not.
    assert (show(fewer)[:, :2] == CLEAR).all() and set(np.unique(show(fewer)[..., 3])) == {0, 255}


def test_photographs_keep_their_channels(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (12, 16, 16, 4), np.uint8)
    colour, opaque = fill(tmp_path / "a", [Image.fromarray(pixels) for pixels in noise]), tmp_path / "b"
    assert load_images(colour, "train").images.shape[1:] == (16, 16, 4)
    assert load_images(fill(opaque, [Image.fromarray(p[..., :3]) for p in noise]), "train").shape.channels == 3
    assert load_images(f"folder:{opaque}", "train", colours=16).shape.levels == 16
    (tmp_path / "c").mkdir()
    np.save(tmp_path / "c" / "a.npy", noise / np.float32(255))
    numbers = load_images(f"folder:{tmp_path / 'c'}", "train", colours=16)
    palette = np.array(numbers.shape.colours)
    assert len(palette) == 16 and palette[0, 3] == 0 and np.ptp(palette[:, :3], axis=1).max() > 50


def test_icons_with_soft_edges_keep_their_opacity(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    icons = []
    for _ in range(16):
        large = Image.new("RGBA", (192, 192))
        ImageDraw.Draw(large).ellipse((20, 30, *random.integers(120, 180, 2)), fill=(*random.integers(0, 256, 3), 255))
        icons.append(large.resize((48, 48), Image.Resampling.LANCZOS))
    found = load_images(fill(tmp_path / "icons", icons), "train")
    assert (found.shape.channels, found.shape.palette, found.look.smooth) == (4, (), True)
    assert load_images(f"folder:{tmp_path / 'icons'}", "train", colours=16).shape.levels == 16


def test_one_ground_is_chosen_for_the_whole_set_and_said(tmp_path: Path) -> None:
    name = fill(tmp_path / "sprites", [draw_sprite(number) for number in range(12)])
    flat = load_images(name, "train", channels=3)
    assert (flat.images[:, 0] == 255).all() and flat.look.ground == "#ffffff"
    assert "12 pictures with transparent parts put on #ffffff" in said(flat)
    blue = load_images(name, "train", channels=3, ground="navy")
    assert (blue.images[:, 0] == (0, 0, 128)).all() and blue.look.ground == "#000080"


@loop_over(
    ("sizes", "settings", "shape", "line"),
    [
        ([(20, 14)] * 9, {}, (20, 14), ""),
        ([(16, 16)] * 9 + [(20, 16)], {}, (16, 16), "1 cropped to 16 x 16; --image-size 20x16 --fit pad"),
        ([(16, 16)] * 9 + [(12, 20)], {}, (16, 16), "1 cropped, 1 padded to 16 x 16"),
        ([(16, 16)] * 9, {"image_size": "10x12"}, (10, 12), "9 cropped to 10 x 12"),
        ([(16, 16)] * 9, {"image_size": 8, "fit": "stretch"}, (8, 8), "9 stretched to 8 x 8"),
        ([(16, 16)] * 9, {"image_size": 8}, (8, 8), "9 reduced by leaving out pixels to 8 x 8"),
    ],
)
def test_the_usual_size_is_kept_and_changes_are_said(tmp_path: Path, sizes, settings, shape, line) -> None:
    sprites = [draw_sprite(number, *size) for number, size in enumerate(sizes)]
    found = load_images(fill(tmp_path / f"{sizes[-1]}{settings}", sprites), "train", **settings)
    assert found.images.shape[1:3] == shape and line in said(found)
    assert len(found.shape.palette) == 4  # no colour is mixed


@pytest.mark.parametrize("kind", [np.uint16, np.float32])
def test_numbers_of_a_camera_have_one_range(tmp_path: Path, kind: type) -> None:
    frames = [np.linspace(900, 1000 + 30 * n, 64).reshape(8, 8).astype(kind) for n in range(10)]
    name = fill(tmp_path / "frames", [Image.fromarray(frame) for frame in frames], "tif")
    found = load_images(name, "train")
    assert found.look.range == (900, 1270) and "numbers from 900 (black) to 1270 (white)" in said(found)
    brightest = sorted(int(image.max()) for image in found.images)
    assert brightest[0] < 100 and brightest[-1] > 200  # not each frame by its own maximum
    assert load_images(name, "train", range="0,65535").images.max() <= 5
    with pytest.raises(UsageError, match="black must be less"):
        load_images(name, "train", range="9,1")
    # The range is not one of pictures of 8 bits, such as those that the model draws.
    drawn = np.full((8, 8, 1), 200, np.uint8)
    assert (found.look.read(drawn) == drawn).all()
    grey = load_images(
        fill(tmp_path / "grey", [Image.fromarray(drawn[..., 0] + n) for n in range(9)]), "train", range="0,9"
    )
    assert grey.look.range is None and "--range is not used" in said(grey) and grey.images.min() >= 200


def test_frames_tiles_and_arrays_in_a_folder_are_images(tmp_path: Path) -> None:
    frames = [draw_sprite(number) for number in range(12)]
    (tmp_path / "gif").mkdir()
    frames[0].save(tmp_path / "gif" / "a.gif", save_all=True, append_images=frames[1:], disposal=2)
    found = load_images(f"folder:{tmp_path / 'gif'}", "train")
    assert len(found) == 10 and "12 frames in 1 file" in said(found)
    sheet = Image.new("RGBA", (36, 60))
    for number, frame in enumerate(frames):
        sheet.paste(frame, (number % 3 * 12, number // 3 * 12))
    name = fill(tmp_path / "sheet", [sheet])
    with pytest.raises(DataError, match=r"1 different image.*--tile"):
        load_images(name, "train")
    with pytest.raises(DataError, match="not used: 1 tile of one colour, or cut off by an edge; change --tile"):
        load_images(name, "train", tile=64)
    found = load_images(name, "train", tile=12)
    assert len(found) == 10 and found.images.shape[1:3] == (12, 12) and "not used: 3 tiles of one colour" in said(found)
    (tmp_path / "npy").mkdir()
    np.save(tmp_path / "npy" / "a.npy", np.stack([np.asarray(frame) for frame in frames]))
    assert len(load_images(f"folder:{tmp_path / 'npy'}", "train")) == 10
    np.save(tmp_path / "npy" / "b.npy", np.zeros((3, 12, 12)))
    assert "moveaxis(array, 0, 2)" in said(load_images(f"folder:{tmp_path / 'npy'}", "train"))


def test_frames_before_a_broken_one_are_used(tmp_path: Path) -> None:
    sprites = [draw_sprite(number) for number in range(16)]
    name = fill(tmp_path / "set", sprites[:10])
    file = tmp_path / "set" / "b.png"
    sprites[10].save(file, save_all=True, append_images=sprites[11:])
    file.write_bytes(file.read_bytes()[:-90])
    parts = [load_images(name, split) for split in ("train", "validation", "test")]
    count = sum(map(len, parts))
    assert 12 <= count < 16 and f"after {count - 10} images, used anyway" in said(parts[0])
    assert f"{count} pictures (height x width): {count} of 12 x 12" in said(parts[0])
    found = {image.tobytes() for part in parts for image in show(part)}
    assert found == {np.asarray(sprite).tobytes() for sprite in sprites[:count]}


def test_enlarged_pixel_art_is_reduced_to_its_pixels(tmp_path: Path) -> None:
    sprites = [draw_sprite(number) for number in range(16)]
    large = [sprite.resize((48, 48), Image.Resampling.NEAREST) for sprite in sprites]
    name = fill(tmp_path / "set", large)
    found = load_images(name, "train")
    assert {image.tobytes() for image in show(found)} <= {np.asarray(sprite).tobytes() for sprite in sprites}
    assert "16 pictures of enlarged pixel art: a block of 4 x 4 becomes one pixel" in said(found)
    assert load_images(name, "train", image_size=48).shape.height == 48
    large[3].putpixel((7, 7), INKS[1])  # one picture that is not enlarged, so that none of its size counts as such
    large[3].save(tmp_path / "set" / "003.png")
    assert load_images(name, "train").shape.height == 48


@loop_over("table", ["file,label\n{0},sword\n", "{0}, sword\n", "label,file\nsword,{0}\n"])
def test_classes_have_names(tmp_path: Path, table: str) -> None:
    folder = tmp_path / str(len(table))
    name = fill(folder, [draw_sprite(number) for number in range(16)])
    rows = [(f"{n:03}.png", ("sword", "axe")[n % 2]) for n in range(1, 16)]
    lines = "".join(",".join(row[::-1] if "sword," in table else row) + "\n" for row in rows)
    (folder / "labels.csv").write_text(table.format("000.png") + lines)
    found = load_images(name, "train")
    assert found.look.class_names == ("axe", "sword") and found.classes == 2
    assert "2 classes: axe (8), sword (8)" in said(found)
    # A model that knows more classes keeps their numbers.
    look = Look(found.shape, smooth=False, class_names=("axe", "bow", "sword"))
    assert set(load_images(name, "train", look=look).labels) == {0, 2}
    with pytest.raises(DataError, match="class 'sword', which the model lacks; it knows axe"):
        load_images(name, "train", look=Look(found.shape, class_names=("axe",)))
    (folder / "labels.csv").write_text("000.png,axe\n")
    assert "labels.csv is ignored" in said(load_images(name, "train"))


def test_a_class_without_training_images_is_said(tmp_path: Path) -> None:
    for place, numbers in (("train/a", range(4)), ("train/b", range(4, 8)), ("val/a", [8]), ("val/c", [9])):
        fill(tmp_path / "set" / place, [draw_sprite(number) for number in numbers])
    assert "no training image has the class c" in said(load_images(f"folder:{tmp_path / 'set'}", "train"))
    draw_sprite(10).save(tmp_path / "set" / "train" / "loose.png")
    assert "train/loose.png is in none of the 3 folders" in said(load_images(f"folder:{tmp_path / 'set'}", "train"))


def test_copies_are_counted_and_stay_in_one_split(tmp_path: Path) -> None:
    sprites = [draw_sprite(number) for number in range(12)]
    name = fill(tmp_path / "set", [*sprites, *[sprites[0]] * 19])
    parts = [load_images(name, split) for split in ("train", "validation", "test")]
    assert "19 images equal to another" in said(parts[0])
    rows = [{image.tobytes() for image in part.images} for part in parts]
    assert [len(part) for part in parts] == [29, 1, 1] and not rows[0] & (rows[1] | rows[2])


@loop_over(
    ("change", "channels", "close"),
    [
        (lambda images: images / np.float32(255), 3, 0),
        (lambda images: images.astype(np.uint16) * 257, 3, 0),
        (lambda images: np.moveaxis(images, 3, 1), 3, 0),
        (lambda images: images.astype(np.int64), 3, 0),
        (lambda images: images[..., 0] > 99, 1, 255),
    ],
)
def test_arrays_of_certain_meaning_are_read(tmp_path: Path, change: Callable, channels: int, close: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (20, 9, 7, 3), np.uint8)
    images[0, 0, 0] = 0, 255, 128
    np.save(tmp_path / "train-images.npy", change(images))
    found = load_images(f"array:{tmp_path}", "train")
    assert found.images.shape == (18, 9, 7, channels) and found.images.dtype == np.uint8
    assert abs(found.images.astype(int) - images[:18, ..., :channels]).max() <= close


@loop_over(
    ("shape", "advice"),
    [((20, 64), ".reshape(-1, 8, 8))"), ((20, 9, 9, 2), "array[..., 0])"), ((20, 2, 9, 9), "[:, 0])")],
)
def test_other_arrays_are_refused_with_the_line_to_type(tmp_path: Path, shape, advice: str) -> None:
    np.save(tmp_path / "train-images.npy", np.zeros(shape, np.uint8))
    with pytest.raises(DataError) as caught:
        load_images(f"array:{tmp_path}", "train")
    assert advice in str(caught.value)


def test_a_picture_is_read_with_the_look_of_a_model(tmp_path: Path) -> None:
    shape = ImageShape(height=4, width=4, levels=3, palette=("#00000000", "#102030", "#ff0000"))
    pixels = np.zeros((8, 8, 4), np.uint8)
    pixels[:4] = 250, 10, 10, 140
    pixels[4:] = 250, 10, 10, 100
    Image.fromarray(pixels).save(tmp_path / "a.png")
    image = load_picture(tmp_path / "a.png", Look(shape, smooth=False)).image
    assert image[..., 0].tolist() == [[2] * 4] * 2 + [[0] * 4] * 2


def test_heic_pictures_name_what_reads_them(tmp_path: Path) -> None:
    name = fill(tmp_path / "set", [draw_sprite(number) for number in range(6)])
    (tmp_path / "set" / "phone.HEIC").write_bytes(b"\0\0\0\x20ftypheic")
    assert "1 HEIC picture left out; pip install pillow-heif" in said(load_images(name, "train"))
    with pytest.raises(DataError, match="pillow-heif, or save it as JPEG"):
        load_picture(tmp_path / "set" / "phone.HEIC", Look(ImageShape(height=4, width=4)))
