"""Tests that the native engine scales huge vectors down before it squares them, as the reference forms do."""

import inspect

import torch
from loops import loop_over
from machine import needs_library
from sampling.test_native_caches import Step, build_attention, draw_inputs
from sampling.test_native_mechanisms import VARIANTS
from tolerances import assert_agree

from linformer_cli.attention.catalogue import CATALOGUE

pytestmark = needs_library

SHRINKING = [
    key
    for key, (name, options) in VARIANTS.items()
    if name in CATALOGUE
    and "shrink_huge" in inspect.getsource(inspect.getmodule(CATALOGUE[name]))
    and options.get("normalise", True)  # mamba's queries and keys are not squared without it
]


def test_mechanisms_that_shrink_are_found() -> None:
    assert {VARIANTS[key][0] for key in SHRINKING} == {"long_short", "lsh", "mamba", "mesa"}


@loop_over("variant", SHRINKING)
@loop_over("key_width", [6, 20])
def test_huge_queries_and_keys_match_the_reference(variant: str, key_width: int) -> None:
    """Squares of these queries and keys overflow a float."""
    attention = build_attention(variant, key_width)
    heads, key_width, value_width = attention.shape.heads_and_widths
    step = Step(attention, torch.float32, 2)
    state = attention.init_state(2, attention.shape.positions, torch.device("cpu"), torch.float32)
    queries = 0 if attention.shared_query_key else key_width
    for inputs in draw_inputs(step, 2):
        inputs[:, : heads * (queries + key_width)] *= 1e20
        widths = [heads * width for width in (queries, key_width, value_width, attention.extra_per_head)]
        q, k, v, extra = (part.unflatten(1, (heads, -1)) if part.numel() else None for part in inputs.split(widths, 1))
        expected, state = attention.step(k if q is None else q, k, v, state, extra)
        assert_agree(step(inputs), expected.flatten(1), 1e-4)
