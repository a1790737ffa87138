"""Tests of the presets."""

import pytest
from loops import loop_over
from pydantic import ValidationError

from linformer_cli.model.mixers import parse_options
from linformer_cli.presets import PRESETS


@loop_over("name", PRESETS)
def test_presets_have_valid_attention_options_and_are_frozen(name: str) -> None:
    network = PRESETS[name]
    parse_options(network.attention, network.attention_options)
    with pytest.raises(ValidationError, match="frozen"):
        network.layers = 1  # type: ignore[misc]


def test_the_paper_presets_are_the_models_of_section_4_2() -> None:
    digits, photographs = PRESETS["mnist-paper"], PRESETS["cifar10-paper"]
    assert (digits.layers, photographs.layers) == (8, 16)
    assert photographs.model_copy(update={"layers": 8}) == digits
    assert (digits.heads, digits.head_width, digits.width, digits.feed_forward) == (8, 32, 256, 1024)
    assert (digits.norm, digits.activation, digits.embedding, digits.context) == ("post", "relu", "paper", "previous")
    assert (digits.head, digits.mixtures, digits.dropout) == ("mixture", 10, 0.1)
