"""Tests of the order of training images: one permutation per epoch, fixed by the seed and unchanged by resuming."""

import numpy as np
import pytest
from loops import loop_over

from linformer_cli.data.batches import Batches, flip_images, shift_images


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_every_epoch_contains_every_image_once(count: int) -> None:
    stream = Batches(count, seed=3).batch(0, 5 * count)
    assert stream.dtype == np.int64
    for epoch in stream.reshape(5, count):
        assert sorted(epoch) == list(range(count))


def test_a_new_stream_resumes_at_any_place() -> None:
    whole = Batches(10, seed=5).batch(0, 60)
    for start in range(40):
        np.testing.assert_array_equal(Batches(10, seed=5).batch(start, 20), whole[start : start + 20])


def test_an_earlier_batch_is_the_same_when_read_again_or_changed() -> None:
    batches = Batches(10, seed=5)
    first = batches.batch(0, 15)
    batches.batch(500, 40)
    np.testing.assert_array_equal(batches.batch(0, 15), first)
    batches.batch(0, 10)[:] = -1  # the permutation is kept
    np.testing.assert_array_equal(batches.batch(0, 15), first)


def test_a_step_is_cheap_because_permutations_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches(1000, seed=0)
    batches.batch(990, 20)  # reads epochs 0 and 1
    monkeypatch.setattr(np.random, "Philox", None)  # another draw would fail
    batches.batch(0, 100)
    batches.batch(1500, 100)


def test_random_draws_never_change() -> None:
    """The values are fixed, because a run must go on in the same way with later versions of lintx and numpy."""
    batches = Batches(8, seed=42)
    assert batches.batch(0, 16).tolist() == [7, 1, 6, 4, 3, 5, 0, 2, 4, 5, 3, 0, 2, 7, 1, 6]
    assert batches.shifts(3, 5, most=2).tolist() == [[1, 0], [1, 1], [1, 2], [-2, 0], [1, 2]]
    assert np.flatnonzero(batches.hidden_classes(3, 16, 0.3)).tolist() == [5, 7, 8, 9, 10, 12]
    assert np.flatnonzero(batches.flips(3, 16)).tolist() == [0, 2, 3, 5, 6, 7, 9, 10, 12, 13]


@loop_over(
    "draw",
    [
        lambda batches, start, size: batches.shifts(start, size, most=4),
        lambda batches, start, size: batches.hidden_classes(start, size, 0.5),
        lambda batches, start, size: batches.flips(start, size),
    ],
)
def test_random_draws_depend_only_on_the_seed_and_the_place(draw) -> None:
    whole = draw(Batches(10, seed=5), 0, 128)
    for size in (1, 3, 64):
        pieces = [draw(Batches(99, seed=5), start, size) for start in range(0, 129 - size, size)]
        joined = np.concatenate(pieces)
        np.testing.assert_array_equal(joined, whole[: len(joined)])
    assert not np.array_equal(whole, draw(Batches(10, seed=6), 0, 128))
    # In the next epoch, the same image has another draw.
    assert not np.array_equal(whole[:10], whole[10:20])


@pytest.mark.parametrize(("count", "seed"), [(0, 0), (-1, 0), (5, -1), (5, 2**64)])
def test_impossible_streams_are_refused(count: int, seed: int) -> None:
    with pytest.raises(ValueError, match="found"):
        Batches(count, seed)


@pytest.mark.parametrize(("start", "size"), [(-1, 4), (0, 0)])
def test_impossible_batches_are_refused(start: int, size: int) -> None:
    with pytest.raises(ValueError, match="found"):
        Batches(5, seed=0).batch(start, size)


# Shifts and flips


def test_a_shifted_image_repeats_its_edge_and_moves_its_channels_together() -> None:
    image = np.arange(1, 7, dtype=np.uint8).reshape(1, 2, 3, 1) * np.array([1, 10], np.uint8)
    moves = {
        (0, 0): [[1, 2, 3], [4, 5, 6]],
        (1, 0): [[1, 2, 3], [1, 2, 3]],
        (-1, 0): [[4, 5, 6], [4, 5, 6]],
        (0, 1): [[1, 1, 2], [4, 4, 5]],
        (0, -2): [[3, 3, 3], [6, 6, 6]],
        (-1, 1): [[4, 4, 5], [4, 4, 5]],
    }
    moved = shift_images(np.repeat(image, len(moves), axis=0), np.array(list(moves)))
    assert moved.dtype == np.uint8 and moved.shape == (6, 2, 3, 2)
    assert moved[..., 0].tolist() == list(moves.values())
    np.testing.assert_array_equal(moved[..., 1], 10 * moved[..., 0])


def test_only_the_chosen_images_are_mirrored() -> None:
    images = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)
    flipped = flip_images(images, np.array([False, True]))
    assert flipped.dtype == np.uint8
    np.testing.assert_array_equal(flipped[0], images[0])
    assert flipped[1].tolist() == [[[15, 16, 17], [12, 13, 14]], [[21, 22, 23], [18, 19, 20]]]
