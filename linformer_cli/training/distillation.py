"""Distillation: learning from the predictions of trained models (Hinton 2015, arXiv 1503.02531)."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from linformer_cli.checkpoint import load_weights, reopen_checkpoint
from linformer_cli.config import RunConfig
from linformer_cli.model.pixel_model import PixelModel


class Teachers:
    """Trained models in evaluation mode. They predict images of the same shape as the model that learns from them."""

    def __init__(self, models: Sequence[PixelModel]) -> None:
        self.models = models

    @classmethod
    def load(cls, config: RunConfig, device: str) -> Self:
        """Load the models that a run learns from. Raises `CheckpointError` if one is missing or has other weights."""
        return cls([load_weights(reopen_checkpoint(origin), device) for origin in config.distill_from])

    @torch.no_grad()
    def predict(self, values: Tensor, labels: Tensor | None) -> Tensor:
        """Probabilities [B, T, levels] of the next value, for values int64 [B, T] and labels int64 [B].

        They are proportional to the geometric mean of the models' probabilities. A model without classes cannot tell
        how a class changes an image. The others tell: a class changes its log probabilities as it changes theirs, on
        average over those in which the class is optional.
        """
        logs = [_log_probabilities(model, values, labels if model.config.classes else None) for model in self.models]
        mean = torch.stack(logs).mean(dim=0)
        unaware = sum(not model.config.classes for model in self.models)
        aware = [(model, log) for model, log in zip(self.models, logs, strict=True) if model.config.optional_class]
        given = None if labels is None or not aware else labels < aware[0][0].config.classes
        if unaware and given is not None and bool(given.any()):
            changes = [log[given] - _log_probabilities(model, values[given], None) for model, log in aware]
            mean[given] += torch.stack(changes).mean(dim=0) * (unaware / len(self.models))
        return mean.softmax(dim=-1)

    def measure_loss(
        self, model: PixelModel, values: Tensor, labels: Tensor | None, share: float
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the nats [B, T] of `model`, for values int64 [B, T] and labels int64 [B].

        The loss is `share` times the cross-entropy with the predictions of the teachers, plus 1 - `share` times the
        nats.
        """
        predicted, logs = self.predict(values, labels), _log_probabilities(model, values, labels)
        nats = -logs.gather(-1, values.unsqueeze(-1)).squeeze(-1)
        return share * -(predicted * logs).sum(dim=-1) + (1 - share) * nats, nats


def _log_probabilities(model: PixelModel, values: Tensor, labels: Tensor | None) -> Tensor:
    """Log probabilities [B, T, levels] of every value, for values int64 [B, T]."""
    parameters, _ = model.attend(model.shift_values(values, labels))
    return model.head.log_probabilities(parameters)
