"""Networks of equal size: the feed-forward width offsets differences in the mechanisms' parameters."""

import torch

from linformer_cli.attention.base import Attention
from linformer_cli.config import ModelConfig
from linformer_cli.errors import UsageError
from linformer_cli.model.mixers import BASELINES, find_mixer
from linformer_cli.model.pixel_model import PixelModel

# The largest allowed difference from the target number of parameters, as a share of the target.
TOLERANCE = 0.03
# Widths are multiples of this number, or of the model's width for the `boom` layer.
_UNIT = 8


def match_parameters(config: ModelConfig, wanted: int) -> ModelConfig:
    """`config` with the feed-forward width for which the model has about `wanted` parameters.

    A gated block has no feed-forward network, so the width of its values changes instead. An LSTM chooses its own width
    to have as many parameters as a block with softmax attention. Raises `UsageError` if the closest model differs by
    more than `TOLERANCE`.
    """
    mixer = find_mixer(config.attention)

    def change(width: int) -> ModelConfig:
        if issubclass(mixer, Attention) and mixer.gated:
            options = {**config.attention_options, "value_width": width}
            return config.model_copy(update={"attention_options": options})
        return config.model_copy(update={"feed_forward": width})

    if config.attention not in BASELINES:
        unit = config.width if config.feed_forward_kind == "boom" else _UNIT
        # The number of parameters is a linear function of the width.
        first, second = (count_parameters(change(width)) for width in (unit, 2 * unit))
        config = change(max(1, round((wanted - first) / (second - first)) + 1) * unit)
    found = count_parameters(config)
    if abs(found - wanted) > TOLERANCE * wanted:
        raise UsageError(
            f"'{config.attention}' cannot have {wanted:,} parameters in this network; the closest is {found:,}"
        )
    return config


def count_parameters(config: ModelConfig) -> int:
    """The number of parameters of a model."""
    with torch.device("meta"):
        return PixelModel(config).parameter_count()
