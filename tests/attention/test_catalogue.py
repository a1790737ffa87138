"""Counts the places of the package that know a mechanism."""

import re

import pytest

from linformer_cli.native.build import PACKAGE


@pytest.mark.parametrize("name", ["rwkv7", "mlstm"])
def test_four_files_know_a_mechanism_with_an_operation(name) -> None:
    """docs/architecture.md lists them, and the places in tests and docs."""
    sources = (file for suffix in ("py", "h", "cpp", "js") for file in PACKAGE.rglob(f"*.{suffix}"))
    found = {str(file.relative_to(PACKAGE)) for file in sources if re.search(rf"\b{name}\b", file.read_text("utf-8"))}
    places = {"attention/catalogue.py", f"attention/{name}.py", "native/operations.h", f"native/ops/{name}.h"}
    assert found == places
