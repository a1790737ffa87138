"""`loop_over`: one test for many small cases of one property."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def loop_over(names: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize`, but one test goes through all values; an error names its value.

    A test costs some milliseconds to collect, send and report, often more than its work. The values share the fixtures.
    """
    keys, values = names.replace(",", " ").split(), list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            for value in values:
                given = dict(zip(keys, value if len(keys) > 1 else [value], strict=True))
                try:
                    test(**fixtures, **given)
                except Exception as error:
                    error.add_note(
                        f"The error belongs to {', '.join(f'{key} = {each}' for key, each in given.items())}."
                    )
                    raise

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate
