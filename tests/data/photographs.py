"""Synthetic photographs of a drawn digit, with the box in which the digit is."""

import itertools

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

PAPERS = {"white": 245, "cream": 228, "grey": 196, "ruled": 240, "squared": 238}
CASES = list(itertools.product(PAPERS, (False, True), (False, True), (35, 95)))  # paper, desk, shadow, ink
WIDTH, HEIGHT = 1600, 1200
SHEET = 1500, 1080
# Corners of the strokes of digits, in a box of size 1.
DIGITS = (
    [(0, 0.05), (1, 0), (0.35, 1)],
    [(0.1, 0.1), (0.9, 0), (0.95, 0.4), (0.5, 0.5), (1, 0.6), (0.9, 0.95), (0, 1)],
    [(0.05, 0.2), (0.5, 0), (0.95, 0.25), (0.1, 1), (1, 0.95)],
    [(0.7, 0), (0, 0.6), (1, 0.62), (0.68, 0.3), (0.7, 1)],
)


def see_corners(pitch: float, roll: float) -> list[tuple[float, float]]:
    """Where a camera sees the corners of a sheet that leans back by `pitch` and is turned by `roll` degrees."""
    lean, turn = np.radians([pitch, roll])
    corners = np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * SHEET / 2
    x, y = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]) @ corners.T
    far = 1000
    while True:
        depth = far + y * np.sin(lean)
        seen = 0.75 * WIDTH * np.stack([x, y * np.cos(lean)]) / depth  # the focal length of a phone
        if (abs(seen) < [[0.46 * WIDTH], [0.46 * HEIGHT]]).all():
            return [(WIDTH / 2 + across, HEIGHT / 2 + down) for across, down in seen.T.tolist()]
        far *= 1.02


def photograph(
    seed: int, paper: str, desk: bool, shadow: bool, ink: int, turned: tuple[float, float] | None = None
) -> tuple[Image.Image, tuple[int, int]]:
    """A grey photograph of 1600 x 1200 pixels, and the width and height of the digit in it.

    A sheet that is `turned` (pitch and roll in degrees) is seen by a camera, and the sizes are those on the sheet.
    """
    random = np.random.default_rng(seed)
    tone, around = PAPERS[paper], random.uniform
    sheet = Image.new("L", SHEET, tone)
    pen, gap = ImageDraw.Draw(sheet), int(random.integers(48, 70))
    if paper in ("ruled", "squared"):
        for y in range(gap, SHEET[1], gap):
            pen.line((0, y, SHEET[0], y), fill=tone - 60, width=3)
        for x in range(gap, SHEET[0], gap if paper == "squared" else SHEET[0]):
            pen.line((x, 0, x, SHEET[1]), fill=tone - 60, width=3)
    strokes = DIGITS[random.integers(len(DIGITS))]
    size, left, top = around(260, 420), around(0.3, 0.5) * SHEET[0], around(0.25, 0.5) * SHEET[1]
    points = [(left + x * size * 0.7, top + y * size) for x, y in strokes]
    drawn = Image.new("L", SHEET, 0)
    ImageDraw.Draw(drawn).line(points, fill=255, width=int(size * around(0.07, 0.11)), joint="curve")
    drawn = drawn.filter(ImageFilter.GaussianBlur(2))
    sheet.paste(ink, mask=drawn)

    # The corners of the sheet in the photograph: on the desk, or outside of the picture.
    margin = 0.1 if desk else -0.09
    corners = [
        (x, y) for x, y in ((margin, margin), (1 - margin, margin), (1 - margin, 1 - margin), (margin, 1 - margin))
    ]
    seen = [((x + around(-0.03, 0.03)) * WIDTH, (y + around(-0.03, 0.03)) * HEIGHT) for x, y in corners]
    seen = seen if turned is None else see_corners(*turned)
    own = [(0, 0), (SHEET[0], 0), SHEET, (0, SHEET[1])]
    equations = [
        row
        for (x, y), (u, v) in zip(seen, own, strict=True)
        for row in ([x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y])
    ]
    tilt = np.linalg.solve(equations, np.ravel(own))
    seen_sheet, on_sheet, seen_ink = (
        np.asarray(layer.transform((WIDTH, HEIGHT), Image.Transform.PERSPECTIVE, tilt, Image.Resampling.BICUBIC), float)
        for layer in (sheet, Image.new("L", SHEET, 255), drawn)
    )
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH] / [[[HEIGHT]], [[WIDTH]]]
    table = around(50, 120) + 6 * np.sin(rows * 133) + random.normal(0, 5, rows.shape)
    light = 0.95 - 0.25 * (columns * around(-1, 1) + rows * around(-1, 1))
    if shadow:
        light *= 1 - 0.38 / (1 + np.exp(-30 * (columns - around(0.3, 0.7) + (rows - 0.5) * around(-0.8, 0.8))))
    values = np.where(on_sheet > 127, seen_sheet, table) * light + random.normal(0, 3, rows.shape)
    picture = Image.fromarray(values.clip(0, 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(1))
    down, across = np.nonzero((seen_ink if turned is None else np.asarray(drawn)) > 127)
    return picture, (int(np.ptp(across)) + 1, int(np.ptp(down)) + 1)
