"""Batches of utterances of similar length."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .utterances import Utterance


@dataclass(frozen=True)
class Batch:
    """Features [B, T, 40] with zeros after `lengths` [B] frames, and symbols [B, S] after `counts` [B] of them."""

    features: Tensor
    lengths: Tensor
    symbols: Tensor
    counts: Tensor

    def to(self, device: str) -> "Batch":
        return Batch(*(part.to(device) for part in (self.features, self.lengths, self.symbols, self.counts)))


def group_by_length(utterances: Sequence[Utterance], frames: int) -> list[list[Utterance]]:
    """Group utterances of similar length, longest first. A group has at most `frames` frames with its padding.

    An utterance that is longer than `frames` is a group of its own.
    """
    groups: list[list[Utterance]] = []
    for one in sorted(utterances, key=lambda one: one.frames, reverse=True):
        if groups and groups[-1][0].frames * (len(groups[-1]) + 1) <= frames:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def make_batches(groups: Sequence[Sequence[Utterance]], seed: int | None = None) -> Iterator[Batch]:
    """Yield a batch for each group, in an order drawn from `seed` (None: as given)."""
    order = torch.arange(len(groups))
    if seed is not None:
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))
    for place in order.tolist():
        group = groups[place]
        yield Batch(
            pad_sequence([one.features for one in group], batch_first=True),
            torch.tensor([one.frames for one in group]),
            pad_sequence([one.symbols for one in group], batch_first=True),
            torch.tensor([len(one.symbols) for one in group]),
        )
