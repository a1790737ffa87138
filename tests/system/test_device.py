"""Tests of devices and number formats."""

import pytest
import torch

from linformer_cli.errors import UsageError
from linformer_cli.system.device import choose_device


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
    assert choose_device("cuda:01").value == "cuda:1"  # torch refuses the leading zero


@pytest.mark.parametrize(
    "wanted", ["gpu", "", "CUDA", "cpu:0", "cpu:", "cuda:", "cuda:x", "cuda:-1", "cuda:\u00b2", "mps:0"]
)
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
