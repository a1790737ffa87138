"""Mechanisms with options, their names on the command line and in rows, and the softmax model of the same size."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from linformer_cli.attention.catalogue import find_attention, list_attentions
from linformer_cli.errors import UsageError
from .mixers import find_mixer, list_mixers, parse_options
from .pixel_model import PixelModel

# The mechanism with which all others are compared.
SOFTMAX = "softmax"

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Variant:
    """A mechanism with all its options, and its name in rows: `lsh-4` for lsh with 4 rounds."""

    label: str
    attention: str
    options: dict[str, Any]

    @property
    def described(self) -> dict[str, Any]:
        """The fields of a row about the mechanism."""
        return {"name": self.label, "attention": self.attention, "attention_options": self.options}


def list_variants(baselines: bool = False) -> list[Variant]:
    """List every mechanism of the catalogue with its defaults. With `baselines`, the LSTM is included."""
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
    unknown mechanism or option, and for the LSTM unless `baselines` is set.
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
        raise UsageError(
            f"attention '{entry}': '{label}' cannot be a name; begin with NAME=, a name of letters, digits, . _ -"
        )
    return Variant(label, attention, options)


def build_softmax_twin(model: PixelModel) -> PixelModel:
    """Build a softmax model of the same size with random weights. Its speed does not depend on the weights."""
    config = model.config.model_copy(update={"attention": SOFTMAX, "attention_options": {}})
    return PixelModel(config).to(device=model.device, dtype=model.dtype).eval()
