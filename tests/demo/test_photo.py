"""Tests that the page finds drawings in photographs as `lintx complete` does."""

import re

import numpy as np
import pytest
from data.photographs import CASES, photograph
from demo.node import Node, needs_node
from PIL import Image

from linformer_cli.checkpoint_files import Frame
from linformer_cli.config import ImageShape
from linformer_cli.data.framing import frame_picture

SHAPE = ImageShape(height=28, width=28)
FRAMES = Frame(ground=0, ink=253, box=20, centre=(14.5, 14.5)), Frame(ground=255, ink=200, box=24, centre=(15, 13))
SIDES = 1024, 768
# Returns the box of the drawing in every photograph, and its images in two frames; or null.
FIND = """(names) => names.map((name) => {
  const found = findDrawing({ width: 1024, height: 768, values: Float32Array.from(readFileSync(name)) });
  const show = (frame) => Array.from(frameDrawing(found, frame, { width: 28, height: 28 }));
  return found && [[found.width, found.height], ...[FRAMES].map(show)];
})""".replace("FRAMES", ", ".join(frame.model_dump_json() for frame in FRAMES))


def take(number: int) -> Image.Image:
    """A synthetic photograph, as small as both programs search it."""
    return photograph(number, *CASES[number])[0].resize(SIDES, Image.Resampling.BOX)


@needs_node
@pytest.mark.parametrize("numbers", [[], pytest.param(range(1, 40, 13), marks=pytest.mark.slow)])
def test_a_photograph_gives_the_drawing_of_the_command(tmp_path, numbers) -> None:
    turned = photograph(6, *CASES[6], turned=(50, 15))[0].resize(SIDES, Image.Resampling.BOX)
    pictures = [turned, *map(take, numbers)]
    if numbers:
        pictures.append(Image.fromarray(255 - np.asarray(take(0))))  # ink on black
    found = Node(tmp_path).run(FIND, [picture.tobytes() for picture in pictures])
    for number, (picture, (box, *images)) in enumerate(zip(pictures, found, strict=True)):
        for frame, image in zip(FRAMES, images, strict=True):
            ((expected, note),) = frame_picture(picture, frame, SHAPE)
            (sides,) = re.findall(r"drawing of (\d+) x (\d+) pixels", note)
            assert box == pytest.approx([int(side) for side in sides], rel=0.1), number
            # Place and size may be rounded to another pixel.
            shifted = [np.roll(image, by) for by in (-28, -1, 0, 1, 28)]
            assert max(np.corrcoef(one, expected.ravel())[0, 1] for one in shifted) > 0.9, number


@pytest.mark.slow
@needs_node
def test_an_empty_sheet_has_no_drawing(tmp_path) -> None:
    noise = np.random.default_rng(0).normal(230, 3, SIDES[::-1]).astype(np.uint8)
    smudge = np.full(SIDES[::-1], 230, np.uint8)
    smudge[300:400, 400:500] -= 20
    for sheet in (noise, smudge):
        assert frame_picture(Image.fromarray(sheet), FRAMES[0], SHAPE) == []
    assert Node(tmp_path).run(FIND, [noise.tobytes(), smudge.tobytes()]) == [None, None]
