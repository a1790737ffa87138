"""The catalogue: every attention by name. A new mechanism is one file, one line here, its test and its docs page."""

from collections.abc import Mapping
from typing import Any

from linformer_cli.config import OptionValue, parse_config
from linformer_cli.errors import unknown_name

from .base import Attention, AttentionOptions, AttentionShape
from .bigbird import BigbirdAttention
from .deltanet import DeltanetAttention
from .flash import FlashAttention
from .gau import GauAttention
from .gla import GlaAttention
from .linear import LinearAttention
from .linformer import LinformerAttention
from .long_short import LongShortAttention
from .longformer import LongformerAttention
from .lsh import LshAttention
from .nystrom import NystromAttention
from .performer import PerformerAttention
from .retention import RetentionAttention
from .rfa import RfaAttention
from .softmax import SoftmaxAttention
from .sparse import SparseAttention

CATALOGUE: dict[str, type[Attention]] = {
    mechanism.name: mechanism
    for mechanism in (
        SoftmaxAttention,
        LinearAttention,
        PerformerAttention,
        RfaAttention,
        RetentionAttention,
        GlaAttention,
        DeltanetAttention,
        LshAttention,
        LinformerAttention,
        NystromAttention,
        LongformerAttention,
        BigbirdAttention,
        LongShortAttention,
        SparseAttention,
        GauAttention,
        FlashAttention,
    )
}


def find_attention(name: str) -> type[Attention]:
    """The mechanism called `name`; raises `UsageError` with a suggestion for an unknown name."""
    if name not in CATALOGUE:
        raise unknown_name("attention", name, CATALOGUE)
    return CATALOGUE[name]


def parse_options(name: str, options: Mapping[str, Any]) -> AttentionOptions:
    """The validated options of mechanism `name`, defaults filled in; raises `UsageError` for what it does not know."""
    return parse_config(find_attention(name).options_type, options, f"attention options of '{name}'")


def build_attention(name: str, options: Mapping[str, OptionValue], shape: AttentionShape) -> Attention:
    """Mechanism `name` with `options`, for the sizes in `shape`."""
    return find_attention(name)(parse_options(name, options), shape)


def build_for_model(name: str, options: Mapping[str, OptionValue], shape: AttentionShape, width: int) -> Attention:
    """Mechanism `name` in the sizes it has in a model of `width` with the heads of `shape`: some choose their own."""
    mechanism, parsed = find_attention(name), parse_options(name, options)
    return mechanism(parsed, mechanism.fit_shape(parsed, shape, width))
