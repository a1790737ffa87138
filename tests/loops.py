"""`loop_over`: one test for many small cases of one property; `first_fast`: parameters that are mostly slow."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Test = Callable[..., None]


def loop_over(names: str | Sequence[str], values: Iterable[Any]) -> Callable[[Test], Test]:
    """Like `pytest.mark.parametrize`, but one test goes through all values; an error names its value.

    A test costs some milliseconds to collect, send and report, often more than its work. The values share the fixtures.
    """
    keys, values = names.replace(",", " ").split() if isinstance(names, str) else names, list(values)

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            for value in values:
                given = dict(zip(keys, value if len(keys) > 1 else [value], strict=True))
                try:
                    test(**fixtures, **given)
                except Exception as error:
                    error.add_note(f"The error belongs to {given}.")
                    raise

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate


def first_fast(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`, all but the first `count` of which are slow; tuples are unpacked."""
    parameters = []
    for number, value in enumerate(values):
        marks = () if number < count else pytest.mark.slow
        parameters.append(pytest.param(*(value if isinstance(value, tuple) else [value]), marks=marks))
    return parameters
