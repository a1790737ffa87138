"""Tests that a damaged compressed file never gives a wrong image without a word, and never a traceback."""

import io
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from machine import needs_library
from PIL import Image

from linformer_cli.checkpoint import save_checkpoint
from linformer_cli.codec.coder import Coder, identify_program
from linformer_cli.codec.header import Header, encode_header
from linformer_cli.codec.pack import PackedFile, write_packed
from linformer_cli.codec.sources import ArraySource
from linformer_cli.config import ImageShape
from linformer_cli.errors import DataError
from linformer_cli.sampling.decode import Sampler

pytest.importorskip("constriction")
pytestmark = needs_library
IMAGES, BLOCK = 14, 3


@dataclass(frozen=True)
class Sample:
    """A compressed file of a tiny model, and its images as values [N, T]."""

    data: bytes
    values: np.ndarray
    coder: Coder
    checkpoint: Path

    @property
    def places(self) -> list[tuple[int, int]]:
        """The first byte of each block, and the byte after its last."""
        header = PackedFile(io.BytesIO(self.data)).header
        ends = len(encode_header(header)) + np.cumsum([0, *(block.size for block in header.blocks)])
        return [(int(start), int(end)) for start, end in itertools.pairwise(ends)]


@pytest.fixture(scope="module")
def sample(build_tiny_model, tiny_info, tmp_path_factory) -> Sample:
    model = build_tiny_model(image=ImageShape(height=6, width=6), layers=1)
    checkpoint = tmp_path_factory.mktemp("packed") / "model"
    save_checkpoint(checkpoint, model, tiny_info.model_copy(update={"model": model.config}))
    images = Sampler(model, 1, engine="native", products=torch.int8).sample_images(IMAGES)
    images[4] = 255 - images[4]
    source, coder, file = ArraySource(images, None, model.config.image), Coder(model), io.BytesIO()
    header = Header(identify_program(model), "", source.contents, BLOCK, ())
    packed = write_packed(file, header, source, coder, 500, lambda done: None)
    assert not packed.deflated_blocks
    return Sample(file.getvalue(), images.reshape(IMAGES, -1).astype(np.int64), coder, checkpoint)


def damage(sample: Sample, rng: np.random.Generator) -> bytes:
    """A copy of the file with damage of a random kind."""
    data, size = bytearray(sample.data), len(sample.data)
    place, other = sorted(rng.integers(0, size, 2).tolist())
    kind = rng.integers(0, 8)
    if kind == 0:  # one bit
        data[place] ^= 1 << int(rng.integers(0, 8))
    elif kind == 1:  # several bytes
        for index in rng.integers(0, size, rng.integers(2, 9)):
            data[index] = int(rng.integers(0, 256))
    elif kind == 2:  # cut at the end
        del data[place:]
    elif kind == 3:  # cut in the middle
        del data[place : place + int(rng.integers(1, 9))]
    elif kind == 4:  # swapped blocks
        first, second = (sample.places[index] for index in sorted(rng.choice(len(sample.places), 2, replace=False)))
        parts = [slice(*second), slice(first[1], second[0]), slice(*first)]
        data[first[0] : second[1]] = b"".join(sample.data[part] for part in parts)
    elif kind == 5:  # a lost sector
        data[place : place + 64] = bytes(len(data[place : place + 64]))
    elif kind == 6:  # inserted bytes
        data[place:place] = rng.bytes(int(rng.integers(1, 9)))
    else:  # a part of the file twice
        data[other:other] = data[place:other]
    return bytes(data)


def require_honest(sample: Sample, data: bytes) -> str:
    """Read a damaged file. Every block is right or reported, and something is reported. Returns what happened."""
    try:
        packed = PackedFile(io.BytesIO(data))
    except DataError as error:
        assert "\n" not in str(error) and len(str(error)) < 400
        return "refused"
    assert packed.header.program == PackedFile(io.BytesIO(sample.data)).header.program
    restored = list(packed.read_blocks(sample.coder, 500, lambda done: None))
    for block in restored:
        expected = sample.values[block.index * BLOCK : (block.index + 1) * BLOCK]
        np.testing.assert_array_equal(block.values, np.zeros_like(expected) if block.fault else expected)
    lost = [block.index for block in restored if block.fault]
    assert lost or packed.surplus > 0
    return f"{len(lost)} lost"


