"""Random streams, filters, guidance, and the draw of a value from a distribution. No global random state is used."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linformer_cli.config import CLASS_GUIDANCE, LARGEST_GUIDANCE
from linformer_cli.errors import UsageError
from linformer_cli.model.heads import invert_cumulative
from linformer_cli.model.pixel_model import PixelModel
from .philox import draw_uniforms

_BLOCK = 64


@dataclass(frozen=True)
class Filters:
    """Changes to a distribution before drawing, in this order: guidance (see `guide`), temperature, top-k, top-p.

    Log probabilities are divided by `temperature`. Then only the `top_k` likeliest values are kept, and of these only
    the smallest set of likeliest values whose total probability reaches `top_p`. The result is renormalised. Filters
    act on the probabilities of values, so they mean the same for every head. The default changes nothing.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    guidance: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.guidance <= LARGEST_GUIDANCE:
            raise UsageError(f"--guidance must be from 0 to {LARGEST_GUIDANCE}, found {self.guidance}")
        if not 0 < self.temperature < float("inf"):
            hint = "to draw only the likeliest value, use --top-k 1"
            raise UsageError(f"--temperature must be above 0 and finite, found {self.temperature}; {hint}")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"--top-k must be at least 1, found {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p must be above 0 and at most 1, found {self.top_p}")

    @property
    def active(self) -> bool:
        return self != Filters()

    @property
    def rows_per_image(self) -> int:
        """The number of rows that an engine has for each image: with guidance, one with the class and one without."""
        return 1 if self.guidance == 1 else 2


def choose_guidance(model: PixelModel, weight: float | None, has_class: bool) -> float:
    if weight is not None:
        return weight
    return CLASS_GUIDANCE if has_class and model.config.optional_class else 1.0


def check_guidance(model: PixelModel, weight: float, has_class: bool) -> None:
    """Raise `UsageError` if images of `model`, with a class or without, cannot be drawn with this guidance."""
    if weight == 1:
        return
    if not model.config.optional_class:
        raise UsageError("--guidance needs a model that also draws without a class, trained with --hide-class")
    if not has_class:
        raise UsageError("--guidance compares drawing with a class and without; choose a class with --class")


class UniformStreams:
    """One stream of random numbers per image, determined by (seed, image index) and drawn in blocks."""

    def __init__(self, seed: int, indices: Sequence[int]) -> None:
        self.seed, self.indices = seed, indices
        self.taken = 0  # numbers of every stream so far
        self._first, self._block = 0, torch.empty(0, len(indices), dtype=torch.float64)

    def take(self) -> Tensor:
        """Return the next uniform number in [0, 1) of every stream: float64 [B] on the CPU."""
        if not self._first <= self.taken < self._first + len(self._block):
            self._first = self.taken
            self._block = draw_uniforms(self.seed, self.indices, self.taken, _BLOCK, torch.device("cpu"))
        self.taken += 1
        return self._block[self.taken - 1 - self._first]

    def take_many(self, count: int, device: torch.device) -> Tensor:
        """Return the numbers of the next `count` calls of `take`: float64 [count, B], computed on `device`."""
        numbers = draw_uniforms(self.seed, self.indices, self.taken, count, device)
        self.skip(count)
        return numbers

    def skip(self, count: int) -> None:
        self.taken += count


def guide(log_probabilities: Tensor, weight: float) -> Tensor:
    """Guided log probabilities [B, levels], not normalised, from those of B images with and then without their class.

    Probabilities are p(x) (p(x | c) / p(x))^weight (Ho and Salimans 2022, arXiv 2207.12598).
    """
    given, free = log_probabilities.chunk(2)
    return free + weight * (given - free)


def filter_log_probabilities(log_probabilities: Tensor, filters: Filters) -> Tensor:
    """Log probabilities [..., levels] after `filters`, renormalised; dropped values are -inf.

    With guidance, the first dimension given is twice as long; see `guide`. Of equals, smaller values are kept.
    """
    if log_probabilities.device.type != "mps":  # MPS has no float64, so a tiny temperature or top-p becomes 0
        log_probabilities = log_probabilities.double()
    if filters.guidance != 1:
        log_probabilities = guide(log_probabilities, filters.guidance)
    # Subtract the maximum, so that the likeliest value stays at 0 at any temperature.
    likeliest = log_probabilities.max(dim=-1, keepdim=True).values
    filtered = ((log_probabilities - likeliest) / filters.temperature).log_softmax(dim=-1)
    if filters.top_k is None and filters.top_p is None:
        return filtered
    ordered, order = filtered.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if filters.top_k is not None:
        keep[..., filters.top_k :].fill_(False)
    if filters.top_p is not None:
        mass = ordered.masked_fill(~keep, -torch.inf).softmax(dim=-1)
        keep &= mass.cumsum(dim=-1) - mass < filters.top_p
    return filtered.masked_fill(~torch.zeros_like(keep).scatter(-1, order, keep), -torch.inf).log_softmax(dim=-1)


def draw_filtered(log_probabilities: Tensor, uniforms: Tensor, filters: Filters) -> Tensor:
    """Draw the next values int64 [B] after `filters`, from [B, levels] (guidance: [2 B, levels]) and uniforms [B]."""
    return invert_cumulative(filter_log_probabilities(log_probabilities, filters).exp(), uniforms)[0]
