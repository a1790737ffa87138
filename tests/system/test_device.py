"""Tests of devices and number formats."""

import pytest
import torch

from linformer_cli.errors import UsageError
from linformer_cli.system import device
from linformer_cli.system.device import choose_device, choose_precision, torch_dtype


def pretend(monkeypatch: pytest.MonkeyPatch, cards: int = 0, metal: bool = False) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "Pretended")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: metal)


@pytest.mark.parametrize(("cards", "metal", "chosen"), [(0, False, "cpu"), (0, True, "mps"), (2, True, "cuda")])
def test_auto_chooses_the_fastest_device(monkeypatch, cards, metal, chosen) -> None:
    pretend(monkeypatch, cards, metal)
    choice = choose_device("auto")
    assert choice.value == chosen
    assert choice.reason


def test_an_available_device_is_used_as_requested(monkeypatch) -> None:
    pretend(monkeypatch, cards=2, metal=True)
    for wanted in ("cpu", "cuda", "cuda:0", "cuda:1", "mps"):
        assert choose_device(wanted).value == wanted


@pytest.mark.parametrize("wanted", ["gpu", "", "CUDA", "cpu:0", "cpu:", "cuda:", "cuda:x", "cuda:-1", "mps:0"])
def test_an_unknown_device_is_refused_with_the_known_names(monkeypatch, raises_one_line, wanted) -> None:
    pretend(monkeypatch, cards=2, metal=True)
    with raises_one_line(UsageError, f"unknown device '{wanted}'", "auto, cpu, cuda, cuda:INDEX, mps"):
        choose_device(wanted)


def test_a_missing_device_is_refused_with_advice(monkeypatch, raises_one_line) -> None:
    pretend(monkeypatch)
    for wanted in ("cuda", "cuda:0"):
        with raises_one_line(UsageError, "no CUDA device", "--device cpu"):
            choose_device(wanted)
    with raises_one_line(UsageError, "no Apple GPU", "--device cpu"):
        choose_device("mps")
    pretend(monkeypatch, cards=2)
    with raises_one_line(UsageError, "'cuda:2'", "the last CUDA device of this machine is cuda:1"):
        choose_device("cuda:2")


def test_a_requested_precision_is_used() -> None:
    for wanted in ("fp32", "bf16"):
        for purpose in ("training", "sampling"):
            assert choose_precision(wanted, "cpu", purpose).value == wanted


def test_auto_samples_in_fp32_everywhere(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    for place in ("cpu", "cuda", "mps"):
        assert choose_precision("auto", place, "sampling").value == "fp32"


@pytest.mark.parametrize(("gain", "chosen"), [(4.0, "bf16"), (1.04, "fp32"), (0.5, "fp32")])
def test_auto_trains_on_a_cpu_in_the_faster_format(monkeypatch, gain, chosen) -> None:
    asked = []
    monkeypatch.setattr(device, "measure_bf16_gain", lambda *sizes: asked.append(sizes) or gain)
    choice = choose_precision("auto", "cpu", "training", 64, 96)
    assert (choice.value, choice.reason) == (chosen, f"bf16 is {gain:.2g} times as fast as fp32 here")
    assert asked == [(64, 96)]


@pytest.mark.parametrize(("supported", "chosen"), [(True, "bf16"), (False, "fp32")])
def test_auto_trains_on_a_gpu_in_bf16_if_it_multiplies_bf16(monkeypatch, supported, chosen) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    assert choose_precision("auto", "cuda:1", "training").value == chosen
    assert choose_precision("auto", "mps", "training").value == "fp32"


def test_precisions_have_torch_types() -> None:
    found = [torch_dtype(name) for name in ("fp32", "bf16", "fp64")]
    assert found == [torch.float32, torch.bfloat16, torch.float64]
