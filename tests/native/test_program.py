"""Tests of the names of operations' arguments."""

import pytest

from linformer_cli.native.program import bind


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, r"operation fold: missing \['chunks'\], unknown \[\]"),
        ({"chunks": 3, "z": 4}, r"missing \[\], unknown \['z'\]"),
        ({"rows": 3}, r"missing \['chunks'\], unknown \['rows'\]"),
    ],
)
def test_missing_and_unknown_arguments_are_errors(change, reason) -> None:
    with pytest.raises(TypeError, match=reason):
        bind("fold", {"y": 0, "x": 1, "width": 2} | change)
