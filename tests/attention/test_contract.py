"""The contract tests: every mechanism of the catalogue must pass them. A new mechanism needs one file in `cases/`."""

import importlib
import itertools
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from attention.inputs import Case, mark_variants
from attention.measures import CountOperations, CountWork, measure_saved_bytes
from attention.mechanisms import CASES, assert_gradients_agree, build, run_oracle
from loops import first_fast, loop_over
from tolerances import BFLOAT16, CAUSALITY, EXTREME, FLOAT32_DRIFT, FLOAT64, all_finite, assert_agree, assert_all_agree
from torch import Tensor

from linformer_cli.attention.base import (
    Attention,
    AttentionShape,
    Memory,
    fork_state,
    measure_state_bytes,
    state_tensors,
)
from linformer_cli.attention.catalogue import CATALOGUE
from linformer_cli.errors import UsageError
from linformer_cli.evaluation import contract
from linformer_cli.evaluation.contract import (
    LENGTH,
    Inputs,
    attend,
    attend_blocks,
    draw,
    gradients,
    init,
    random_cuts,
    share,
    step_through,
)
from linformer_cli.model.mixers import build_attention, parse_options
from linformer_cli.native.library import reference_only

CPU = torch.device("cpu")
every_case = pytest.mark.parametrize("case", mark_variants(CASES, lambda case: case.attention))
# For what the base class does for all mechanisms, and for what other tests check for all variants.
FIRST = [one for one in every_case.args[1] if not one.marks]
first_cases = pytest.mark.parametrize("case", FIRST)
every_mechanism = loop_over("key", CATALOGUE)


def condition_of(case: Case, inputs: Inputs) -> Tensor | None:
    return case.condition(inputs) if case.condition else None


# 0. Every mechanism and every choice of an option has a case.


@every_mechanism
def test_every_mechanism_has_cases_of_its_own(key: str) -> None:
    cases = importlib.import_module(f"attention.cases.{key}").CASES
    assert cases and {case.attention for case in cases.values()} == {key}
    assert all(CASES[name] is case for name, case in cases.items()), "two cases have the same name"


def option_choices(annotation: Any) -> Iterator[Any]:
    if annotation is bool:
        yield from (False, True)
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif isinstance(annotation, UnionType):
        for part in get_args(annotation):
            yield from option_choices(part)


@every_mechanism
def test_every_choice_of_an_option_has_a_case(key: str) -> None:
    options_type = CATALOGUE[key].options_type
    used = [options_type(**case.options) for case in CASES.values() if case.attention == key]
    for name, field in options_type.model_fields.items():
        missing = set(option_choices(field.annotation)) - {getattr(options, name) for options in used}
        assert not missing, f"no case of '{key}' sets {name} to {missing}"


# 1. Split invariance.


@pytest.mark.smoke
@every_case
@loop_over("length", [1, 2, 64, 65, LENGTH])
def test_blocks_and_steps_match_a_single_pass(case: Case, length: int) -> None:
    assert contract.step_error(build(case), length) <= FLOAT64
    assert contract.block_error(build(case), length) <= FLOAT64


@every_case
@loop_over("capacity", [1, 20])
def test_steps_beyond_the_capacity_match_a_single_pass(case: Case, capacity: int) -> None:
    assert contract.step_error(build(case), 40, capacity) <= FLOAT64
    assert contract.block_error(build(case), 40, capacity) <= FLOAT64


@every_case
@loop_over("seed", range(3))
def test_blocks_and_steps_may_alternate(case: Case, seed: int) -> None:
    mechanism = build(case)
    inputs = draw(mechanism, seed=seed)
    outputs, state = [], init(mechanism, inputs) if seed else None
    with torch.no_grad():
        for turn, (start, stop) in enumerate(itertools.pairwise([0, *random_cuts(LENGTH, seed), LENGTH])):
            run = step_through if turn % 2 else attend
            y, state = run(mechanism, inputs.block(start, stop), state)
            outputs.append(y)
        assert_agree(torch.cat(outputs, dim=2), attend(mechanism, inputs)[0], FLOAT64)


