"""Tests of `lintx bench codec`: every format gives the same pixels back, and sizes and shares are consistent."""

import numpy as np
import pytest
import torch
from interruptions import stop_after
from loops import loop_over
from machine import HAS_LIBRARY, NO_LIBRARY

from linformer_cli.bench import codec
from linformer_cli.bench.codec import CodecSettings, Format, list_formats, render_bits, run_codec_bench
from linformer_cli.bench.published import PUBLISHED_SIZES
from linformer_cli.config import ImageShape
from linformer_cli.errors import DisagreementError
from linformer_cli.sampling.decode import Sampler

pytest.importorskip("constriction")
pytestmark = pytest.mark.skipif(not HAS_LIBRARY, reason=NO_LIBRARY)


@loop_over("channels", [1, 3])
@loop_over("kind", list_formats())
def test_every_format_gives_the_same_pixels_back(kind: Format, channels) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 5, 7, channels), dtype=np.uint8)
    files = kind.encode(images)
    np.testing.assert_array_equal(kind.decode(files, images.shape), images)


def test_the_rows_have_sizes_and_speeds(build_tiny_model) -> None:
    model = build_tiny_model(image=ImageShape(height=8, width=8))
    images = Sampler(model, engine="native", products=torch.int8).sample_images(5)
    report = run_codec_bench(model, "mnist", images, None, CodecSettings(5, 2, 2, 2))
    assert report.ended == "finished" and report.published[0].method == "Sparse PC"
    rows = {row.name: row for row in report.rows}
    assert rows["raw pixels"].bytes == 5 * 64 and rows["raw pixels"].bits_per_dim == 8
    own = rows["lintx"]
    assert own.bytes and own.bits_per_dim == 8 * own.bytes / 320
    assert report.model_bits_per_dim is not None and own.bits_per_dim > report.model_bits_per_dim
    assert own.encoding_share and own.decoding_share and own.encoded_per_second
    for row in report.rows:
        assert (row.bytes is None) == (row.left_out is not None)
        assert row.name == "lintx" or row.encoding_share is None


def test_speeds_are_medians_in_images_per_second(monkeypatch) -> None:
    """The made-up clock is read before and after encoding, and after decoding."""
    times = iter([0, 2, 3, 10, 14, 22, 30, 31, 32])
    monkeypatch.setattr(codec.time, "perf_counter", lambda: next(times))
    images = np.zeros((4, 2, 2, 1), dtype=np.uint8)
    kind = Format("none", lambda images: [images.tobytes()], lambda files, shape: images)
    for _ in range(3):
        kind.measure(images)
    row = kind.row(images, [1.0, 1.0, 1.0])
    assert (row.bytes, row.encoded_per_second, row.decoded_per_second) == (16, 4 / 2, 4 / 1)
    assert (row.encoding_share, row.decoding_share) == (2, 4)


def test_a_format_that_changes_a_pixel_is_an_error() -> None:
    images = np.zeros((4, 2, 2, 1), dtype=np.uint8)
    kind = Format("none", lambda images: [b""], lambda files, shape: images + np.eye(2, dtype=np.uint8)[:, :, None])
    with pytest.raises(DisagreementError, match="none does not give the same pixels back"):
        kind.measure(images)


def test_an_interruption_keeps_the_rounds_so_far(build_tiny_model, monkeypatch) -> None:
    monkeypatch.setattr(codec, "measure_zstd", None)  # it can take minutes, so it does not run after an interruption
    model, images = build_tiny_model(image=ImageShape(height=4, width=4)), np.zeros((2, 4, 4, 1), dtype=np.uint8)
    report = run_codec_bench(model, "own", images, None, CodecSettings(2, 2, 9, 2), stop_after(60))
    assert report.ended == "interrupted" and "lintx" in [row.name for row in report.rows]
    assert not report.published


def test_published_sizes_are_sorted() -> None:
    for found in PUBLISHED_SIZES.values():
        sizes = [each.bits_per_dim for each in found]
        assert sizes and sizes == sorted(sizes)


def test_the_picture_shows_where_the_bits_go() -> None:
    images = np.full((2, 4, 4, 1), 255, dtype=np.uint8)
    bits = np.zeros((2, 4, 4, 1))
    bits[1, 2, 3] = 5.0
    picture = np.asarray(render_bits(images, bits, scale=1))
    assert picture[-4:, :4].max() == 0
    assert picture[-4:, -4:].tolist()[2] == [0, 0, 0, 255]
