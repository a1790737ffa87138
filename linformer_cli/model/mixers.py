"""Token mixers by their name in a configuration: the attention mechanisms and the baselines."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from linformer_cli.attention.base import Attention, AttentionOptions, AttentionShape, measure_state_bytes
from linformer_cli.attention.catalogue import find_attention, fit_attention, list_attentions
from linformer_cli.config import ModelConfig, NetworkConfig
from linformer_cli.documents import Config, parse_config
from linformer_cli.errors import UsageError
from .attention_layer import build_convolution
from .blocks import Block, TransformerBlock
from .gated_block import GatedBlock
from .lstm import LstmBlock, LstmOptions
from .none import NoneBlock, NoneOptions

Baseline = type[LstmBlock] | type[NoneBlock]
Mixer = type[Attention] | Baseline

BASELINES: dict[str, Baseline] = {LstmBlock.name: LstmBlock, NoneBlock.name: NoneBlock}


def list_mixers() -> list[str]:
    return [*list_attentions(), *BASELINES]


def find_mixer(name: str) -> Mixer:
    """Find the mechanism or baseline called `name`; raises `UsageError` with a suggestion for an unknown name."""
    return BASELINES[name] if name in BASELINES else find_attention(name, BASELINES)


def parse_options(name: str, options: Mapping[str, Any]) -> Config:
    """Return the options of mixer `name`, checked and with defaults. Raises `UsageError` with a suggestion."""
    options_type: type[Config] = find_mixer(name).options_type
    return parse_config(options_type, options, f"attention options of '{name}'")


def build_attention(name: str, options: Mapping[str, Any], shape: AttentionShape) -> Attention:
    """Build the mechanism `name` with `options` and the sizes of `shape`. Raises what `parse_options` raises."""
    return find_attention(name)(cast(AttentionOptions, parse_options(name, options)), shape)


def has_attention_layer(name: str) -> bool:
    """Return whether blocks of mechanism or baseline `name` have an attention layer, whose parts are settings."""
    mixer = find_mixer(name)
    return issubclass(mixer, Attention) and not (mixer.gated or mixer.shared_key_value)


def check_parts(network: NetworkConfig, options: Config) -> None:
    """Raise `UsageError` if the block of `network.attention`, with `options`, cannot have `network.layer_parts`."""
    parts = network.layer_parts
    if parts and not has_attention_layer(network.attention):
        raise UsageError(f"the block of '{network.attention}' has no attention layer; drop {' and '.join(parts)}")
    if network.output_gate and getattr(options, "output_gate", False):
        hint = "drop output_gate, or give it the attention option output_gate=false"
        raise UsageError(f"'{network.attention}' has its own output gate; {hint}")


def build_blocks(config: ModelConfig) -> list[Block]:
    """Build the blocks of a model. Raises what `parse_options` and `check_parts` raise."""
    options = parse_options(config.attention, config.attention_options)
    check_parts(config, options)
    return [_build_block(config, options, layer) for layer in range(config.layers)]


def _build_block(config: ModelConfig, options: Config, layer: int) -> Block:
    if baseline := _build_baseline(config, options):
        return baseline
    assert isinstance(options, AttentionOptions)
    shape = AttentionShape(
        heads=config.heads,
        key_width=config.head_width,
        value_width=config.head_width,
        positions=config.block_image.positions,
        row=config.block_image.row_for_attention,
        layer=layer,
    )
    attention = fit_attention(config.attention, options, shape, config.width)
    return GatedBlock(config, attention) if attention.gated else TransformerBlock(config, attention)


def _build_baseline(network: NetworkConfig, options: Config) -> LstmBlock | NoneBlock | None:
    if isinstance(options, LstmOptions):
        return LstmBlock(network, options)
    return NoneBlock(network) if isinstance(options, NoneOptions) else None


def default_state_bytes(name: str, network: NetworkConfig, shape: AttentionShape) -> int:
    """Return bytes of one layer's state after one whole image, in float32, for mixer `name` with default options."""
    options, meta = find_mixer(name).options_type(), torch.device("meta")
    with meta:  # only the size of the state is needed
        if baseline := _build_baseline(network, options):
            return baseline.state_bytes(1, shape.positions, torch.float32)
        assert isinstance(options, AttentionOptions)
        attention = fit_attention(name, options, shape, network.width)
        has_layer = not (attention.gated or attention.shared_key_value)
        convolution = build_convolution(network, attention) if has_layer else None
        recent = None if convolution is None else convolution.init_recent(1, meta, torch.float32)
        return measure_state_bytes((recent, attention.init_state(1, shape.positions, meta, torch.float32)))


def describe_mixing(name: str) -> str:
    return f"{name} ({BASELINES[name].family})" if name in BASELINES else f"{name} attention"


SOFTMAX = "softmax"  # the mechanism with which all others are compared

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Variant:
    """A mechanism with all its options, and its name in rows: `lsh-4` for lsh with 4 rounds."""

    label: str
    attention: str
    options: dict[str, Any]

    @property
    def described(self) -> dict[str, Any]:
        return {"name": self.label, "attention": self.attention, "attention_options": self.options}


def list_variants(baselines: bool = False) -> list[Variant]:
    return [parse_variant(name, baselines) for name in (list_mixers() if baselines else list_attentions())]


def parse_variants(entries: Sequence[str], baselines: bool = False) -> list[Variant]:
    """Return one variant per entry. Raises `UsageError` if two variants have the same name."""
    variants = [parse_variant(entry.strip(), baselines) for entry in entries]
    labels = [variant.label for variant in variants]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(f"attention '{label}' is given twice; name one of them: NAME={label}")
    return variants


def parse_variant(entry: str, baselines: bool = False) -> Variant:
    """Parse `lsh`, `lsh:rounds=4`, `lsh:rounds=4:window=16`, or `wide=lsh:window=64`, which sets the name `wide`.

    Without a name, the label joins the mechanism and the given values, as in `lsh-4-16`. Raises `UsageError` for an
    unknown mechanism or option, and for a baseline unless `baselines` is set.
    """
    head, *pairs = entry.split(":")
    label, equals, attention = head.rpartition("=")
    find_mixer(attention) if baselines else find_attention(attention)
    given: dict[str, str] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key or key in given:
            raise UsageError(f"attention '{entry}': options are written :KEY=VALUE, each once, found ':{pair}'")
        given[key] = value
    options = parse_options(attention, given).model_dump(exclude_none=True)
    label = label if equals else "-".join([attention, *given.values()])
    if not _LABEL.fullmatch(label):
        raise UsageError(f"attention '{entry}': '{label}' cannot be a name; begin with NAME= of letters, digits, . _ -")
    return Variant(label, attention, options)
