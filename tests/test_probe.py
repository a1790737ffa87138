"""Tests of the precision that `auto` chooses by a short measurement."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from linformer_cli import probe
from linformer_cli.probe import choose_precision, measure_bf16_gain, measure_gain, remember
from linformer_cli.sampling import precision as sampling_precision
from linformer_cli.sampling.engines import ENGINES, NATIVE, REFERENCE
from linformer_cli.sampling.precision import choose_formats, choose_sampling_precision


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provides the file of remembered figures in an empty cache."""
    monkeypatch.setenv("LINTX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "measured.json"


def gives(gain: float, asked: list[object] | None = None) -> Callable[..., float]:
    return lambda *arguments: (asked if asked is not None else []).append(arguments) or gain


def test_a_requested_precision_is_used() -> None:
    for wanted in ("fp32", "bf16"):
        assert choose_precision(wanted, "cpu").value == wanted


@pytest.mark.parametrize(("gain", "chosen"), [(4.0, "bf16"), (1.04, "fp32"), (0.5, "fp32")])
def test_auto_trains_on_a_cpu_in_the_faster_format(monkeypatch, gain, chosen) -> None:
    asked = []
    monkeypatch.setattr(probe, "measure_bf16_gain", gives(gain, asked))
    for _ in range(2):
        choice = choose_precision("auto", "cpu", 64, 96)
        assert (choice.value, choice.reason) == (chosen, f"bf16 is {gain:.2g} times as fast as fp32 here")
    assert asked == [(64, 96)], "the second choice must use the remembered figure"


@pytest.mark.parametrize(("supported", "chosen"), [(True, "bf16"), (False, "fp32")])
def test_auto_trains_on_a_gpu_in_bf16_if_it_multiplies_bf16(monkeypatch, supported, chosen) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    assert choose_precision("auto", "cuda:1").value == chosen
    assert choose_precision("auto", "mps").value == "fp32"


def test_measuring_the_gain_has_no_side_effects(monkeypatch) -> None:
    """Neither the number of threads nor the random state of the process changes."""
    measure_bf16_gain.cache_clear()
    used: list[int] = []
    set_threads = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda count: used.append(count) or set_threads(count))
    before, state = torch.get_num_threads(), torch.get_rng_state()
    with torch.no_grad():
        assert 0.001 < measure_bf16_gain(16, 24) < 1000
    assert used == [1, before] and torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)
    measure_bf16_gain(16, 24)
    assert len(used) == 2, "the gain must be measured only once in a process"


def test_a_gain_compares_the_shortest_times(monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def takes(*seconds: float) -> Callable[[], None]:
        left = list(seconds)

        def work() -> None:
            clock[0] += left.pop(0)

        return work

    # The first times are warm-ups. Nothing is timed after 0.2 s.
    assert measure_gain(takes(9, 0.06, 0.08), takes(9, 0.04, 0.03)) == pytest.approx(2)


@pytest.mark.parametrize(("gain", "chosen"), [(2.0, "int8"), (0.96, "int8"), (0.9, "fp32")])
def test_auto_samples_in_int8_unless_fp32_is_clearly_faster(monkeypatch, build_tiny_model, gain, chosen) -> None:
    monkeypatch.setattr(sampling_precision, "measure_gain", gives(gain))
    model = build_tiny_model()
    choice = choose_sampling_precision(model, NATIVE)
    assert (choice.value, choice.reason) == (chosen, f"int8 is {gain:.2g} times as fast as fp32 here")
    assert choose_sampling_precision(model, REFERENCE).value == "fp32"


def test_the_sampling_measurement_steps_the_model_in_both_formats(monkeypatch, build_tiny_model) -> None:
    """Neither the model nor the random state changes."""
    model = build_tiny_model()
    before, state = {name: weight.clone() for name, weight in model.state_dict().items()}, torch.get_rng_state()
    found = choose_sampling_precision(model, NATIVE)
    assert "times as fast" in found.reason
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(sampling_precision, "measure_gain", pytest.fail)
    assert choose_sampling_precision(model, NATIVE) == found, "the second choice must use the remembered figure"


def test_a_table_has_one_precision_for_its_native_rows(monkeypatch, build_tiny_model) -> None:
    model = build_tiny_model()
    monkeypatch.setattr(sampling_precision, "measure_gain", gives(2.0))
    choice, formats = choose_formats("auto", model)
    assert (choice.value, formats) == ("int8", {NATIVE: torch.int8})
    assert choose_formats("fp32", model)[1] == {}
    assert choose_formats("int8", model)[1] == dict.fromkeys(ENGINES, torch.int8)


def test_a_figure_is_measured_again_on_another_machine_or_with_other_threads(monkeypatch, cache) -> None:
    assert remember("question", lambda: 1.5) == 1.5
    assert remember("question", lambda: 2.5) == 1.5
    monkeypatch.setattr(probe, "processor_name", lambda: "Another processor")
    assert remember("question", lambda: 3.5) == 3.5
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert remember("question", lambda: 4.5) == 4.5
    assert sorted(json.loads(cache.read_text()).values()) == [1.5, 3.5, 4.5]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"question": "2"}', "[" * 10_000, "\x00"])
def test_a_damaged_cache_is_replaced(cache, content) -> None:
    cache.parent.mkdir()
    cache.write_text(content)
    assert remember("question", lambda: 1.5) == 1.5
    assert remember("question", lambda: 2.5) == 1.5


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1.0", "0.0", "true"])
def test_a_figure_that_cannot_be_right_is_measured_again(cache, value) -> None:
    remember("question", lambda: 1.5)
    cache.write_text(cache.read_text().replace("1.5", value))
    assert remember("question", lambda: 2.5) == 2.5


def test_a_cache_that_cannot_be_written_is_not_needed(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LINTX_CACHE", str(tmp_path / "file"))
    assert [remember("question", lambda: 1.5), remember("question", lambda: 2.5)] == [1.5, 2.5]
