"""What a configuration's `attention` can name: every mechanism of attention, and the baselines that have none."""

from collections.abc import Mapping
from typing import Any

import torch

from linformer_cli.attention.base import Attention, AttentionShape
from linformer_cli.attention.catalogue import CATALOGUE, build_for_model
from linformer_cli.config import Config, ModelConfig, NetworkConfig, parse_config
from linformer_cli.errors import unknown_name

from .blocks import Block, TransformerBlock
from .gated import GatedBlock
from .lstm import LstmBlock, LstmOptions

Mixer = type[Attention] | type[LstmBlock]

BASELINES: dict[str, type[LstmBlock]] = {LstmBlock.name: LstmBlock}
# All that can mix the positions of a model, by what its configuration calls it.
MIXERS: dict[str, Mixer] = {**CATALOGUE, **BASELINES}


def find_mixer(name: str) -> Mixer:
    """The attention or baseline called `name`; raises `UsageError` with a suggestion for an unknown name."""
    if name not in MIXERS:
        raise unknown_name("attention", name, MIXERS)
    return MIXERS[name]


def parse_options(name: str, options: Mapping[str, Any]) -> Config:
    """The validated options of the attention or baseline `name`, defaults filled in.

    Raises `UsageError`, with a suggestion, for a name or an option that is not known.
    """
    options_type: type[Config] = find_mixer(name).options_type
    return parse_config(options_type, options, f"attention options of '{name}'")


def build_block(config: ModelConfig, layer: int) -> Block:
    """Block number `layer` of a model. Raises `UsageError` for a name or an option that is not known."""
    options = parse_options(config.attention, config.attention_options)
    if isinstance(options, LstmOptions):
        return LstmBlock(config, options)
    gated = CATALOGUE[config.attention].gated
    return GatedBlock(config, layer) if gated else TransformerBlock(config, layer)


def default_state_bytes(name: str, network: NetworkConfig, shape: AttentionShape) -> int:
    """Bytes of one layer's state after one whole image in float32, for mixer `name` with its default options."""
    with torch.device("meta"):  # its size alone is wanted
        if name in BASELINES:
            block = BASELINES[name](network, BASELINES[name].options_type())
            return block.state_bytes(1, shape.positions, torch.float32)
        attention = build_for_model(name, {}, shape, network.width)
        return attention.state_bytes(1, shape.positions, torch.float32)


def describe_mixing(name: str) -> str:
    """What mixes positions in a model whose `attention` is `name`, for a sentence about the model."""
    return f"{name} ({BASELINES[name].family})" if name in BASELINES else f"{name} attention"
