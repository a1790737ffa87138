"""The two packages of the extra `speech`, imported where they are used."""

import importlib
from typing import Any

from linformer_cli.errors import LintxError


def import_extra(name: str) -> Any:
    """Return the module `name`. Raises `LintxError` if it, or a library that it needs, is missing."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # soundfile raises OSError if libsndfile is missing
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LintxError(f"speech needs {name}, which does not load ({reason}); pip install 'lintx[speech]'") from None
