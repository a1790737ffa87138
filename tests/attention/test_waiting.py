"""On a device, the host never waits for a number of a mechanism, neither in `attend` nor in `step`."""

from typing import Any

import pytest
import torch
from attention.inputs import Case, mark_variants
from attention.mechanisms import CASES, build
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from waiting import OnlyOn

from linformer_cli.attention import tensors
from linformer_cli.attention.base import Attention
from linformer_cli.attention.parts.random_features import replace_vanished
from linformer_cli.evaluation.contract import Inputs, draw
from linformer_cli.native.library import reference_only

# The first and the last positions of `attend`, and the number of steps. Each crosses a boundary of most cases.
KNOWN, LENGTH, STEPS = 40, 60, 3


def move(fake: FakeTensorMode, x: Tensor | None) -> Any:
    return None if x is None else fake.from_tensor(x).to("cuda")


@pytest.mark.parametrize(
    "case", mark_variants(CASES, lambda case: case.attention, fast=("linear", "softmax", "gla", "deltanet", "lsh"))
)
def test_attend_and_step_never_wait_for_a_device(case: Case) -> None:
    """The tensors have a device but no contents, so reading a number or mixing devices fails."""
    mechanism, fake = build(case, torch.float32), FakeTensorMode(allow_non_fake_inputs=True)
    inputs = draw(mechanism, LENGTH, dtype=torch.float32)
    run(mechanism, inputs)  # patterns are computed on the CPU, once
    tensors.constant.cache_clear()
    with fake, reference_only(), tensors.defer_checks():
        for module in mechanism.modules():
            for held in (module._parameters, module._buffers):
                held.update({key: move(fake, x) for key, x in held.items()})
        moved = inputs.map(lambda x: move(fake, x))
        run(mechanism, moved)  # constants are copied to the device only once
        with OnlyOn("cuda"):
            assert run(mechanism, moved).device.type == "cuda"
    tensors.constant.cache_clear()


def test_a_vanished_denominator_is_nan_while_checks_are_deferred() -> None:
    """The features of the second position have underflowed, so y would be wrong, but finite."""
    y, weight = torch.ones(1, 1, 2, 3), torch.tensor([[[1.0, 0.0]]])
    tensors.HOSTS.discard("cpu")
    try:
        with tensors.defer_checks():
            found = replace_vanished(y, weight, lambda: (y, y), y, None)
    finally:
        tensors.HOSTS.add("cpu")
    assert found.isnan().tolist() == [[[[False] * 3, [True] * 3]]]


def run(mechanism: Attention, inputs: Inputs) -> Tensor:
    first, rest = inputs.block(0, KNOWN), inputs.block(KNOWN, LENGTH)
    _, state = mechanism.attend(first.q, first.k, first.v, None, first.extra)
    mechanism.attend(rest.q, rest.k, rest.v, state, rest.extra)
    for t in range(STEPS):
        q_t, k_t, v_t = (x[:, :, t] for x in rest[:3])
        y, state = mechanism.step(q_t, k_t, v_t, state, None if rest.extra is None else rest.extra[:, :, t])
    return y
