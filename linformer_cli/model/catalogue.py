"""What a configuration's `attention` can name: every mechanism of attention, and the baselines that have none."""

from collections.abc import Mapping
from typing import Any

from linformer_cli.attention import CATALOGUE
from linformer_cli.attention.base import Attention
from linformer_cli.config import Config, ModelConfig, parse_config
from linformer_cli.errors import unknown_name

from .blocks import Block, TransformerBlock
from .gated import GatedBlock
from .lstm import LstmBlock, LstmOptions

BASELINES: dict[str, type[LstmBlock]] = {LstmBlock.name: LstmBlock}


def parse_options(name: str, options: Mapping[str, Any]) -> Config:
    """The validated options of the attention or baseline `name`, defaults filled in.

    Raises `UsageError`, with a suggestion, for a name or an option that is not known.
    """
    known: dict[str, type[Attention] | type[LstmBlock]] = {**CATALOGUE, **BASELINES}
    if name not in known:
        raise unknown_name("attention", name, known)
    options_type: type[Config] = known[name].options_type
    return parse_config(options_type, options, f"attention options of '{name}'")


def build_block(config: ModelConfig, layer: int) -> Block:
    """Block number `layer` of a model. Raises `UsageError` for a name or an option that is not known."""
    options = parse_options(config.attention, config.attention_options)
    if isinstance(options, LstmOptions):
        return LstmBlock(config, options)
    gated = CATALOGUE[config.attention].gated
    return GatedBlock(config, layer) if gated else TransformerBlock(config, layer)


def describe_mixing(name: str) -> str:
    """What mixes positions in a model whose `attention` is `name`, for a sentence about the model."""
    return f"{name} ({BASELINES[name].family})" if name in BASELINES else f"{name} attention"
