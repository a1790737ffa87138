"""Tests that the paper's figures are shown only for its own methods in its own networks."""

import pytest

from linformer_cli.bench.published import PUBLISHED, find_published


@pytest.mark.parametrize(
    ("preset", "attention", "options", "engine", "images_per_second", "bits_per_dim"),
    [
        ("mnist-paper", "linear", {"feature_map": "elu"}, "native", 142.8, 0.644),
        ("mnist-paper", "softmax", {}, "cached", 7.56, 0.621),
        ("mnist-paper", "softmax", {}, "rerun", 0.45, 0.621),
        ("cifar10-paper", "lsh", {"rounds": 1, "window": 16}, "textbook", 0.015, 3.39),
        ("cifar10-paper", "lsh", {"rounds": 4}, "textbook", 0.005, 3.51),
    ],
)
def test_the_papers_methods_have_published_figures(
    preset, attention, options, engine, images_per_second, bits_per_dim
) -> None:
    found = find_published(preset, attention, options, engine)
    assert found is not None
    assert (found.images_per_second, found.bits_per_dim) == (images_per_second, bits_per_dim)
    assert "2006.16236" in found.source and "GPU" in found.hardware["images_per_second"]


@pytest.mark.parametrize(
    ("preset", "attention", "options"),
    [
        (None, "linear", {}),
        ("mnist-small", "linear", {}),
        ("mnist-paper", "linear", {"feature_map": "relu"}),
        ("mnist-paper", "lsh", {"rounds": 2}),
        ("mnist-paper", "performer", {}),
    ],
)
def test_no_other_row_has_published_figures(preset, attention, options) -> None:
    assert find_published(preset, attention, options, "textbook") is None


def test_linear_is_the_fastest_method_of_the_paper() -> None:
    for preset in ("mnist-paper", "cifar10-paper"):
        of = {method: figures for (name, method), figures in PUBLISHED.items() if name == preset}
        assert len(of) == 5
        assert min(of, key=lambda method: of[method].seconds_per_image_cpu) == "linear"
        assert max(of, key=lambda method: of[method].images_per_second) == "linear"
