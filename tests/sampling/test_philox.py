"""Tests that random words computed in parallel equal numpy's, bit for bit, from any start."""

import numpy as np
import torch
from loops import loop_over

from linformer_cli.sampling.choose import UniformStreams
from linformer_cli.sampling.philox import draw_uniforms, draw_words

CPU = torch.device("cpu")


@loop_over("seed", [0, 1, 12345, 2**63 - 1])
@loop_over("index", [0, 7, 2**31, 2**62 + 5])
def test_words_match_numpy(seed: int, index: int) -> None:
    expected = np.random.Philox(key=np.array([seed, index], dtype=np.uint64)).random_raw(40)
    counters = torch.arange(1, 11).unsqueeze(1)
    words = draw_words(seed, torch.tensor([[index]]), counters)
    assert words.flatten().numpy().astype(np.uint64).tolist() == expected.tolist()


@loop_over(("first", "count"), [(0, 1), (0, 130), (1, 3), (3, 2), (4, 4), (63, 66), (100, 1)])
def test_numbers_match_the_streams(first: int, count: int) -> None:
    streams = UniformStreams(5, range(3, 8))
    expected = torch.stack([streams.take() for _ in range(first + count)])[first:]
    assert torch.equal(draw_uniforms(5, range(3, 8), first, count, CPU), expected)


def test_take_and_take_many_can_alternate() -> None:
    streams, alone = UniformStreams(9, range(4)), UniformStreams(9, range(4))
    expected = torch.stack([alone.take() for _ in range(80)])
    found = [streams.take(), *streams.take_many(6, CPU), streams.take(), *streams.take_many(70, CPU), streams.take()]
    assert torch.equal(torch.stack(found), expected[:79])
