"""Tests of the frames and the GIF of images that are sampled row by row."""

import io

import numpy as np
import pytest
from loops import loop_over
from PIL import Image

from linformer_cli.report.grids import (
    BACKGROUND,
    LAST_MILLISECONDS,
    MOST_FRAMES,
    encode_gif,
    frame_rows,
    hide_rows,
    render_grid,
)


@loop_over(("height", "first"), [(28, 0), (28, 14), (28, 27), (1, 0), (500, 0), (64, 0), (65, 3)])
def test_frames_show_the_image_from_the_first_row_to_the_last(height: int, first: int) -> None:
    rows = frame_rows(height, first)
    assert rows[0] == first and rows[-1] == height
    assert rows == sorted(set(rows))
    assert len(rows) == min(height - first, MOST_FRAMES) + 1


def test_later_rows_are_hidden_in_a_copy() -> None:
    images = np.full((2, 4, 3, 1), 200, dtype=np.uint8)
    hidden = hide_rows(images, 1)
    assert (hidden[:, :1] == 200).all() and (hidden[:, 1:] == BACKGROUND).all()
    assert (images == 200).all()
    hidden = hide_rows(np.zeros((2, 4, 3, 4), np.uint8), 1)
    assert (hidden[:, :1] == 0).all() and (hidden[:, 1:] == [BACKGROUND] * 3 + [255]).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_a_gif_shows_every_frame_and_stays_on_the_last(channels: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 6, 5, channels), dtype=np.uint8)
    frames = [render_grid(hide_rows(images, rows), scale=1) for rows in frame_rows(6)]
    with Image.open(io.BytesIO(encode_gif(frames, {"seed": 3}))) as gif:
        assert gif.n_frames == 7
        assert gif.info["loop"] == 0
        assert gif.info["comment"] == b'{"seed":3}'
        gif.seek(6)
        assert gif.info["duration"] == LAST_MILLISECONDS
        shown = np.asarray(gif.convert("RGB"), dtype=int)
    expected = np.asarray(frames[-1].convert("RGB"), dtype=int)
    # Greys are exact, but colours are converted to a palette.
    assert np.abs(shown - expected).max() <= (0 if channels == 1 else 40)
