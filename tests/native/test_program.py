"""Tests of the names of operations' arguments."""

import pytest
import torch

from linformer_cli.native.constants import BUFFERS, INTEGERS, REALS
from linformer_cli.native.program import Builder, Operation, Signature, signatures


def test_arguments_are_placed_by_name() -> None:
    found = Signature(("x", "gain", "y"), ("count",), ("floor",), frozenset({"gain", "y", "floor"}))
    assert found.bind("f", {"count": 3, "x": 1}) == Operation("f", (1,), (3,), ())
    assert found.bind("f", {"y": 2, "count": True, "x": 1, "floor": 0.5}) == Operation("f", (1, -1, 2), (1,), (0.5,))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"y": 0, "x": 1, "width": 2}, r"operation fold: missing \['chunks'\], unknown \[\]"),
        ({"y": 0, "x": 1, "width": 2, "chunks": 3, "z": 4}, r"missing \[\], unknown \['z'\]"),
        ({"y": 0, "x": 1, "width": 2, "rows": 3}, r"missing \['chunks'\], unknown \['rows'\]"),
    ],
)
def test_missing_and_unknown_arguments_are_errors(arguments, reason) -> None:
    with pytest.raises(TypeError, match=reason):
        Builder(torch.float32, 8).emit("fold", **arguments)


def test_every_signature_fits_into_an_operation() -> None:
    for one in signatures().values():
        for names, room in ((one.buffers, BUFFERS), (one.integers, INTEGERS), (one.reals, REALS)):
            assert len(names) <= room
        names = [*one.buffers, *one.integers, *one.reals]
        assert len(names) == len(set(names))
