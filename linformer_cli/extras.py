"""Packages of the extras of lintx. lintx also runs without them, so they are imported where they are used."""

import importlib
from typing import Any

from .errors import LintxError


def import_extra(package: str, extra: str) -> Any:
    """Return the module `package`. Raises `LintxError` if it, or a library that it needs, is missing."""
    try:
        return importlib.import_module(package)
    except (ImportError, OSError) as error:  # soundfile raises OSError if libsndfile is missing
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LintxError(f"{package} does not load ({reason}); in a clone of lintx: pip install '.[{extra}]'") from None
