"""Tests of `lintx complete` with parts of every kind: sides, boxes, masks and transparent pixels."""

import numpy as np
import pytest
from loops import loop_over
from machine import needs_library
from PIL import Image

from linformer_cli.sampling.engines.native import NativeEngine

SIDE = 10  # of the images of `run_folder`


@pytest.fixture
def pictures(tmp_path):
    """A grey picture of the model's size, one of twice this size, and masks."""
    pixels = np.arange(100, dtype=np.uint8).reshape(SIDE, SIDE) * 2
    large = pixels.repeat(2, axis=0).repeat(2, axis=1)
    masks = {"all": (20, 255), "none": (20, 0), "small": (10, 255), "other": (11, 255)}
    for name, (side, tone) in masks.items():
        mask = np.full((side, side), tone, np.uint8)
        if name == "small":
            mask[3:6, 2:8] = 0
        Image.fromarray(mask).save(tmp_path / f"{name}.png")
    hole = np.full_like(large, 255)
    hole[6:12, 4:16] = 0
    Image.fromarray(hole).save(tmp_path / "hole.png")
    Image.fromarray(pixels).save(tmp_path / "grey.png")
    Image.fromarray(large).save(tmp_path / "large.png")
    Image.fromarray(np.stack([large, large, large, hole], axis=2)).save(tmp_path / "clear.png")
    (tmp_path / "text.png").write_text("not an image")
    return tmp_path


@pytest.fixture
def complete(lintx, run_folder, pictures):
    def run(name, *options):
        base = ("complete", pictures / name, "--checkpoint", run_folder, "-n", 2, "--particles", 8, "--frame", "none")
        return lintx(*base, "-o", pictures / "out.png", *options, "--json")

    return run


@pytest.mark.smoke
@loop_over(
    ("name", "options", "known"),
    [
        ("grey.png", ("--keep", "left:0.5"), 50),
        ("grey.png", ("--keep", "bottom:2rows"), 20),
        ("grey.png", ("--erase", "box:3,2,3,6"), 82),
        ("grey.png", ("--keep", "right:8", "--erase", "box:0,0,10,5"), 50),
        ("grey.png", ("--mask", "small.png"), 82),
        ("large.png", ("--mask", "small.png"), 82),
        ("large.png", ("--mask", "hole.png"), 82),
        ("large.png", ("--mask", "hole.png", "--keep", "top:5rows"), 38),
        ("clear.png", (), 82),
        ("clear.png", ("--keep", "top:0.5"), 50),
        ("grey.png", (), 50),
    ],
)
def test_every_part_is_kept(complete, pictures, name, options, known) -> None:
    options = [pictures / part if part.endswith(".png") else part for part in options]
    outcome = complete(name, *options)
    assert outcome.code == 0, outcome.stderr
    (row,) = outcome.document["rows"]
    assert row["known_values"] == known and row["kept_bits_per_dim"] > 0
    particles = known not in (20, 50) or "left:0.5" in options or "bottom:2rows" in options or "right:8" in options
    assert len(row["kept_bits"]) == len(row["effective_sample_size"]) == (2 if particles else 0)
    pairs = zip(row["effective_sample_size"], row["final_sample_size"], strict=True)
    assert all(1 <= fewest <= final <= 8 for fewest, final in pairs)
    assert ("transparent pixels are drawn" in outcome.stderr) == (name == "clear.png" and not options)


def test_the_kept_part_stays_and_the_rest_is_drawn(complete, pictures) -> None:
    pixels = []
    for seed in (0, 1):
        outcome = complete(
            "grey.png", "--erase", "box:3,2,3,6", "--seed", seed, "--scale", 1, "--gif", pictures / "a.gif"
        )
        assert outcome.code == 0, outcome.stderr
        picture = np.asarray(Image.open(pictures / "out.png").convert("L"))[-SIDE:]
        pixels.append(picture)
    assert (pixels[0] != pixels[1]).any()
    document = complete("grey.png", "--erase", "box:3,2,3,6").document
    assert ("try --particles 32" in outcome.stderr) == any(
        size < 2 for size in outcome.document["rows"][0]["effective_sample_size"]
    )
    assert document["erase"] == "box:3,2,3,6" and document["keep"] is None and document["particles"] == 8
    assert all(1 <= size <= 8 for size in document["rows"][0]["effective_sample_size"])


def test_a_mask_that_keeps_nothing_samples(complete, pictures) -> None:
    (row,) = complete("large.png", "--mask", pictures / "none.png").document["rows"]
    assert row["known_values"] == 0 and row["kept_bits_per_dim"] is None


@loop_over(
    ("mask", "words"),
    [
        ("all.png", ("keeps the whole picture", "nothing is left")),
        ("other.png", ("10 x 10 or 20 x 20 pixels", "found 11 x 11")),
        ("text.png", ("text.png", "not an image")),
        ("missing.png", ("no image at", "missing.png")),
        (".", ("is a folder",)),
    ],
)
def test_a_wrong_mask_is_one_line(complete, pictures, mask, words) -> None:
    outcome = complete("large.png", "--mask", pictures / mask)
    assert outcome.code == 1
    line = outcome.stderr.splitlines()[-1]
    assert line.startswith("Error:") and all(word in line for word in words), outcome.stderr


def test_the_mask_is_not_replaced_by_the_result(complete, pictures) -> None:
    outcome = complete("large.png", "--mask", pictures / "out.png")
    assert outcome.code == 2 and "would be replaced" in outcome.stderr


@needs_library
def test_an_interrupted_picture_keeps_its_finished_completions(complete, pictures, monkeypatch) -> None:
    whole, calls = NativeEngine.keep_values, []

    def stop_after_one(engine, *arguments):
        calls.append(engine)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(engine, *arguments)

    expected = complete("grey.png", "--erase", "box:3,2,3,6").document["rows"][0]["kept_bits"]
    monkeypatch.setattr(NativeEngine, "keep_values", stop_after_one)
    outcome = complete("grey.png", "--erase", "box:3,2,3,6", "--engine", "native")
    assert outcome.code == 130
    assert "stopped after 1 of 1 images, the last with 1 of 2 completions, which are kept" in outcome.stderr
    (row,) = outcome.document["rows"]
    assert row["kept_bits"] == expected[:1] and (pictures / "out.png").exists()
