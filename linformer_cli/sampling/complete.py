"""Completes an image: the known values are read once, and the rest is drawn value by value."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linformer_cli.config import ImageShape
from linformer_cli.errors import UsageError
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.system.memory import work_in_batches

from .choose import UniformStreams, check_guidance
from .decode import Sampler


@dataclass(frozen=True)
class Completion:
    """Completions of one image whose first `known` values were given.

    `values` int64 [n, T] includes the known values. The other fields are the bits/dim of the known part, of the rest of
    each completion, and of the rest of the original. They are NaN for a part without values.
    """

    known: int
    values: Tensor
    kept_bits_per_dim: float
    completed_bits_per_dim: list[float]
    original_rest_bits_per_dim: float


def parse_keep(text: str, shape: ImageShape) -> int:
    """The number of values that `--keep` keeps: `top:0.5` (fraction), `top:14rows`, `top:392px` or `top:50%`.

    An integer without a unit means rows. Raises `UsageError` for any other text, and if nothing is left to complete.
    """
    side, _, amount = text.strip().lower().partition(":")
    if side in ("left", "right", "bottom"):
        raise UsageError(f"--keep {text}: a model that draws row by row from the top can only keep the top")
    wanted = f"--keep takes top:0.5 (a fraction), top:14rows or top:392px, found '{text}'"
    units = (("rows", shape.values_per_row), ("row", shape.values_per_row), ("px", shape.channels), ("%", None))
    unit, scale = next(((unit, scale) for unit, scale in units if amount.endswith(unit)), ("", None))
    try:
        number = float(amount.removesuffix(unit)) if side == "top" else math.nan
    except ValueError:
        number = math.nan
    counted = scale is not None or ("." not in amount and not unit)
    if not 0 <= number < math.inf or (counted and number != int(number)):
        raise UsageError(wanted)
    if counted:
        kept = int(number) * (scale or shape.values_per_row)
    else:
        fraction = number / 100 if unit == "%" else number
        if fraction > 1:
            raise UsageError(wanted)
        kept = round(fraction * shape.height * shape.width) * shape.channels
    if kept >= shape.positions:
        raise UsageError(f"--keep {text} keeps the whole image of {shape.height} rows: nothing is left to complete")
    return kept


@torch.no_grad()
def complete_values(
    sampler: Sampler,
    original: Tensor,
    known: int,
    count: int,
    label: int | None = None,
    on_halve: Callable[[int], None] | None = None,
) -> Completion:
    """Return `count` completions of `original` int64 [T] from its first `known` values. `label` is its class, if any.

    The known values are read once for all completions. As in sampling, the random numbers of completion i depend only
    on (seed, i). `work_in_batches` explains `on_halve`. Bits/dim are those of the model without guidance.
    Raises what `check_guidance` raises.
    """
    model = sampler.model
    check_guidance(model, sampler.filters.guidance, label is not None)
    labels = None if label is None else torch.tensor([label])
    starts = sampler.start_tokens(1, labels).unsqueeze(1)
    tokens = torch.cat([starts, original[:known].to(model.device).expand(len(starts), -1)], dim=1)

    def draw(indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the completions with these indices, [n, T], and the bits of their values."""
        copies = len(indices)
        with sampler.engines.start(copies * len(starts)) as engine:
            streams = UniformStreams(sampler.seed, indices)
            rest = engine.draw_values(engine.read(tokens), streams, sampler.filters, len(original) - known).long()
        completed = torch.cat([original[:known].expand(copies, -1), rest], dim=1)
        return completed, _bits(model, completed, labels)

    completed, bits = map(torch.cat, zip(*work_in_batches(range(count), count, draw, on_halve), strict=True))
    original_bits = _bits(model, original.unsqueeze(0), labels)[0]
    kept = float(original_bits[:known].mean()) if known else math.nan
    return Completion(known, completed, kept, bits[:, known:].mean(dim=1).tolist(), float(original_bits[known:].mean()))


def _bits(model: PixelModel, values: Tensor, label: Tensor | None) -> Tensor:
    """Bits of each value, float64 [B, T] on the CPU, for values int64 [B, T] of one class int64 [1]."""
    labels = None if label is None else label.expand(len(values)).to(model.device)
    return model.nats(values.to(model.device), labels).cpu().double() / math.log(2)
