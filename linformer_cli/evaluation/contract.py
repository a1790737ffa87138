"""The contract of a mechanism, in `relative_error` of random inputs; lintx check and test_contract.py use it."""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from linformer_cli.attention.base import (
    Attention,
    AttentionOptions,
    AttentionShape,
    Memory,
    fork_state,
    measure_state_bytes,
    state_tensors,
)
from linformer_cli.attention.catalogue import find_attention, fit_attention
from linformer_cli.attention.plugins import find_line
from linformer_cli.errors import shorten
from linformer_cli.model.mixers import Variant, parse_options
from .agreement import CAUSALITY_TOLERANCE, FLOAT64_TOLERANCE, AgreementRow, build_row, relative_error

# Positions of a sequence, unless a check needs others. `LONG` is more than the usual chunks.
LENGTH, LONG = 130, 600
_CPU = torch.device("cpu")


class Difference(float):
    """An error, and where it is, if it is too large."""

    where: str

    def __new__(cls, error: float, where: str = "") -> "Difference":
        new = super().__new__(cls, error)
        new.where = where
        return new


class Inputs(NamedTuple):
    """q and k [B, H, T, K], v [B, H, T, V] and, for mechanisms that use extra scalars, extra [B, H, T, E]."""

    q: Tensor
    k: Tensor
    v: Tensor
    extra: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        return Inputs._make(None if part is None else change(part) for part in self)

    def block(self, start: int, stop: int | None = None) -> "Inputs":
        return self.map(lambda part: part[:, :, start:stop])

    def leaves(self) -> list[Tensor]:
        return [part for part in self if part is not None]


