"""Tests particular to the mesa layer; test_contract.py covers what all mechanisms share."""

import contextlib
import functools

import pytest
import torch
from attention.arguments import build_one, draw_parts, step_through
from attention.cases.mesa import recurrence
from attention.inputs import Inputs
from loops import loop_over
from machine import needs_library
from tolerances import FLOAT32_DRIFT, FLOAT64, assert_agree, assert_all_agree

from linformer_cli.attention.base import AttentionShape
from linformer_cli.attention.kernels import cpu_recurrences as kernels
from linformer_cli.model.mixers import build_attention
from linformer_cli.native.library import reference_only

build = functools.partial(build_one, "mesa")
draw = functools.partial(draw_parts, widths=(6, 6, 5, 2))


def test_lambda_starts_at_one_and_is_at_least_a_quarter() -> None:
    """At the first position, with beta 1, h has the eigenvalue 1 for the key and 0 for all other directions."""
    attention, (_, k, v, state, extra) = build(iterations=8), draw(1)
    extra[..., 0] = 2000.0
    y, _ = attention.attend(k, k, v, state, extra)
    assert_agree(y, v / 2, 1e-5)
    attention.ridge.data.fill_(-2000.0)
    y, _ = attention.attend(k, k, v, state, extra)
    assert_agree(y, v / 1.25, 1e-5)


def test_a_linear_map_from_keys_to_values_is_found() -> None:
    """Linear attention would give a sum of values instead, which grows with the number of positions."""
    attention, (q, k, _, state, extra) = build(iterations=6), draw(400)
    linear_map = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    extra[..., 0], extra[..., 1] = 2000.0, 2000.0
    y, _ = attention.attend(q, k, k @ linear_map, state, extra)
    assert_agree(y[:, :, -50:], (q @ linear_map)[:, :, -50:], 0.03)


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_both_forms_agree_before_the_iterations_converge(iterations: int) -> None:
    attention, inputs = build(iterations=iterations), draw(60)
    y, _ = attention.attend(*inputs)
    assert_agree(step_through(attention, inputs)[0], y, FLOAT64)
    exact, _ = build(iterations=6).attend(*inputs)
    assert 1e-3 < (y - exact).abs().max() < 0.3 ** (iterations - 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_errors_do_not_grow_from_iteration_to_iteration(dtype: torch.dtype) -> None:
    """Keys with a common part give one large eigenvalue, and eight iterations are too few to converge."""
    generator = torch.Generator().manual_seed(0)
    shape = AttentionShape(heads=1, key_width=24, value_width=5, positions=784, row=28)
    attention = build_attention("mesa", {"iterations": 8}, shape).to(dtype)
    q, k, v, extra = (torch.randn(1, 1, 150, n, generator=generator, dtype=dtype) for n in (24, 24, 5, 2))
    inputs = [q + 1, k * torch.logspace(0, -2, 24, dtype=dtype) + 1, v, None, extra]
    y, _ = attention.attend(*inputs)
    assert_agree(step_through(attention, inputs)[0], y, FLOAT64 if dtype == torch.float64 else FLOAT32_DRIFT)


def test_more_iterations_than_dimensions_are_not_computed() -> None:
    """After as many iterations as a key has dimensions, the solution is exact."""
    attention, inputs = build(iterations=1000), draw(60)
    assert attention.iterations == 6
    q, k, v, _, extra = inputs
    expected = recurrence(Inputs(q, k, v, extra), dict(attention.named_parameters()))
    assert_agree(attention.attend(*inputs)[0], expected, FLOAT64)


def test_results_are_exact_for_zero_queries_and_keys_and_for_small_gradients() -> None:
    """The squares of these gradients underflow float32."""
    q, k, v, _, extra = draw(60)
    q[:, :, ::7], k[:, :, ::5] = 0, 0
    results = []
    for dtype, factor in ((torch.float64, 1.0), (torch.float32, 1e-25)):
        leaves = [part.to(dtype).requires_grad_() for part in (q, k, v, extra)]
        y, _ = build(dtype).attend(*leaves[:3], None, leaves[3])
        gradients = torch.autograd.grad((factor * y).sum(), leaves)
        results.append([y.detach(), *(gradient.double() / factor for gradient in gradients)])
    for ours, theirs in zip(*results, strict=True):
        assert_agree(theirs, ours, FLOAT32_DRIFT)


def test_the_gradient_after_few_iterations_is_close_to_that_of_the_exact_inverse() -> None:
    q, k, v, _, extra = draw(60)
    attention, found = build(iterations=4), []
    for exact in (False, True):
        leaves = [part.clone().requires_grad_() for part in (q, k, v, extra)]
        if exact:
            y = recurrence(Inputs(*leaves), dict(attention.named_parameters()))
        else:
            y, _ = attention.attend(*leaves[:3], None, leaves[3])
        found.append(torch.autograd.grad(y.square().sum(), leaves))
    assert_all_agree(*found, 0.01)


@needs_library
@loop_over(("width", "iterations"), [(1, 1), (17, 5), (32, 20), (40, 33)])
@loop_over("dtype", [torch.float32, torch.float64])
def test_the_compiled_solver_matches_the_reference(width: int, iterations: int, dtype: torch.dtype) -> None:
    """Widths and iterations fill a part of a vector, or several vectors. The second half continues from a state."""
    generator = torch.Generator().manual_seed(0)
    shape = AttentionShape(heads=3, key_width=width, value_width=5, positions=784, row=28)
    attention = build_attention("mesa", {"iterations": iterations}, shape).to(dtype)
    inputs = [torch.randn(2, 3, 70, n, generator=generator, dtype=dtype) for n in (width, width, 5, 2)]
    results = []
    for context in (contextlib.nullcontext(), reference_only()):
        with context:
            outputs, state = [], None
            for piece in (slice(0, 37), slice(37, None)):
                q, k, v, extra = (x[:, :, piece] for x in inputs)
                y, state = attention.attend(q, k, v, state, extra)
                outputs.append(y)
            results.append(torch.cat(outputs, dim=2))
    assert not torch.equal(*results), "both results come from the same form"
    assert_agree(*results, FLOAT64 if dtype == torch.float64 else FLOAT32_DRIFT)


@needs_library
def test_a_nan_reaches_only_the_solutions_that_depend_on_it() -> None:
    generator = torch.Generator().manual_seed(0)
    right, keys = (torch.randn(2, 2, 40, 6, generator=generator) for _ in range(2))
    matrices = 0.5 * keys, torch.full((2, 2, 40), -0.1), None, torch.ones(2, 6)
    clean = kernels.solve(right, keys, *matrices, 4)
    assert clean.isfinite().all()
    bad_right, bad_keys = right.clone(), keys.clone()
    bad_right[0, 1, 7, 2] = bad_keys[0, 1, 7, 2] = torch.nan
    for found, last in (
        (kernels.solve(bad_right, keys, *matrices, 4), 8),
        (kernels.solve(right, bad_keys, *matrices, 4), 40),
    ):
        assert found[0, 1, 7:last].isnan().all()
        found[0, 1, 7:last] = clean[0, 1, 7:last]
        assert torch.equal(found, clean)


@needs_library
def test_the_compiled_solver_refuses_sizes_and_types_that_do_not_match() -> None:
    x = torch.ones(2, 2, 5, 6)
    for inputs, positions in ((x, 4), (x.bfloat16(), 5)):
        with pytest.raises(ValueError, match="sizes or types do not match"):
            kernels.solve(inputs, inputs, inputs, torch.zeros(2, 2, positions), None, torch.ones(2, 6), 4)
