"""Tests of the names of operations' arguments."""

import pytest

from linformer_cli.native.constants import BUFFERS, INTEGERS, REALS
from linformer_cli.native.program import Operation, bind, read_signatures


def test_arguments_are_placed_by_name() -> None:
    arguments = {"count": 2, "floor": 0.5, "width": True, "y": 7, "divisor": 3.0}
    assert bind("normalise", arguments) == Operation("normalise", (7,), (2, 1), (3.0, 0.5))
    join = bind("join", {"shift": 4, "gain": 3, "h": 2, "x": 1, "width": 8})
    assert join == Operation("join", (1, -1, 2, 3, 4), (8,))


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


def test_every_signature_fits_into_an_operation() -> None:
    for signature in read_signatures().values():
        assert len({one.name for one in signature}) == len(signature)
        for kind, room in (("buffer", BUFFERS), ("integer", INTEGERS), ("real", REALS)):
            assert sum(one.kind == kind for one in signature) <= room
