"""Tests of the pass of a mechanism whose time and memory `lintx bench attention` measures."""

import sys

import pytest
import torch

from linformer_cli.attention.catalogue import CATALOGUE
from linformer_cli.attention.linear import LinearAttention
from linformer_cli.attention.parts.caches import attend_cached
from linformer_cli.attention.softmax import SoftmaxAttention
from linformer_cli.bench.measure import attention_pass
from linformer_cli.bench.measure.attention_pass import (
    Inputs,
    PassSetup,
    build_pass,
    build_warm_pass,
    count_least_bytes,
)
from linformer_cli.bench.measure.peak_memory import measure_peak
from linformer_cli.model.mixers import Variant


def setup(positions: int, **changes) -> PassSetup:
    name, options = changes.pop("attention", "linear"), changes.pop("options", {"chunk": 16})
    return PassSetup(Variant(name, name, options), **{"heads": 2, "head_width": 8, "positions": positions, **changes})


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the growth of a process is exact only on Linux")
def test_the_peak_covers_what_a_pass_holds_at_once() -> None:
    given = setup(2**13, heads=8, head_width=16)
    # q, k, v and the gradient take 4 MiB each. The scores are chunked and much smaller.
    found = measure_peak(build_warm_pass, given, 60)
    inputs = 4 * 2**13 * 8 * 16 * 4
    assert found.seconds > 0
    assert inputs < found.bytes < 20 * inputs
    ballast = torch.ones(50 * 2**20)  # the caller's memory does not count
    again = measure_peak(build_warm_pass, given, 60)
    assert again.bytes == pytest.approx(found.bytes, rel=0.1)
    assert ballast[-1] == 1


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Records arguments and gradients of `attend`. The mechanism has shared queries and keys, and extra scalars."""
    calls: list[tuple] = []

    class Shared(LinearAttention):
        name = "shared"
        shared_query_key = True
        extra_per_head = 3

        def attend(self, q, k, v, state=None, extra=None):
            gradients: list[torch.Tensor] = []
            for part in (k, v, extra):
                part.register_hook(gradients.append)
            calls.append((q, k, v, state, extra, self.training, gradients))
            return super().attend(q, k, v * extra.sum(dim=-1, keepdim=True), state, extra)

    monkeypatch.setitem(CATALOGUE, "shared", Shared)
    return calls


def test_a_pass_gives_a_mechanism_its_shared_keys_and_extra_scalars(seen) -> None:
    work = build_pass(setup(20, attention="shared", batch=5))
    work()
    ((q, k, v, state, extra, training, gradients),) = seen
    assert q is k and q.shape == v.shape == (5, 2, 20, 8) and extra.shape == (5, 2, 20, 3)
    assert state is None and training
    assert len(gradients) == 3 and all(gradient.any() for gradient in gradients)
    assert all(part.grad is None for part in (k, v, extra))


def test_a_pass_gives_one_tensor_as_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []

    class Same(SoftmaxAttention):
        shared_key_value = True

        def attend(self, q, k, v, state=None, extra=None):
            calls.append((q, k, v))
            return super().attend(q, k, v, state)

        def attend_cache(self, q, cache):
            return attend_cached(q, cache, cache.keys)

    monkeypatch.setitem(CATALOGUE, "same", Same)
    build_pass(setup(20, attention="same", options={}))()
    ((q, k, v),) = calls
    assert k is v and q is not k
    less, whole = (count_least_bytes(setup(20, attention=name, options={})) for name in ("same", "softmax"))
    assert whole - less == 4 * 2 * 20 * 3 * 8


def test_mechanisms_of_the_same_size_share_their_inputs(seen, monkeypatch) -> None:
    inputs = Inputs()
    works = [build_pass(setup(20, **changes), inputs=inputs) for changes in ({"attention": "shared"}, {})]
    before = torch.get_rng_state()
    for work in works:
        work()
    assert torch.equal(torch.get_rng_state(), before)
    assert sorted(inputs) == [("extra", 3), ("gradient", 8), ("k", 8), ("q", 8), ("v", 8)]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn", None)
        works[0]()
    assert all(again is first for again, first in zip(seen[1][:5], seen[0][:5], strict=True))
    assert all(part.grad is None for part in inputs.values())
    seen.clear()
    del work, works[0]
    assert sorted(inputs) == [("gradient", 8), ("k", 8), ("q", 8), ("v", 8)]  # the inputs of the remaining pass


def test_the_parameters_keep_no_gradient(monkeypatch) -> None:
    built = []
    build = attention_pass.build_attention

    def keep(*arguments):
        built.append(build(*arguments))
        return built[-1]

    monkeypatch.setattr(attention_pass, "build_attention", keep)
    build_pass(setup(20, options={"feature_map": "learned"}))()
    parameters = list(built[0].parameters())
    assert parameters and all(parameter.grad is None for parameter in parameters)
