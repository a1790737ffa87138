"""Random cases for the fuzz tests."""

import string
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from linformer_cli.cli.output import one_line
from linformer_cli.errors import LintxError


def cases(share: float, many: int) -> Callable[..., Any]:
    """Run this share of `many` cases, and at least 50."""
    return settings(
        max_examples=max(round(share * many), 50),
        derandomize=True,  # gives the same cases in every run
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def one_line_or_result(call: Callable[[], object]) -> None:
    try:
        call()
    except LintxError as error:
        shown = one_line(str(error))
        assert shown and len(shown) < 1000
        assert shown.isprintable()


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
numbers = st.floats() | st.integers() | st.sampled_from([0, 1, -1, 1e308, 5e-324])
nearly = st.text(alphabet=string.digits + "eE.+-:%dhmsinrowpxt=, ", max_size=14)
