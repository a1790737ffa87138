"""Tests of the checksum, and of what is said where the extra `compress` is not installed."""

import sys

import pytest

from linformer_cli.codec.packages import compute_checksum, load_constriction
from linformer_cli.errors import UsageError


def test_the_checksum_is_crc32c() -> None:
    pytest.importorskip("crc32c")
    assert compute_checksum(b"123456789") == 0xE3069283  # the check value of CRC-32C
    assert compute_checksum(b"6789", compute_checksum(b"12345")) == 0xE3069283


USES = {"constriction": load_constriction, "crc32c": lambda: compute_checksum(b"")}


@pytest.mark.parametrize("package, use", USES.items())
def test_a_missing_package_is_named(package, use, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=f"{package}.*lintx.compress"):
        use()
