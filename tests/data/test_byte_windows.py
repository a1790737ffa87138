"""Tests of windows of bytes: joined files, splits by stretches, and one-line errors."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from linformer_cli.data.byte_windows import LONGEST_STRETCH, divide_bytes, load_byte_windows
from linformer_cli.data.images import load_images
from linformer_cli.errors import DataError, UsageError


def save(path: Path, count: int, first: int = 0) -> bytes:
    data = ((first + np.arange(count)) % 251).astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return data


def test_windows_are_adjacent_bytes_of_the_file(tmp_path: Path) -> None:
    data = save(tmp_path / "text", 4_000)
    found = load_images(f"bytes:{tmp_path / 'text'}", "train", length=50)
    assert found.shape.positions == 50
    assert found.images.shape == (len(found), 1, 50, 1)
    # Stretches of 200 bytes: number 9 is for validation, and number 19 for testing.
    expected = data[:1800] + data[2000:3800]
    assert found.images[:].tobytes() == expected
    assert found.images[np.array([37, 1])].tobytes() == expected[1850:1900] + expected[50:100]
    assert load_images(f"bytes:{tmp_path / 'text'}", "validation", length=50).images[:].tobytes() == data[1800:2000]
    assert load_images(f"bytes:{tmp_path / 'text'}", "test", length=50).images[:].tobytes() == data[3800:]


@pytest.mark.parametrize("count", [40, 999, 20 * LONGEST_STRETCH, 45 * LONGEST_STRETCH + 7])
def test_splits_are_disjoint_and_leave_out_little(count: int) -> None:
    stretches = divide_bytes(count)
    used = sorted((part.start, part.stop) for parts in stretches.values() for part in parts)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(used))
    sizes = {split: sum(map(len, parts)) for split, parts in stretches.items()}
    assert 0 <= count - sum(sizes.values()) < max(20, LONGEST_STRETCH if count > 20 * LONGEST_STRETCH else 20)
    assert sizes["validation"] >= sizes["test"] >= sum(sizes.values()) // 23
    # Windows of the longest length fit if there are enough bytes.
    if count >= 20 * LONGEST_STRETCH:
        assert all(len(part) >= LONGEST_STRETCH for parts in stretches.values() for part in parts)


def test_the_files_of_a_folder_are_joined_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    parts = [save(folder / name, count, count) for name, count in (("a/z", 30), ("b", 70), ("c.txt", 900))]
    save(folder / ".hidden", 50)
    save(folder / ".git" / "config", 50)
    save(folder / "empty", 0)
    os.mkfifo(folder / "pipe")
    (folder / "broken").symlink_to("nowhere")
    (windows,), skipped = load_byte_windows(folder, ["train"], 45)
    joined = b"".join(parts)
    assert windows[:].tobytes() == joined[:450] + joined[500:950]
    assert [message for message in skipped if "broken" in message] == list(skipped) != []


def test_invalid_paths_and_sizes_are_refused(tmp_path: Path, raises_one_line) -> None:
    with raises_one_line(DataError, "does not exist"):
        load_images(f"bytes:{tmp_path / 'nothing'}", "train")
    with raises_one_line(UsageError, "needs a path"):
        load_images("bytes:", "train")
    (tmp_path / "folder").mkdir()
    with raises_one_line(DataError, "has no bytes"):
        load_images(f"bytes:{tmp_path / 'folder'}", "train")
    save(tmp_path / "folder" / "short", 1_000)
    with raises_one_line(DataError, "1,000 bytes", "'validation' has 50", "1,024", "--length"):
        load_images(f"bytes:{tmp_path / 'folder'}", "validation")
    os.mkfifo(tmp_path / "pipe")
    with raises_one_line(DataError, "is a pipe"):
        load_images(f"bytes:{tmp_path / 'pipe'}", "train")
    with raises_one_line(UsageError, "--length 64 is for bytes:PATH"):
        load_images("glyphs", "train", length=64)
    with raises_one_line(UsageError, "--image-size 64 is for"):
        load_images(f"bytes:{tmp_path / 'folder'}", "train", image_size=64)


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path, raises_one_line) -> None:
    save(tmp_path / "text", 4_000)
    (windows,), _ = load_byte_windows(tmp_path / "text", ["train"], 50)
    save(tmp_path / "text", 60)
    with raises_one_line(DataError, "became shorter"):
        windows[:]