def draw(
    mechanism: Attention, length: int = LENGTH, batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Inputs:
    """Draw random inputs in float64, so that all types start from the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    (heads, key_width, value_width), extra = mechanism.shape.heads_and_widths, mechanism.extra_per_head
    sizes = [(batch, heads, length, width) for width in (key_width, key_width, value_width, extra)]
    parts = [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
    return share(mechanism, Inputs(parts[0], parts[1], parts[2], parts[3] if extra else None))


def share(mechanism: Attention, inputs: Inputs) -> Inputs:
    """Return `inputs` with the same tensor wherever the layer of the mechanism passes the same tensor."""
    if mechanism.shared_key_value:
        return inputs._replace(v=inputs.k)
    return inputs._replace(q=inputs.k) if mechanism.shared_query_key else inputs


def init(mechanism: Attention, inputs: Inputs, capacity: int | None = None) -> Any:
    """Return the state before the first position of `inputs`, with room for all of them or for `capacity` positions."""
    return mechanism.init_state(len(inputs.v), capacity or inputs.v.shape[2], _CPU, inputs.v.dtype)


def attend(mechanism: Attention, inputs: Inputs, state: Any = None) -> tuple[Tensor, Any]:
    return mechanism.attend(*inputs[:3], state, inputs.extra)


def attend_blocks(mechanism: Attention, inputs: Inputs, cuts: list[int], state: Any = None) -> tuple[Tensor, Any]:
    """Run `attend` on one block after another. A block ends at each of `cuts`."""
    outputs = []
    for start, stop in itertools.pairwise([0, *cuts, inputs.v.shape[2]]):
        y, state = attend(mechanism, inputs.block(start, stop), state)
        outputs.append(y)
    return torch.cat(outputs, dim=2), state


def step_through(mechanism: Attention, inputs: Inputs, state: Any = None) -> tuple[Tensor, Any]:
    """Take a step for every position. Returns all outputs [B, H, T, V] and the last state."""
    state = init(mechanism, inputs) if state is None else state
    outputs = []
    for place in range(inputs.v.shape[2]):
        q_t, k_t, v_t, extra_t = (None if part is None else part[:, :, place] for part in inputs)
        y_t, state = mechanism.step(q_t, k_t, v_t, state, extra_t)  # type: ignore[arg-type]
        outputs.append(y_t)
    return torch.stack(outputs, dim=2), state


def random_cuts(length: int, seed: int) -> list[int]:
    """Return sorted cuts between 0 and `length` that give at most seven blocks."""
    generator = torch.Generator().manual_seed(seed)
    count = min(int(torch.randint(1, 7, (), generator=generator)), length - 1)
    return sorted((1 + torch.randperm(length - 1, generator=generator)[:count]).tolist())


def gradients(mechanism: Attention, inputs: Inputs, run: Callable[[Inputs], Tensor]) -> dict[str, Tensor]:
    """Differentiate a random weighted sum of the outputs with respect to the inputs and all parameters, by name."""
    leaves = share(mechanism, inputs.map(lambda part: part.detach().clone().requires_grad_()))
    y = run(leaves)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    wanted = {name: part for name, part in leaves._asdict().items() if part is not None}
    if mechanism.shared_query_key:
        del wanted["q"]
    if mechanism.shared_key_value:
        del wanted["k"]
    wanted |= dict(mechanism.named_parameters())
    found = torch.autograd.grad((y * weights).sum(), list(wanted.values()), materialize_grads=True)
    return dict(zip(wanted, found, strict=True))


def _worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(relative_error(found[name], gradient) for name, gradient in expected.items())


def compare(
    found: Tensor, expected: Tensor, about: Callable[[int], str], tolerance: float = FLOAT64_TOLERANCE
) -> Difference:
    """Return the error of outputs [B, H, T, V]. `about` gets the first position whose error exceeds `tolerance`."""
    error = relative_error(found, expected)
    if found.shape != expected.shape:
        return Difference(error, f"outputs have the sizes {[*found.shape]} and {[*expected.shape]}")
    if error <= tolerance:
        return Difference(error)
    place = int((~torch.isclose(found, expected, rtol=0, atol=tolerance)).any(dim=(0, 1, 3)).nonzero()[0])
    return Difference(error, f"from position {place} of {found.shape[2]}{about(place)}")


def _pass_once(mechanism: Attention, length: int) -> tuple[Inputs, Tensor]:
    inputs = draw(mechanism, length, seed=length)
    whole, _ = attend(mechanism, inputs)
    if whole.shape != inputs.v.shape:
        raise ValueError(f"attend returns outputs {[*whole.shape]} for values {[*inputs.v.shape]}")
    return inputs, whole


@torch.no_grad()
def step_error(mechanism: Attention, length: int = LENGTH, capacity: int | None = None) -> Difference:
    """Compare steps with one pass. The state has room for `capacity` positions (None: all)."""
    inputs, whole = _pass_once(mechanism, length)
    found, _ = step_through(mechanism, inputs, init(mechanism, inputs, capacity))
    return compare(found, whole, lambda place: ", in steps")


@torch.no_grad()
def block_error(mechanism: Attention, length: int = LENGTH, capacity: int | None = None) -> Difference:
    """Compare blocks at random cuts, and one block after an empty state, with one pass; see `step_error`."""
    inputs, whole = _pass_once(mechanism, length)
    start = init(mechanism, inputs, capacity)
    errors: list[Difference] = []
    for cuts in [[], *(random_cuts(length, seed) for seed in range(4 if length > 1 else 0))]:
        state = None if len(errors) % 2 else start
        name_block = functools.partial(_name_block, [0, *cuts, length])
        errors.append(compare(attend_blocks(mechanism, inputs, cuts, state)[0], whole, name_block))
    return max(errors)


def _name_block(ends: list[int], place: int) -> str:
    first, last = next(pair for pair in itertools.pairwise(ends) if place < pair[1])
    return f", in the block of {last - first} positions after {f'the cut at {first}' if first else 'the start'}"


def gradient_error(mechanism: Attention, length: int = LENGTH) -> float:
    """Compare the gradients of blocks at random cuts with those of one pass."""
    inputs = draw(mechanism, length, seed=length)
    whole, errors = gradients(mechanism, inputs, lambda x: attend(mechanism, x)[0]), []
    for seed in range(4):
        state = init(mechanism, inputs) if seed % 2 else None
        run = functools.partial(attend_blocks, mechanism, cuts=random_cuts(length, seed), state=state)
        errors.append(_worst(gradients(mechanism, inputs, lambda x, run=run: run(x)[0]), whole))  # type: ignore[misc]
    return max(errors)


def state_gradient_error(mechanism: Attention) -> float:
    """After a cut at 70, only the state can carry gradients from later outputs to earlier values."""
    runs = (lambda x: attend_blocks(mechanism, x, [70]), lambda x: attend(mechanism, x))
    found, expected = (gradients(mechanism, draw(mechanism), lambda x, run=run: run(x)[0][:, :, 70:]) for run in runs)  # type: ignore[misc]
    return _worst(found, expected) if expected["v"][:, :, :70].abs().max() > 1e-6 else math.inf


@torch.no_grad()
def causality_error(mechanism: Attention, place: int, factor: float = 30.0, length: int = LENGTH) -> Difference:
    """Return the change of earlier outputs if inputs are multiplied from a position on, which must itself change."""
    inputs = draw(mechanism, length)
    before, _ = attend(mechanism, inputs)
    errors = []
    for stop in (place + 1, length):
        changed = inputs.map(Tensor.clone)
        for part in changed.leaves():
            part[:, :, place:stop] *= factor
        # One tensor in two places would be scaled twice.
        after, _ = attend(mechanism, share(mechanism, changed))
        if not float((after[:, :, place] - before[:, :, place]).abs().max()) > 1e-3:
            return Difference(math.inf, f"output {place} is NaN or does not depend on input {place}")
        where = f", if the inputs from position {place} of {length} change"
        earlier = before[:, :, :place]
        errors.append(compare(after[:, :, :place], earlier, lambda _, where=where: where, CAUSALITY_TOLERANCE))  # type: ignore[misc]
    return max(errors)


def later_gradient(mechanism: Attention, place: int) -> float:
    """Return the largest gradient that outputs before `place` send to inputs at `place` or later."""
    found = gradients(mechanism, draw(mechanism), lambda x: attend(mechanism, x)[0][:, :, :place])
    return max(float(found[name][:, :, place:].abs().max()) for name in found.keys() & set(Inputs._fields))


def put(inputs: Inputs, name: str, value: float) -> Inputs:
    """Return `inputs` with `value` at positions 20 to 32 of image 0."""
    bad = getattr(inputs, name).clone()
    bad[0, :, 20:33, -1] = value
    return inputs._replace(**{name: bad})


@torch.no_grad()
def leak_error(mechanism: Attention, value: float) -> tuple[float, float]:
    """Return how much `value`, such as NaN, changes earlier outputs, and the outputs of another image."""
    inputs = draw(mechanism, 40)
    names = [name for name, part in inputs._asdict().items() if part is not None]
    earlier, other = 0.0, 0.0
    for cuts in ([], [33]):  # with a cut at 33, only the state contains the value
        expected, _ = attend_blocks(mechanism, inputs, cuts)
        for name in names[mechanism.shared_query_key :]:
            found, _ = attend_blocks(mechanism, share(mechanism, put(inputs, name, value)), cuts)
            earlier = max(earlier, relative_error(found[0, :, :20], expected[0, :, :20]))
            other = max(other, relative_error(found[1], expected[1]))
    return earlier, other


@torch.no_grad()
def batch_errors(mechanism: Attention) -> tuple[float, float]:
    """Return how much an image's outputs change if the other images of its batch change, and if they are left out."""
    inputs = draw(mechanism, 70, batch=3)
    changed = draw(mechanism, 70, batch=3, seed=9).map(lambda part: 30 * part)
    for part, original in zip(changed.leaves(), inputs.leaves(), strict=True):
        part[1] = original[1]
    changed = share(mechanism, changed)
    alone = share(mechanism, inputs.map(lambda part: part[1:2]))
    others, without = [], []
    for run in (attend, step_through):
        expected = run(mechanism, inputs)[0][1:2]
        others.append(relative_error(run(mechanism, changed)[0][1:2], expected))
        without.append(relative_error(run(mechanism, alone)[0], expected))
    return max(others), max(without)


@torch.no_grad()
def state_change(mechanism: Attention, prefix: Callable[..., tuple[Tensor, Any]] | None = attend) -> float:
    """Return how much `attend` and later steps change the inputs or the state after `prefix` (None: empty)."""
    inputs = draw(mechanism)
    given = init(mechanism, inputs)
    if prefix is not None:
        _, given = prefix(mechanism, inputs.block(0, 40), given)
    kept, kept_inputs = fork_state(given), [part.clone() for part in inputs.leaves()]
    first, state = attend(mechanism, inputs.block(40, 60), given)
    # Steps may write in place, so attend must not return tensors of the given state.
    step_through(mechanism, inputs.block(60, 80), state)
    pairs = [*zip(state_tensors(given), state_tensors(kept), strict=True)]
    again, _ = attend(mechanism, inputs.block(40, 60), given)
    _, state = attend(mechanism, inputs)
    step_through(mechanism, inputs.block(0, 3), state)
    pairs += [(again, first), *zip(inputs.leaves(), kept_inputs, strict=True)]
    return max(0.0 if torch.equal(found, before) else math.inf for found, before in pairs)


@torch.no_grad()
def wrong_state_bytes(mechanism: Attention) -> int:
    """Return by how many bytes a state differs from `state_bytes`, or grows although it is constant or bounded."""
    wrong, sizes = 0, []
    for length in (1, LENGTH, 2 * LENGTH, 4 * LENGTH):
        inputs = draw(mechanism, length)
        sizes.append(measure_state_bytes(attend(mechanism, inputs)[1]))
        claimed = mechanism.state_bytes(2, length, torch.float64)
        wrong = max(wrong, abs(sizes[-1] - claimed), abs(sizes[-1] - measure_state_bytes(init(mechanism, inputs))))
    if mechanism.memory is Memory.GROWING:
        return max(wrong, 0 if sizes == sorted(set(sizes)) else 1)
    fixed = sizes if mechanism.memory is Memory.CONSTANT else sizes[1:]
    return max(wrong, max(fixed) - min(fixed))


def oracle_error(mechanism: Attention) -> float:
    """Compare outputs and gradients with those of the mechanism's `oracle(q, k, v, extra)`: [B, H, T, V]."""
    oracle: Any = mechanism.oracle
    errors = []
    for length in (1, 17, LENGTH):
        inputs = draw(mechanism, length, seed=2)
        errors.append(relative_error(attend(mechanism, inputs)[0], oracle(*inputs)))
        found = gradients(mechanism, inputs, lambda x: attend(mechanism, x)[0])
        errors.append(_worst(found, gradients(mechanism, inputs, lambda x: oracle(*x))))
    return max(errors)


def build_mechanism(variant: Variant) -> Attention:
    """Build a small mechanism in float64. Parameters that are 0 at first, which could hide a mistake, are drawn."""
    shape = AttentionShape(2, 6, 6 if find_attention(variant.attention).shared_key_value else 5, positions=784, row=28)
    torch.manual_seed(20)
    options = cast(AttentionOptions, parse_options(variant.attention, variant.options))
    mechanism = fit_attention(variant.attention, options, shape, width=12).double().eval()
    for parameter in mechanism.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.5)
    return mechanism


