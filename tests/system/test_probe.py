"""Tests of the short measurements by which `auto` decides."""

import torch

from linformer_cli.system.probe import measure_bf16_gain


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