@every_case
@loop_over("length", [2, 65, LENGTH])
def test_gradients_are_split_invariant(case: Case, length: int) -> None:
    assert contract.gradient_error(build(case), length) <= FLOAT64


@every_case
def test_an_earlier_block_learns_from_later_outputs(case: Case) -> None:
    assert contract.state_gradient_error(build(case)) <= FLOAT64


FEW = ("linear", "performer", "deltanet", "mamba")


@pytest.mark.parametrize(
    "case", mark_variants({one.id: one.values[0] for one in FIRST}, lambda case: case.attention, fast=FEW)
)
def test_float32_does_not_drift(case: Case) -> None:
    """The gradients of extreme gates, below, compare float32 with float64 for all variants."""
    mechanism = build(case, torch.float32)
    inputs = draw(mechanism, 784, dtype=torch.float32)
    with torch.no_grad():
        stepped, _ = step_through(mechanism, inputs)
        parallel, _ = attend(mechanism, inputs)
        exact = inputs.map(Tensor.double)
        expected, _ = attend(mechanism.double(), exact)
    condition = condition_of(case, exact)
    for found in (stepped, parallel):
        assert found.dtype == torch.float32
        assert_agree(found[:, :, 16:], expected[:, :, 16:], FLOAT32_DRIFT)
        early = None if condition is None else condition[:, :, :16]
        assert_agree(found[:, :, :16], expected[:, :, :16], FLOAT32_DRIFT, early)


@every_case
@loop_over("chunk", [1, 2, 7, 32, 1024])
def test_the_result_does_not_depend_on_the_chunk(case: Case, chunk: int) -> None:
    if "chunk" not in case.options or case.attention in ("flash", "long_short"):
        pytest.skip("the mechanism has no chunks, or its formula does")
    results = []
    for size in (chunk, case.options["chunk"]):
        try:
            mechanism = build(case._replace(options=case.options | {"chunk": size}))
        except UsageError as error:
            assert size == 7 and "chunk: must be a power of two, such as 32 or 64, found 7" in str(error)
            return
        with reference_only():  # most compiled forms have no chunks
            y, state = attend(mechanism, draw(mechanism, 40))
        results.append([y, *(part for part in state_tensors(state) if part.is_floating_point())])
    assert_all_agree(*results, FLOAT64)


# 2. Causality.


@pytest.mark.smoke
@every_case
@loop_over("factor", [-1.0, 30.0])
@loop_over("place", [1, 15, 16, 17, 64, 129])
def test_a_later_position_changes_no_earlier_output(case: Case, place: int, factor: float) -> None:
    assert contract.causality_error(build(case), place, factor) <= CAUSALITY


@every_case
def test_a_later_position_of_a_long_pass_changes_no_earlier_output(case: Case) -> None:
    assert contract.causality_error(build(case), 550, length=contract.LONG) <= CAUSALITY


@every_case
def test_no_gradient_reaches_a_later_position(case: Case) -> None:
    mechanism = build(case)
    for place in (1, 16, 50, 129):
        found = gradients(mechanism, draw(mechanism), lambda x, place=place: attend(mechanism, x)[0][:, :, :place])
        for name in found.keys() & set(Inputs._fields):
            assert not found[name][:, :, place:].any()
        assert found["v"][:, :, place - 1 if case.sees_itself else 0 : place].any()


