"""Guidance: images follow their class more closely (Ho and Salimans 2022, arXiv 2207.12598)."""

import torch
from torch import Tensor

from linformer_cli.config import CLASS_GUIDANCE, LARGEST_GUIDANCE
from linformer_cli.errors import LintxError, UsageError
from linformer_cli.model.heads import CategoricalHead
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.system.signals import Check, never_stop

from .choose import Filters, UniformStreams, draw_filtered
from .engines import Engine
from .engines.base import DAMAGED


def choose_guidance(model: PixelModel, weight: float | None, has_class: bool) -> float:
    """Return `weight`, or if it is None, the default for images of `model` with a class or without."""
    if weight is not None:
        return weight
    return CLASS_GUIDANCE if has_class and model.config.optional_class else 1.0


def check_guidance(model: PixelModel, weight: float, has_class: bool) -> None:
    """Raise `UsageError` if images of `model`, with a class or without, cannot be drawn with this guidance."""
    if not 0 <= weight <= LARGEST_GUIDANCE:
        raise UsageError(f"--guidance must be from 0 to {LARGEST_GUIDANCE}, found {weight}")
    if weight == 1:
        return
    if not model.config.optional_class:
        raise UsageError("--guidance needs a model that also draws without a class, trained with --hide-class")
    if not has_class:
        raise UsageError("--guidance compares drawing with a class and without; choose a class with --class")


def guide(log_probabilities: Tensor, weight: float) -> Tensor:
    """Guided log probabilities [B, levels], not normalised, from those of B images with and then without their class.

    With p(x | c) and p(x), the result is proportional to p(x) (p(x | c) / p(x))^weight for every value x.
    """
    given, free = log_probabilities.chunk(2)
    return free + weight * (given - free)


@torch.no_grad()
def draw_guided(
    weight: float,
    engine: Engine,
    parameters: Tensor,
    streams: UniformStreams,
    filters: Filters,
    count: int,
    before_step: Check = never_stop,
) -> Tensor:
    """Do what `Engine.draw_values` does, for half as many images as the engine has rows.

    Rows b and B + b of the engine, and of `parameters`, draw the same image: the first with its class, the second
    without. NaN and infinity are reported only at the end.
    """
    head, values = engine.model.head, torch.empty(count, engine.batch // 2, dtype=torch.uint8)
    for number in range(count):
        before_step()
        uniforms = streams.take()
        if isinstance(head, CategoricalHead):  # logits are log probabilities up to a constant
            drawn = engine.draw(guide(parameters.float(), weight), uniforms, filters)
        else:
            drawn = draw_filtered(guide(head.log_probabilities(parameters), weight), uniforms, filters)
        drawn = drawn.clamp(0, head.levels - 1)  # a draw from NaN may give any number
        values[number] = drawn
        if number < count - 1:
            parameters = engine.step(torch.cat([drawn, drawn]))
    if not bool(torch.isfinite(parameters).all()):
        raise LintxError(DAMAGED)
    return values.T.contiguous()
