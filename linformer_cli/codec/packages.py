"""The packages of the extra `compress`. lintx also runs without them, so they are imported when they are used."""

from typing import Any

from linformer_cli.errors import UsageError

_MISSING = "compressed files need the packages constriction and crc32c; pip install 'lintx[compress]'"


def load_constriction() -> Any:
    """Return the streams of constriction. Raises `UsageError` if the package is not installed."""
    try:
        import constriction
    except ImportError:
        raise UsageError(_MISSING) from None
    return constriction.stream


def compute_checksum(data: bytes, before: int = 0) -> int:
    """The CRC-32C of `data`, or of what has the checksum `before` followed by `data`.

    Raises `UsageError` if the package crc32c is not installed.
    """
    try:
        from crc32c import crc32c
    except ImportError:
        raise UsageError(_MISSING) from None
    return crc32c(data, before)
