"""Tests of the functions that copy states, count their bytes and list their tensors."""

from typing import NamedTuple

import torch
from torch import Tensor

from linformer_cli.attention.base import Shared, fork_state, measure_state_bytes, state_tensors


class Inner(NamedTuple):
    values: Tensor
    position: Tensor


class Outer(NamedTuple):
    sums: Tensor
    inner: Inner
    table: Shared
    nothing: None


def make_state() -> Outer:
    inner = Inner(torch.arange(4.0).view(2, 2), torch.tensor(7))
    return Outer(torch.tensor([[1.0], [2.0]]), inner, Shared(torch.arange(6.0).view(3, 2)), None)


def test_a_fork_repeats_every_image_and_copies_shared_tensors() -> None:
    state = make_state()
    forked = fork_state(state, 3)
    assert isinstance(forked, Outer) and isinstance(forked.inner, Inner) and isinstance(forked.table, Shared)
    assert forked.sums.flatten().tolist() == [1, 1, 1, 2, 2, 2]
    assert forked.inner.values.tolist() == [[0, 1]] * 3 + [[2, 3]] * 3
    assert torch.equal(forked.inner.position, state.inner.position)
    assert torch.equal(forked.table.tensor, state.table.tensor)
    assert forked.nothing is None


def test_a_fork_shares_no_memory_with_the_state() -> None:
    for copies in (1, 2):
        state = make_state()
        for tensor in state_tensors(fork_state(state, copies)):
            tensor.fill_(-1)
        for tensor, before in zip(state_tensors(state), state_tensors(make_state()), strict=True):
            assert torch.equal(tensor, before)


def test_shared_tensors_are_counted_once() -> None:
    state = make_state()
    assert measure_state_bytes(state) == 4 * (2 + 4 + 6) + 8
    assert measure_state_bytes(fork_state(state, 3)) == 4 * (6 + 12 + 6) + 8