def measure_contract(mechanism: Attention) -> list[AgreementRow]:
    """Measure the contract of a mechanism of `build_mechanism`. If it has a method `oracle`, that is compared, too."""

    def change_late_input(one: Attention) -> Difference:
        return causality_error(one, LONG - 50, length=LONG)

    def largest(measure: Callable[..., float], values: Iterable[int]) -> Callable[[Attention], float]:
        return lambda one: max(measure(one, value) for value in values)

    places, lengths = (1, 15, 16, 64, 129), (1, 2, 63, 64, 65, LENGTH)
    checks: dict[str, tuple[Callable[[Attention], float], float]] = {
        "steps equal one pass": (largest(step_error, (*lengths, LONG)), FLOAT64_TOLERANCE),
        "blocks equal one pass": (largest(block_error, lengths), FLOAT64_TOLERANCE),
        "steps beyond the capacity equal one pass": (lambda one: step_error(one, 40, 1), FLOAT64_TOLERANCE),
        "blocks beyond the capacity equal one pass": (lambda one: block_error(one, 40, 1), FLOAT64_TOLERANCE),
        "gradients of blocks equal those of one pass": (gradient_error, FLOAT64_TOLERANCE),
        "gradients pass through the state": (state_gradient_error, FLOAT64_TOLERANCE),
        "later inputs change no earlier output": (largest(causality_error, places), CAUSALITY_TOLERANCE),
        f"later inputs change nothing in a pass of {LONG}": (change_late_input, CAUSALITY_TOLERANCE),
        "gradients reach no later input": (largest(later_gradient, places), 0.0),
        "NaN changes no earlier output": (lambda one: leak_error(one, math.nan)[0], CAUSALITY_TOLERANCE),
        "NaN changes no other image": (lambda one: leak_error(one, math.nan)[1], FLOAT64_TOLERANCE),
        "other images change nothing": (lambda one: batch_errors(one)[0], CAUSALITY_TOLERANCE),
        "an image alone is the same": (lambda one: batch_errors(one)[1], FLOAT64_TOLERANCE),
        "attend modifies neither state nor inputs": (state_change, 0.0),
        f"a {mechanism.memory} state has the bytes that it claims": (wrong_state_bytes, 0.0),
    }
    if hasattr(mechanism, "oracle"):
        checks["outputs and gradients are those of the oracle"] = (oracle_error, FLOAT64_TOLERANCE)
    rows: list[AgreementRow] = []
    raised: set[str] = set()
    for name, (measure, tolerance) in checks.items():
        try:
            error = measure(mechanism)
            where = error.where if isinstance(error, Difference) else ""
        except Exception as problem:  # whatever the code of somebody else raises
            line = find_line(problem, inspect.getfile(type(mechanism)))
            error, origin = math.inf, f"{type(problem).__name__}{f' in {line}' if line else ''}"
            where = "" if origin in raised else f"{origin}: {shorten(str(problem))}"
            raised.add(origin)
        rows.append(build_row(name, error, tolerance, where))
    return rows
