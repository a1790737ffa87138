"""Compares counts of operations and memory traffic with counts made by hand."""

import pytest
import torch

from linformer_cli.bench.measure.ceilings import (
    count_product_flops,
    count_rerun_positions,
    count_state_bytes,
    list_products,
    state_traffic_bytes,
)
from linformer_cli.bench.models import preset_network
from linformer_cli.model.pixel_model import PixelModel


def test_the_papers_models_match_a_count_by_hand() -> None:
    # A layer has q, k and v, the output projection and two feed-forward products. The head gives 3 x 10 numbers.
    layer = 3 * 256 * 256 + 256 * 256 + 2 * 256 * 1024
    for preset, layers in (("mnist-paper", 8), ("cifar10-paper", 16)):
        name, config = preset_network(preset)
        with torch.device("meta"):
            model = PixelModel(config)
        assert name == preset and count_product_flops(model) == 2 * (layers * layer + 256 * 30)
        assert len(list_products(model)) == layers * 4 + 1
    assert count_rerun_positions(4) == 1 + 2 + 3 + 4


def test_an_lstm_cell_matches_a_count_by_hand(build_tiny_model) -> None:
    model = build_tiny_model(attention="lstm", attention_options={"hidden": 5})
    # Each of the two layers computes four gates of width 5 from 16 inputs and 5 hidden values, and projects 5 values to
    # 16. The head has 16 levels.
    assert count_product_flops(model) == 2 * (2 * (16 * 20 + 5 * 20 + 5 * 16) + 16 * 16)


def test_the_parts_of_a_layer_match_a_count_by_hand(build_tiny_model) -> None:
    plain = build_tiny_model()
    model = build_tiny_model(short_convolution=4, normalise_keys=True, norm_heads=True, output_gate=True)
    # In each of two layers, the gate projects 16 inputs to 2 heads of 8; the convolution keeps 3 positions of 3 x 16.
    assert count_product_flops(model) - count_product_flops(plain) == 2 * 2 * 16 * 16
    assert count_state_bytes(model, 5) - count_state_bytes(plain, 5) == 5 * 2 * 3 * 48 * 4
    traffic = [state_traffic_bytes(each, 5) for each in (model, plain)]
    assert traffic[0] - traffic[1] == 2 * 5 * 2 * 3 * 48 * 4


@pytest.mark.parametrize("batch", [1, 3])
def test_the_traffic_of_a_step_matches_a_count_by_hand(build_tiny_model, batch) -> None:
    linear = build_tiny_model()
    assert state_traffic_bytes(linear, batch) == 2 * linear.state_bytes(batch)
    softmax = build_tiny_model(attention="softmax")
    whole = softmax.state_bytes(batch)
    # On average, a step reads half of the cache plus half a position. It writes one of 64 positions.
    assert state_traffic_bytes(softmax, batch) == pytest.approx(whole * 65 / 128 + whole / 64, rel=0.01)
    # In int8, caches are bfloat16, and running sums are float32 as without int8.
    assert state_traffic_bytes(softmax, batch, torch.int8) == pytest.approx(
        state_traffic_bytes(softmax, batch) / 2, 0.01
    )
    assert count_state_bytes(linear, batch, torch.int8) == pytest.approx(linear.state_bytes(batch), 0.01)
    lstm = build_tiny_model(attention="lstm")
    assert state_traffic_bytes(lstm, batch) == 2 * lstm.state_bytes(batch)
    for name in ("lsh", "longformer", "sparse"):
        assert state_traffic_bytes(build_tiny_model(attention=name), batch) is None