def damage_often(sample: Sample, count: int, seed: int) -> dict[str, int]:
    rng, outcomes = np.random.default_rng(seed), dict[str, int]()
    while sum(outcomes.values()) < count:
        data = damage(sample, rng)
        if data != sample.data:
            outcome = require_honest(sample, data)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return outcomes


def test_damage_is_noticed(sample) -> None:
    outcomes = damage_often(sample, 100, seed=0)
    # Damage of one block loses one block.
    assert outcomes["1 lost"] > 10 and outcomes["refused"] > 5


@pytest.mark.slow
def test_damage_is_noticed_in_many_files(sample, share: float) -> None:
    count = max(round(2_000 * share), 600)
    outcomes = damage_often(sample, count, seed=1)
    print(outcomes)
    assert outcomes["1 lost"] > count / 8


@pytest.mark.parametrize("index", range(5))
def test_any_changed_block_is_lost_alone(sample, index) -> None:
    start, end = sample.places[index]
    for place in (start, (start + end) // 2, end - 1):
        data = bytearray(sample.data)
        data[place] ^= 4
        assert require_honest(sample, bytes(data)) == "1 lost"


def test_blocks_hold_their_sequences(sample) -> None:
    packed = PackedFile(io.BytesIO(sample.data))
    found = itertools.islice(packed.read_blocks(sample.coder, 500, lambda done: None), 2, 4)
    np.testing.assert_array_equal(np.concatenate([block.values for block in found]), sample.values[6:12])


def test_the_command_writes_what_is_left(sample, tmp_path, capsys) -> None:
    from cli.conftest import run_main

    data = bytearray(sample.data)
    data[sample.places[1][0]] ^= 1
    (tmp_path / "x.lintx").write_bytes(data[: sample.places[4][1] - 1])
    command = ("decompress", tmp_path / "x.lintx", "--checkpoint", sample.checkpoint, "-o", tmp_path / "out", "--json")
    found = run_main(command, capsys)
    assert found.code == 1 and "Traceback" not in found.stderr
    assert found.document["lost_blocks"] == {"1": "its checksum is wrong", "4": "the file is cut short"}
    assert found.document["lost"] == [f"{index:05d}.png" for index in (3, 4, 5, 12, 13)]
    assert found.document["written"] == len(list((tmp_path / "out").iterdir())) == 9
    for path in (tmp_path / "out").iterdir():
        with Image.open(path) as picture:
            assert np.asarray(picture).reshape(-1).tolist() == sample.values[int(path.stem)].tolist()


def test_files_lost_in_part_get_another_name(build_tiny_model, tiny_info, tmp_path, capsys) -> None:
    from cli.conftest import run_main

    image = ImageShape(height=1, width=16)
    model = build_tiny_model(image=image, embedding="none", context="recent")
    data = tiny_info.data.model_copy(update={"name": "bytes:x"})
    save_checkpoint(tmp_path / "model", model, tiny_info.model_copy(update={"model": model.config, "data": data}))
    typical = Sampler(model, 1, engine="native", products=torch.int8).sample_images(9).tobytes()
    (tmp_path / "in").mkdir()
    for name, content in (("a", typical[:32]), ("b", typical[32:84]), ("c", typical[84:104])):
        (tmp_path / "in" / name).write_bytes(content)
    options = ("-o", tmp_path / "x.lintx", "--checkpoint", tmp_path / "model", "--block", 4, "--json")
    found = run_main(("compress", tmp_path / "in", *options), capsys)
    assert found.document["deflated_blocks"] == 0
    # The second block has the last two windows of b and both windows of c.
    packed = bytearray((tmp_path / "x.lintx").read_bytes())
    start = len(packed) - sum(block.size for block in PackedFile(io.BytesIO(bytes(packed))).header.blocks[1:])
    packed[start] ^= 1
    (tmp_path / "x.lintx").write_bytes(packed)
    command = ("decompress", tmp_path / "x.lintx", "--checkpoint", tmp_path / "model", "-o", tmp_path / "out", "--json")
    found = run_main(command, capsys)
    assert found.code == 1 and found.document["partly_lost"] == ["b"] and found.document["lost"] == ["c"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a", "damaged-b"]
    assert (tmp_path / "out" / "a").read_bytes() == typical[:32]
    assert (tmp_path / "out" / "damaged-b").read_bytes() == typical[32:64] + bytes(20)
