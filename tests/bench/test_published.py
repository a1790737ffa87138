"""Tests that the paper's figures are shown only for its own methods in its own networks."""

from linformer_cli.bench.published import find_published, find_published_speech


def test_the_papers_methods_have_published_figures_in_its_networks() -> None:
    for asked, figures in (
        (("mnist-paper", "linear", {"feature_map": "elu"}, "native"), (142.8, 0.644)),
        (("mnist-paper", "softmax", {}, "cached"), (7.56, 0.621)),
        (("mnist-paper", "softmax", {}, "rerun"), (0.45, 0.621)),
        (("cifar10-paper", "lsh", {"rounds": 1, "window": 16}, "reference"), (0.015, 3.39)),
        (("cifar10-paper", "lsh", {"rounds": 4}, "reference"), (0.005, 3.51)),
    ):
        found = find_published(*asked)
        assert found is not None and (found.images_per_second, found.bits_per_dim) == figures
        assert "2006.16236" in found.source and "GPU" in found.hardware["images_per_second"]
    for preset, attention, options in (
        (None, "linear", {}),
        ("mnist-small", "linear", {}),
        ("mnist-paper", "linear", {"feature_map": "relu"}),
        ("mnist-paper", "lsh", {"rounds": 2}),
        ("mnist-paper", "performer", {}),
    ):
        assert find_published(preset, attention, options, "reference") is None


def test_the_figures_of_speech_recognition_are_found_by_method() -> None:
    found = {name: find_published_speech(name, {}) for name in ("bi-lstm", "softmax", "linear")}
    assert {name: (one.error_rate, one.seconds_per_epoch) for name, one in found.items() if one} == {
        "bi-lstm": (0.1094, 1_047),
        "softmax": (0.0512, 2_711),
        "linear": (0.0808, 824),
    }
    lsh = find_published_speech("lsh", {"rounds": 4})
    assert lsh is not None and (lsh.error_rate, lsh.seconds_per_epoch) == (0.0933, 2_250)
    assert find_published_speech("lsh", {"rounds": 1}) is None
    assert find_published_speech("linear", {"feature_map": "relu"}) is None
