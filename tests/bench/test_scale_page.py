"""docs/scale.md: its predictions are what its formulas give for the real networks, its deviations what they say."""

import re
from pathlib import Path

import pytest

from linformer_cli.bench.measure.costs import count_product_flops
from linformer_cli.config import ModelConfig
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.presets import find_preset, find_preset_image

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
BATCHES = (1, 16, 64, 256)
PRODUCTS = {"float32": (10.2e9, 89.3e9, 161.3e9, 200.5e9), "bf16": (18.1e9, 234.3e9, 561.8e9, 791.6e9)}
COPY, CALLS = 42.9e9, 0.205e-3
TRAINING = {"float32": (190e9, 559), "bf16": (720e9, 123)}


@pytest.fixture(scope="module")
def networks() -> dict[str, tuple[ModelConfig, int, int]]:
    """Each preset's configuration, FLOP of a value, and bytes of sums that a step reads and writes of an image."""
    found = {}
    for preset in ("mnist-small", "mnist-paper"):
        config = ModelConfig(**find_preset(preset).model_dump(), image=find_preset_image(preset))
        model = PixelModel(config)
        state = sum(block.state_bytes(1, 784, model.dtype) for block in model._typed_blocks)
        found[preset] = config, count_product_flops(model), state
    return found


def read_rows(header: str) -> list[list[str]]:
    """The cells of the table under the line that begins with `header`."""
    lines = PAGE.read_text(encoding="utf-8").split(header)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def check(cell: str, predicted: float) -> None:
    """`9.01, 9.52 (-5 %)`: predicted, measured, and by how much the prediction is off."""
    shown, measured = (float(number) for number in re.findall(r"[\d.]+", cell)[:2])
    assert shown == pytest.approx(predicted, rel=0.012)
    if "fitted" in cell:
        assert shown == measured
    else:
        off = re.search(r"\(([+-]\d+) %\)", cell)
        assert off is not None
        assert int(off[1]) == pytest.approx(100 * (predicted / measured - 1), abs=1.0)


def test_sampling_is_what_the_formula_predicts(networks) -> None:
    rows = read_rows("| images/s, predicted and measured | batch 1 |")
    assert len(rows) == 7
    for name, *cells in rows:
        preset, engine, precision = name.replace("`", "").split(", ")
        config, flops, state = networks[preset]
        passes, calls = (3, CALLS) if engine == "textbook" else (1, 0.0)
        for batch, products, cell in zip(BATCHES, PRODUCTS[precision], cells, strict=True):
            seconds = flops * batch / products + passes * 2 * state * batch / COPY + calls * config.layers
            check(cell, batch / (784 * seconds))


def test_training_is_what_the_formula_predicts(networks) -> None:
    rows = read_rows("| images/s, predicted and measured, batch 16 |")
    assert len(rows) == 2
    for name, *cells in rows:
        config, flops, _ = networks[name.strip("`")]
        for (products, passes), cell in zip(TRAINING.values(), cells, strict=True):
            seconds = 784 * (3 * flops / products + passes * 4 * config.width * config.layers / COPY)
            check(cell, 1 / seconds)