@every_case
@loop_over("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_reach_no_earlier_output_or_other_image(case: Case, value: float) -> None:
    with reference_only():
        earlier, other = contract.leak_error(build(case), value)
    assert earlier <= CAUSALITY and other <= FLOAT64


@every_case
def test_a_nan_reaches_no_earlier_gradient(case: Case) -> None:
    mechanism = build(case)
    inputs = draw(mechanism, 40)
    bad = contract.put(inputs, "k" if mechanism.shared_key_value else "v", math.nan)
    with reference_only():
        found, expected = (gradients(mechanism, x, lambda x: attend(mechanism, x)[0][:, :, :20]) for x in (bad, inputs))
    for name in found.keys() & set(Inputs._fields):
        assert_agree(found[name][:, :, :20], expected[name][:, :, :20], FLOAT64)


@every_mechanism
@loop_over("place", [0, 3])
def test_a_nan_after_a_state_passes_no_gradient_to_the_state(key: str, place: int) -> None:
    mechanism = build(next(case for case in CASES.values() if case.attention == key))
    first, second = draw(mechanism, 20), draw(mechanism, 20, seed=1)
    first = share(mechanism, first.map(lambda part: part.requires_grad_()))
    second.v[:, :, place:] = math.nan
    with reference_only():
        before, state = attend(mechanism, first)
        after, _ = attend(mechanism, second, state)
        outputs = torch.cat([before, after], dim=2)
        gradients = torch.autograd.grad(outputs.sum(), first.leaves(), materialize_grads=True)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@every_mechanism
def test_images_with_nan_keep_their_place_in_the_batch(key: str) -> None:
    """Internally, images are grouped by the position of their first NaN or infinity."""
    mechanism = build(next(case for case in CASES.values() if case.attention == key))
    inputs = draw(mechanism, 20, batch=4)
    bad = inputs._replace(v=inputs.v.clone())
    places = [12, 20, 5, 12]
    for image, place in enumerate(places):
        bad.v[image, :, place:] = math.nan
    with reference_only(), torch.no_grad():
        (expected, expected_state), (found, state) = (attend(mechanism, x) for x in (inputs, bad))
    for image, place in enumerate(places):
        assert_agree(found[image, :, :place], expected[image, :, :place], FLOAT64)
    for tensor, wanted in zip(state_tensors(state), state_tensors(expected_state), strict=True):
        assert tensor.shape == wanted.shape
        if len(wanted.shape) and len(wanted) == 4:
            torch.testing.assert_close(tensor[1], wanted[1])


# 3. Oracle.


@pytest.mark.smoke
@every_case
@loop_over("length", [1, 17, LENGTH])
def test_outputs_and_gradients_match_the_definition(case: Case, length: int) -> None:
    mechanism = build(case)
    # With this seed, no denominator of `poly2` nearly cancels. If one does, its gradient is mostly rounding errors.
    inputs = draw(mechanism, length, seed=2)
    assert_agree(attend(mechanism, inputs)[0], run_oracle(case, mechanism, inputs), FLOAT64)
    found = gradients(mechanism, inputs, lambda x: attend(mechanism, x)[0])
    expected = gradients(mechanism, inputs, lambda x: run_oracle(case, mechanism, x))
    assert_gradients_agree(found, expected)


@every_case
def test_attend_is_not_a_loop_of_steps(case: Case) -> None:
    mechanism = build(case)
    counts = []
    for run, length in ((attend, 128), (attend, 256), (step_through, 32)):
        with CountOperations() as operations, torch.no_grad():
            run(mechanism, draw(mechanism, length))
        counts.append(operations.count)
    shorter, longer, steps = counts
    assert longer - shorter < 2 * steps, f"128 more positions take {longer - shorter} operations, 32 steps {steps}"


# 4. Memory.


def make_state(mechanism: Attention, inputs: Inputs, way: str) -> Any:
    with torch.no_grad():
        if way == "step":
            return step_through(mechanism, inputs)[1]
        return attend(mechanism, inputs, None if way == "attend" else init(mechanism, inputs))[1]


every_way = loop_over("way", ["step", "attend", "attend from an empty state"])


@every_case
@every_way
@loop_over("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_state_bytes_are_exact(case: Case, way: str, dtype: torch.dtype) -> None:
    mechanism = build(case, dtype)
    for batch, length in ((3, 65), (1, 1)):
        state = make_state(mechanism, draw(mechanism, length, batch, dtype=dtype), way)
        claimed = mechanism.state_bytes(batch, length, dtype)
        assert claimed > 0
        assert measure_state_bytes(state) == claimed


@every_case
@every_way
@loop_over("batch", [1, 2])
def test_a_state_holds_no_larger_storage(case: Case, way: str, batch: int) -> None:
    """A view of a larger tensor keeps all of it in memory. Slices of single images are contiguous."""
    mechanism = build(case)
    state = make_state(mechanism, draw(mechanism, LENGTH, batch), way)
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in state_tensors(state)}
    assert sum(held.values()) == mechanism.state_bytes(batch, LENGTH, torch.float64)


@every_case
def test_only_growing_states_grow(case: Case) -> None:
    assert contract.wrong_state_bytes(build(case)) == 0


@every_case
@pytest.mark.parametrize("carry", first_fast([False, True]))
def test_saved_bytes_grow_linearly(case: Case, carry: bool) -> None:
    """With four times the positions, autograd saves about four times the bytes. Images are square."""
    excused = case.keeps_pairs == "always" or (carry and case.keeps_pairs == "after a prefix")
    saved = []
    for length in (256, 1024) if excused else (1024, 4096):
        # Keys and values have the same width, because torch's attention saves its weights if the widths differ.
        mechanism = build(case, torch.float32, 6, 6, positions=length + 50, row=round(length**0.5))
        inputs = draw(mechanism, length, batch=1, dtype=torch.float32)
        with torch.no_grad():
            state = attend(mechanism, draw(mechanism, 50, batch=1, dtype=torch.float32))[1] if carry else None
        inputs = inputs.map(Tensor.requires_grad_)
        saved.append(measure_saved_bytes(attend, mechanism, inputs, state))
    assert saved[0] > inputs.v.nbytes / 4, "saved bytes are not measured"
    if excused:
        assert saved[1] > 8 * saved[0], "the exemption `keeps_pairs` is not needed"
    else:
        assert saved[1] < 4.5 * saved[0], saved


@every_case
def test_the_work_of_a_step_grows_only_with_the_state(case: Case) -> None:
    """Compare the most expensive of 60 early steps with the most expensive of 60 late steps, in bytes read and written.

    60 steps include the most expensive step of a chunk or block. The first step is left out, because it may fill a
    cache for later steps.
    """
    mechanism = build(case, torch.float32)
    most = []
    for known in (200, 700):
        inputs = draw(mechanism, known + 60, batch=1, dtype=torch.float32)
        work = []
        with torch.no_grad():
            _, state = attend(mechanism, inputs.block(0, known), init(mechanism, inputs))
            for place in range(known, known + 60):
                with CountWork() as counted:
                    _, state = step_through(mechanism, inputs.block(place, place + 1), state)
                work.append(counted.bytes)
        most.append(max(work[1:]))
    if mechanism.memory is not Memory.GROWING or case.steady_steps:
        assert most[1] == most[0]
    else:
        assert most[1] > most[0]


# 5. Independence.


@every_case
def test_images_of_a_batch_are_independent(case: Case) -> None:
    changed, alone = contract.batch_errors(build(case))
    assert changed <= CAUSALITY and alone <= FLOAT64


@every_case
@loop_over("copies, forked_after", [(1, "step"), (3, "attend")])
def test_forked_states_are_independent(case: Case, copies: int, forked_after: str) -> None:
    mechanism = build(case)
    inputs, others = draw(mechanism, 90), draw(mechanism, 40, 2 * copies, seed=5)
    prefix, rest = inputs.block(0, 50), inputs.block(50)
    with torch.no_grad():
        begin = step_through if forked_after == "step" else attend
        _, state = begin(mechanism, prefix, init(mechanism, prefix, 90))
        forked = fork_state(state, copies)
        assert measure_state_bytes(forked) >= measure_state_bytes(state)
        shared, own = ({x.data_ptr() for x in state_tensors(each) if x.numel()} for each in (state, forked))
        assert not shared & own
        ours, theirs = [], []
        for place in range(40):
            y, state = step_through(mechanism, rest.block(place, place + 1), state)
            ours.append(y)
            y, forked = step_through(mechanism, others.block(place, place + 1), forked)
            theirs.append(y)
        assert_agree(torch.cat(ours, dim=2), attend(mechanism, inputs)[0][:, :, 50:], FLOAT64)
        # The copies of image i start at image i * copies.
        repeated = prefix.map(lambda part: part[[image // copies for image in range(2 * copies)]])
        branches = share(mechanism, Inputs(*map(join, repeated, others)))
        assert_agree(torch.cat(theirs, dim=2), attend(mechanism, branches)[0][:, :, 50:], FLOAT64)


def join(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return None if first is None or second is None else torch.cat([first, second], dim=2)


@every_case
@loop_over("prefix", [None, attend, step_through])
def test_attend_does_not_modify_state_or_inputs(case: Case, prefix: Any) -> None:
    assert contract.state_change(build(case), prefix) == 0


@first_cases
def test_a_step_has_no_gradient(case: Case) -> None:
    mechanism = build(case)
    inputs = draw(mechanism, 3).map(lambda part: part.requires_grad_())
    y, state = step_through(mechanism, inputs)
    assert not y.requires_grad
    assert not any(tensor.requires_grad for tensor in state_tensors(state))


# 6. Hard inputs.


def scale_half_of_the_keys(x: Inputs) -> Inputs:
    half = x.k.shape[2] // 2
    return x._replace(k=torch.cat([10 * x.k[:, :, :half], x.k[:, :, half:]], dim=2))


def kept_places(x: Tensor, every: int) -> Tensor:
    """0 at every `every`-th position, else 1."""
    return (torch.arange(x.shape[2]) % every != 0).to(x.dtype).unsqueeze(-1)


HARD = {
    "keys x10": lambda x: x._replace(k=10 * x.k),
    "keys x30": lambda x: x._replace(k=30 * x.k),
    "queries and keys x30": lambda x: x._replace(q=30 * x.q, k=30 * x.k),
    "first half of the keys x10": scale_half_of_the_keys,
    "all negative": lambda x: x.map(lambda part: -part.abs()),
}
# Huge scores may change how a whole batch is computed, so they have a batch of their own.
HUGE = {"keys x10000": lambda x: x._replace(k=10_000 * x.k)}
# Definitions may divide by their lengths.
ZEROS = {
    "zeros": lambda x: x._replace(q=x.q * kept_places(x.q, 3), k=x.k * kept_places(x.k, 2)),
}
every_hard_batch = loop_over("hard", [HARD, HUGE])


def draw_hard(mechanism: Attention, hard: dict[str, Any], length: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """One batch with two images of each kind of `hard` inputs."""
    inputs = draw(mechanism, length, dtype=dtype)
    kinds = zip(*(change(inputs) for change in hard.values()), strict=True)
    return share(mechanism, Inputs(*(None if parts[0] is None else torch.cat(parts) for parts in kinds)))


@every_case
@loop_over("hard", [HARD | ZEROS, HUGE])
def test_hard_inputs_give_finite_outputs_and_gradients(case: Case, hard: dict[str, Any]) -> None:
    """In float32. A test below compares the outputs in float64 with the definition."""
    mechanism = build(case, torch.float32)
    inputs = draw_hard(mechanism, hard, 80, torch.float32)
    for run in (lambda x: attend(mechanism, x)[0], lambda x: attend_blocks(mechanism, x, [40, 64])[0]):
        assert bool(torch.isfinite(run(inputs)).all())
        assert all_finite(gradients(mechanism, inputs, run).values())
    assert bool(torch.isfinite(step_through(mechanism, inputs)[0]).all())


@every_case
@loop_over("value_width", [5, 6])
def test_huge_keys_give_finite_outputs_and_gradients(case: Case, value_width: int) -> None:
    """The squares of these keys overflow float32. If values are as wide as keys, torch has fused forms."""
    mechanism = build(case, torch.float32, value_width=value_width)
    if mechanism.gated:
        pytest.skip("the weights are squares of scores without normalisation, so they overflow too")
    inputs = draw(mechanism, 100, dtype=torch.float32)
    inputs.k[0] *= 1e20
    inputs.k[1, :, 20] *= 1e20
    inputs = share(mechanism, inputs)
    assert bool(torch.isfinite(attend(mechanism, inputs)[0]).all())
    assert bool(torch.isfinite(step_through(mechanism, inputs)[0]).all())
    assert all_finite(gradients(mechanism, inputs, lambda x: attend(mechanism, x)[0]).values())


@every_case
@every_hard_batch
def test_results_for_hard_inputs_are_split_invariant(case: Case, hard: dict[str, Any]) -> None:
    mechanism = build(case)
    inputs = draw_hard(mechanism, hard, LENGTH)
    with torch.no_grad():
        whole, _ = attend(mechanism, inputs)
        found = [run_oracle(case, mechanism, inputs), step_through(mechanism, inputs)[0]]
        found += [attend_blocks(mechanism, inputs, random_cuts(LENGTH, seed))[0] for seed in range(3)]
    for number in range(len(hard)):
        images = slice(2 * number, 2 * number + 2)
        condition = condition_of(case, inputs.map(lambda part, images=images: part[images]))
        for result in found:
            assert_agree(result[images], whole[images], FLOAT64, condition)


def set_gates(change: Callable[[Tensor], Tensor]) -> Callable[[Inputs], Inputs]:
    return lambda x: x if x.extra is None else x._replace(extra=change(x.extra))


def change_middle(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    middle = x.shape[2] // 2
    return torch.cat([x[:, :, :middle], change(x[:, :, middle : middle + 1]), x[:, :, middle + 1 :]], dim=2)


EXTREMES = {
    **{f"gates {logit}": set_gates(lambda x, logit=logit: x + logit) for logit in (-200, -100, -30, 30, 100, 200)},
    "gates of 200 or -200": set_gates(lambda x: 200 * x.sign()),
    "gates of 2000 or -2000": set_gates(lambda x: 2000 * x.sign()),
    "gates from -200 to 200": set_gates(lambda x: 200 * (x / math.sqrt(2)).erf()),  # uniformly distributed
    "one gate 40": set_gates(lambda x: change_middle(x, lambda part: part + 40)),
    "one key x30": lambda x: x._replace(k=change_middle(x.k, lambda part: 30 * part)),
    "one key repeated": lambda x: x._replace(k=x.k[:, :, :1].expand_as(x.k).clone()),
}
FAST_EXTREMES = ("gates -30", "gates 200", "gates of 2000 or -2000", "one key repeated")


@pytest.mark.parametrize(
    ("case", "extremes", "length"),
    [
        pytest.param(one.values[0], *size, id=f"{one.id}-{size[1]}", marks=one.marks or marks)
        for size, marks in (((FAST_EXTREMES, 40), ()), ((tuple(EXTREMES), LENGTH), pytest.mark.slow))
        for one in mark_variants(CASES, lambda case: case.attention)
        if marks or not one.marks  # the slow tests of other variants have all extremes
    ],
)
def test_gradients_of_extreme_gates_are_those_of_float64(case: Case, extremes: tuple[str, ...], length: int) -> None:
    """The gradient of a gate that lets nothing pass is 0 but for errors that are small compared with it."""
    if case.condition or case.options.get("forget_gate") == "exponential":
        pytest.skip("the denominator can cancel, which the pages of these mechanisms explain")
    narrow, wide = build(case, torch.float32), build(case)
    worst = {}
    for name, seed in itertools.product(extremes, range(10 if os.environ.get("LINTX_FULL") else 1)):
        inputs = draw(wide, length, batch=1, seed=seed, dtype=torch.float32)
        if "gate" in name and not wide.gates:
            continue
        if name == "one key repeated" and case.attention == "probsparse":
            continue  # it compares measures, which are equal for equal keys
        x = share(wide, EXTREMES[name](inputs))
        exact = share(wide, x.map(Tensor.double))
        with reference_only():
            expected = gradients(wide, exact, lambda x: attend(wide, x)[0])
            plain = gradients(narrow, x, lambda x: attend(narrow, x)[0])
        compiled = gradients(narrow, x, lambda x: attend(narrow, x)[0])
        with torch.no_grad():
            y, _ = attend(wide, exact)
            outputs = [share_of_limit(run(narrow, x)[0], y) for run in (attend, step_through)]
        shares = []
        for found in (plain, compiled):
            shares.append(max(share_of_limit(found[key], gradient) for key, gradient in expected.items()))
            if x.extra is not None:
                largest = expected["extra"].abs().amax(dim=(0, 1, 2))
                limit = EXTREME * largest + 3e-7 * largest.max().clamp(min=1)
                shares[-1] = max(shares[-1], share_of_limit(found["extra"], expected["extra"], limit))
        worst[name, seed] = shares[0], max(shares[1], *outputs)
    # Sums of a few random draws cancel. What is divided by such a sum, or summed once more, keeps fewer digits.
    exceeded = {draw: shares for draw, shares in worst.items() if max(shares) > 1}
    assert not any(seed == 0 for _, seed in exceeded), exceeded
    assert len(exceeded) <= 0.03 * len(worst) and all(plain < 20 for plain, _ in exceeded.values()), exceeded


def share_of_limit(found: Tensor, expected: Tensor, limit: Tensor | None = None) -> float:
    """The largest error over its limit (default: that of `assert_agree`); infinite if `found` is not finite."""
    assert found.shape == expected.shape
    limit = EXTREME * expected.abs().max().clamp(min=1) if limit is None else limit
    return float(((found.double() - expected).abs() / limit).nan_to_num(nan=math.inf, posinf=math.inf).max())


@every_case
def test_bfloat16_is_as_accurate_as_its_inputs(case: Case) -> None:
    mechanism = build(case, torch.bfloat16)
    inputs = draw(mechanism, dtype=torch.bfloat16)
    with torch.no_grad():
        parallel, _ = attend(mechanism, inputs)
        blocks, _ = attend_blocks(mechanism, inputs, [20, 64])
        stepped, _ = step_through(mechanism, inputs)
        expected, _ = attend(mechanism.float(), inputs.map(Tensor.float))
    for found in (parallel, blocks, stepped):
        assert found.dtype == torch.bfloat16
        assert_agree(found, expected, BFLOAT16)
    mechanism.bfloat16()
    assert all_finite(gradients(mechanism, inputs, lambda x: attend(mechanism, x)[0]).values())


def equal_states(state: Any, other: Any) -> bool:
    pairs = zip(state_tensors(state), state_tensors(other), strict=True)
    return all(found.dtype == expected.dtype and torch.equal(found, expected) for found, expected in pairs)


@first_cases
@loop_over("way", ["attend", "step"])
def test_autocast_rounds_nothing(case: Case, way: str) -> None:
    run = attend if way == "attend" else step_through
    mechanism = build(case, torch.float32)
    inputs = draw(mechanism, dtype=torch.float32)
    expected, expected_state = run(mechanism, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = run(mechanism, inputs)
    assert y.dtype == torch.float32 and torch.equal(y, expected)
    assert equal_states(state, expected_state)


@first_cases
def test_bfloat16_inputs_work_with_a_float32_state(case: Case) -> None:
    """Projections under autocast return bfloat16, while the state has the type of the model."""
    mechanism = build(case, torch.float32)
    inputs = draw(mechanism, dtype=torch.bfloat16)
    with torch.no_grad():
        expected, _ = attend(mechanism, inputs.map(Tensor.float))
        empty = init(mechanism, inputs.map(Tensor.float))
        types = [tensor.dtype for tensor in state_tensors(empty)]
        with torch.autocast("cpu", torch.bfloat16):
            results = [attend(mechanism, inputs, empty), step_through(mechanism, inputs, fork_state(empty))]
            y, _ = attend(mechanism, inputs)
    for found, state in results:
        assert found.dtype == torch.bfloat16
        assert [tensor.dtype for tensor in state_tensors(state)] == types
        assert_agree(found, expected, BFLOAT16)
    assert y.dtype == torch.bfloat16
    assert_agree(y, expected, BFLOAT16)


@first_cases
def test_a_wrong_number_of_extra_scalars_is_refused(case: Case) -> None:
    mechanism = build(case)
    q, k, v, extra = draw(mechanism, 3)
    if extra is None:
        pytest.skip("the mechanism has no gates")
    state = mechanism.init_state(2, 3, CPU, torch.float64)
    for wrong in (None, extra[..., 1:], torch.cat([extra, extra[..., :1]], dim=-1)):
        needed = rf"^{case.attention} needs extra scalars \[B, H, T, {mechanism.extra_per_head}\], found"
        with pytest.raises(ValueError, match=needed):
            mechanism.attend(q, k, v, None, wrong)
        with pytest.raises(ValueError, match=needed):
            mechanism.step(q[:, :, 0], k[:, :, 0], v[:, :, 0], state, None if wrong is None else wrong[:, :, 0])


@first_cases
def test_a_layer_projects_the_extra_scalars_with_their_initial_bias(case: Case, build_tiny_model: Any) -> None:
    if not build(case).gates:
        pytest.skip("the mechanism has no gates")
    layer = build_tiny_model(attention=case.attention, attention_options=case.options).blocks[0].attention
    rows, bias = layer.input_rows["extra"], layer.input.bias
    assert rows.stop - rows.start == layer.heads * layer.inner.extra_per_head
    assert bool((bias[rows] == layer.inner.extra_bias).all())
    assert not bias[: rows.start].any() and not bias[rows.stop :].any()


@every_case
def test_a_newly_built_mechanism_holds_no_float64(case: Case) -> None:
    """Some devices have no float64, and models are moved to them unchanged."""
    mechanism = build_attention(case.attention, case.options, AttentionShape(case.heads, 6, 6, positions=784, row=28))
    for name, tensor in (*mechanism.named_parameters(), *mechanism.named_buffers()):
        assert tensor.dtype != torch.float64, name


# 7. Options.


@every_mechanism
def test_unknown_options_and_invalid_values_are_refused(key: str, raises_one_line: Any) -> None:
    for option, field in CATALOGUE[key].options_type.model_fields.items():
        with raises_one_line(UsageError, f"'{key}': unknown key '{option}s'; did you mean '{option}'?"):
            parse_options(key, {f"{option}s": 1})
        wrong = [
            getattr(bound, name) + beyond
            for bound in field.metadata
            for name, beyond in (("gt", 0), ("ge", -1), ("lt", 0), ("le", 1))
            if hasattr(bound, name)
        ]
        for value in [*wrong, *(["perhaps"] if any(option_choices(field.annotation)) else [])]:
            with raises_one_line(UsageError, f"'{key}': {option}: ", f"found {value!r}"):
                parse_options(key, {option: value})


# 8. Names and widths.


@every_mechanism
def test_key_file_class_test_and_page_share_one_name(key: str) -> None:
    mechanism = CATALOGUE[key]
    title = "".join(word.capitalize() for word in key.split("_"))
    assert mechanism.name == key
    assert mechanism.__module__ == f"linformer_cli.attention.{key}"
    assert mechanism.__name__ == f"{title}Attention"
    assert mechanism.options_type.__name__ == f"{title}Options"
    assert mechanism.options_type.__module__ == mechanism.__module__
    case = next(case for case in CASES.values() if case.attention == key)
    state_type = type(build(case).init_state(1, 1, CPU, torch.float32))
    shared = state_type.__module__.startswith("linformer_cli.attention.parts.")
    assert shared or (state_type.__module__, state_type.__name__) == (mechanism.__module__, f"{title}State")
    root = Path(__file__).parents[2]
    assert (root / "tests" / "attention" / f"test_{key}.py").is_file()
    assert (root / "docs" / "reference" / "attention" / f"{key}.md").is_file()


@every_mechanism
def test_every_mechanism_describes_itself(key: str) -> None:
    mechanism = CATALOGUE[key]
    assert mechanism.__doc__ and mechanism.__doc__ != Attention.__doc__
    for text in (mechanism.source, mechanism.family, mechanism.method):
        assert text
    assert isinstance(mechanism.memory, Memory)


@every_case
@loop_over("key_width, value_width", [(3, 8), (8, 3), (4, 1)])
def test_keys_and_values_may_differ_in_width(case: Case, key_width: int, value_width: int) -> None:
    mechanism = build(case, key_width=key_width, value_width=value_width)
    if mechanism.shared_key_value:
        pytest.skip("the keys are the values")
    inputs = draw(mechanism, 40, seed=7)
    condition = condition_of(case, inputs)
    with torch.no_grad():
        y, state = attend(mechanism, inputs)
        assert y.shape == (2, case.heads, 40, value_width)
        assert_agree(y, run_oracle(case, mechanism, inputs), FLOAT64, condition)
        assert_agree(step_through(mechanism, inputs)[0], y, FLOAT64, condition)
    assert measure_state_bytes(state) == mechanism.state_bytes(2, 40, torch.float64)
