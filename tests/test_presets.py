"""Tests of the presets."""

import pytest
from loops import loop_over
from pydantic import ValidationError

from linformer_cli.config import ImageShape, ModelConfig
from linformer_cli.errors import UsageError
from linformer_cli.model.mixers import parse_options
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.presets import PRESETS, find_preset

DIGITS = ImageShape(height=28, width=28)


def test_presets_are_found_by_their_names() -> None:
    assert set(PRESETS) == {
        *("mnist-paper", "cifar10-paper", "mnist-small", "mnist-wide", "colour-pixel", "bytes-small", "tiny")
    }
    for name, network in PRESETS.items():
        assert find_preset(name) is network


def test_an_unknown_preset_is_refused_with_a_suggestion(raises_one_line) -> None:
    with raises_one_line(UsageError, "unknown preset 'mnist-smal'", "did you mean 'mnist-small'?"):
        find_preset("mnist-smal")


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


@pytest.mark.parametrize(
    ("name", "smallest", "largest"),
    [("mnist-small", 1_000_000, 1_060_000), ("mnist-wide", 1_050_000, 1_100_000), ("tiny", 40_000, 90_000)],
)
def test_parameter_counts_are_in_the_expected_range(name: str, smallest: int, largest: int) -> None:
    model = PixelModel(ModelConfig(**PRESETS[name].model_dump(), image=DIGITS))
    assert smallest < model.parameter_count() < largest
