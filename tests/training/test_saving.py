"""Tests that a save contains the random state of the device used for training."""

import pytest
import torch

from linformer_cli.training.progress import Progress
from linformer_cli.training.saving import collect_state, restore_random_state


@pytest.mark.parametrize(("device", "kind"), [("mps", "mps"), ("cuda:1", "cuda")])
def test_the_random_state_of_a_device_is_restored(build_tiny_model, monkeypatch, device, kind) -> None:
    """The device is simulated. The state of another kind of device is ignored."""
    model, restored = build_tiny_model(), []
    state = torch.arange(5, dtype=torch.uint8)
    monkeypatch.setattr(getattr(torch, kind), "get_rng_state", lambda *_: state)
    monkeypatch.setattr(getattr(torch, kind), "set_rng_state", lambda given, *_: restored.append(given))
    optimizer = torch.optim.SGD(model.parameters())
    saved = collect_state(model, None, optimizer, Progress(), device)
    expected = torch.rand(3)
    restore_random_state(saved.tensors, "cpu")
    assert torch.equal(torch.rand(3), expected) and restored == []
    restore_random_state(saved.tensors, device)
    assert len(restored) == 1 and torch.equal(restored[0], state)
