"""Tests of decoding against all alignments, and of the error rate."""

import itertools
from collections import defaultdict

import pytest
import torch
from loops import loop_over
from torch import Tensor

from linformer_cli.speech.ctc_task import Errors, Placed, count_errors, decode_by_beam, decode_greedily
from linformer_cli.speech.encoder import ctc_loss


def collapse(alignment: tuple[int, ...]) -> tuple[int, ...]:
    """Join equal neighbours and drop blanks."""
    return tuple(symbol for symbol, _ in itertools.groupby(alignment) if symbol != 0)


def sum_alignments(probabilities: Tensor) -> dict[tuple[int, ...], float]:
    """The probability of every string of symbols: the sum over all its alignments."""
    totals: dict[tuple[int, ...], float] = defaultdict(float)
    for alignment in itertools.product(range(probabilities.shape[1]), repeat=len(probabilities)):
        chosen = [float(row[symbol]) for row, symbol in zip(probabilities, alignment, strict=True)]
        totals[collapse(alignment)] += float(torch.tensor(chosen, dtype=torch.float64).prod())
    return totals


def draw_log_probabilities(seed: int, positions: int = 5, symbols: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(positions, symbols, generator=generator, dtype=torch.float64)).log_softmax(dim=-1)


@loop_over("seed", range(20))
def test_a_wide_beam_finds_the_likeliest_of_all_strings(seed: int) -> None:
    log_probabilities = draw_log_probabilities(seed)
    totals = sum_alignments(log_probabilities.exp())
    assert tuple(decode_by_beam(log_probabilities, width=1_000)) == max(totals, key=totals.__getitem__)


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_the_probability_of_all_alignments(seed: int) -> None:
    log_probabilities = draw_log_probabilities(seed)
    for true, total in sum_alignments(log_probabilities.exp()).items():
        if true:
            numbers = torch.tensor([true])
            loss = ctc_loss(log_probabilities.unsqueeze(0), torch.tensor([5]), numbers, torch.tensor([len(true)]))
            torch.testing.assert_close(loss * len(true), -torch.tensor(total, dtype=torch.float64).log())


def test_greedy_decoding_joins_neighbours_and_says_where_symbols_are() -> None:
    best = torch.tensor([0, 2, 2, 0, 2, 1, 1, 1, 0])
    log_probabilities = torch.nn.functional.one_hot(best, 3).double().add(0.01).log()
    assert decode_greedily(log_probabilities) == [Placed(2, 1, 3), Placed(2, 4, 5), Placed(1, 5, 8)]
    assert decode_by_beam(log_probabilities) == [2, 2, 1]


def test_errors_are_the_fewest_edits_over_all_utterances() -> None:
    found = count_errors([[1, 2, 3], [4, 4]], [[1, 3], [5, 4, 4, 12]])
    assert found == Errors(symbols=5, substitutions=0, deletions=1, insertions=2)
    assert found.rate == 0.6
    assert count_errors([[1, 2]], [[]]).rate == 1.0
    assert count_errors([[1]], [[2, 3, 1]]).rate == 2.0
    assert count_errors([[1, 2]], [[1, 12]]) == Errors(2, 1, 0, 0)
