"""Completes an image: kept values stay, and the others are drawn value by value."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linformer_cli.config import PARTICLES
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.system.memory import require_memory, work_in_batches
from .choose import UniformStreams, check_guidance
from .decode import Sampler
from .particles import KeptImage

_STATE_MARGIN = 1.2  # an engine needs so many times the memory of the states


@dataclass(frozen=True)
class Completion:
    """Completions of one image of which the values `kept` bool [T] were given.

    `values` int64 [n, T] includes them. The other figures are bits/dim of the kept part, of the rest of each
    completion, and of the rest of the original, given all values before, NaN without values. If the kept values are not
    the first ones, there are `particles` for each completion, and their bits/dim are those of their estimated
    probability. If Ctrl-C `stopped` the work, n is the number of finished completions.
    """

    kept: Tensor
    values: Tensor
    kept_bits_per_dim: float
    completed_bits_per_dim: list[float]
    original_rest_bits_per_dim: float
    particles: tuple[KeptImage, ...] = ()
    stopped: bool = False


@torch.no_grad()
def complete_values(
    sampler: Sampler,
    original: Tensor,
    kept: Tensor,
    count: int,
    label: int | None = None,
    on_halve: Callable[[int], None] | None = None,
    particles: int = PARTICLES,
) -> Completion:
    """Return `count` completions of `original` int64 [T] that keep its values `kept` bool [T]. `label` is its class.

    If the first values are kept, all completions are drawn from the exact distribution. Otherwise, each is one of its
    own `particles` (`Engine.keep_values`), whose distribution approaches the exact one with their number. The random
    numbers of completion i depend only on (seed, i). Ctrl-C keeps finished completions. Bits/dim are without guidance,
    except for the estimated probability of the kept part. Raises `LintxError` if the particles need more memory than is
    free, and what `check_guidance` raises.
    """
    model, known = sampler.model, int(kept.sum())
    check_guidance(model, sampler.filters.guidance, label is not None)
    labels = None if label is None else torch.tensor([label])
    starts = sampler.start_tokens(1, labels)
    tokens = torch.cat([starts.unsqueeze(1), original[:known].to(model.device).expand(len(starts), -1)], dim=1)

    def draw(indices: Sequence[int]) -> tuple[Tensor, Tensor, list[KeptImage]]:
        """Return completions with these indices from the exact distribution, [n, T], and the bits of their values."""
        copies = len(indices)
        with sampler.engines.start(copies * len(starts)) as engine:
            streams = UniformStreams(sampler.seed, indices)
            rest = engine.draw_values(engine.read(tokens), streams, sampler.filters, len(original) - known).long()
        completed = torch.cat([original[:known].expand(copies, -1), rest], dim=1)
        return completed, _bits(model, completed, labels), []

    def keep(indices: Sequence[int]) -> tuple[Tensor, Tensor, list[KeptImage]]:
        """Return the completion with this index from its particles."""
        with sampler.engines.start(particles * len(starts)) as engine:
            given, streams = torch.where(kept, original, -1), UniformStreams(sampler.seed, indices)
            image = engine.keep_values(starts, given, streams, sampler.filters)
        return image.values.unsqueeze(0), _bits(model, image.values.unsqueeze(0), labels), [image]

    is_exact, parts, stopped = bool(kept[:known].all()), [], False
    # An engine that is kept has its memory.
    if not is_exact and sampler.engines.batch != (rows := particles * len(starts)):
        require_memory(_STATE_MARGIN * model.state_bytes(rows), str(model.device), f"{particles:,} particles")
    try:
        for part in work_in_batches(range(count), count if is_exact else 1, draw if is_exact else keep, on_halve):
            parts.append(part)
    except KeyboardInterrupt:
        if not parts:
            raise
        stopped = True
    completed, bits = (torch.cat(each) for each in list(zip(*parts, strict=True))[:2])
    images = tuple(image for *_, found in parts for image in found)
    original_bits = _bits(model, original.unsqueeze(0), labels)[0]
    kept_bits = float(original_bits[kept].mean()) if known else math.nan
    if images:  # the mean of the estimated probabilities is unbiased
        logs = torch.tensor([-image.bits for image in images], dtype=torch.float64) * math.log(2)
        kept_bits = (math.log(len(images)) - float(logs.logsumexp(dim=0))) / math.log(2) / known
    rest = bits[:, ~kept].mean(dim=1).tolist()
    return Completion(kept, completed, kept_bits, rest, float(original_bits[~kept].mean()), images, stopped)


def _bits(model: PixelModel, values: Tensor, label: Tensor | None) -> Tensor:
    """Return bits of each value, float64 [B, T] on the CPU, for values int64 [B, T] of one class int64 [1]."""
    labels = None if label is None else label.expand(len(values)).to(model.device)
    return model.nats(values.to(model.device), labels).cpu().double() / math.log(2)
