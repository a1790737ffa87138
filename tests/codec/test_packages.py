"""Tests of the checksum, and of what is said where the extra `compress` is not installed."""

import sys

import pytest

from linformer_cli.codec.coder import Coder
from linformer_cli.codec.header import compute_checksum
from linformer_cli.errors import LintxError


def test_the_checksum_is_crc32c() -> None:
    pytest.importorskip("crc32c")
    assert compute_checksum(b"123456789") == 0xE3069283  # the check value of CRC-32C
    assert compute_checksum(b"6789", compute_checksum(b"12345")) == 0xE3069283


@pytest.mark.parametrize("package", ["constriction", "crc32c"])
def test_a_missing_package_is_named(package, monkeypatch, build_tiny_model, raises_one_line) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with raises_one_line(LintxError, f"{package} does not load", "pip install '.[compress]'"):
        Coder(build_tiny_model()) if package == "constriction" else compute_checksum(b"")
