import pytest

from linformer_cli.cli.options import parse_duration, parse_pairs
from linformer_cli.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("10m", 600),
        ("10 min", 600),
        ("1.5h", 5400),
        ("1h30m", 5400),
        ("1H 5s", 3605),
        ("2d", 172800),
    ],
)
def test_times_in_the_users_units(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "ten", "10x", "-5m", "0s", "1h-5m", "5m!"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(UsageError):
        parse_duration(text)


def test_pairs():
    assert parse_pairs(["chunk=16", "feature_map=elu", "text=a=b"], "--x") == {
        "chunk": "16",
        "feature_map": "elu",
        "text": "a=b",
    }
    assert parse_pairs(None, "--x") == {}


@pytest.mark.parametrize("pairs", [["chunk"], ["=3"], ["chunk=1", "chunk=2"]])
def test_wrong_pairs_are_refused(pairs):
    with pytest.raises(UsageError, match="--x"):
        parse_pairs(pairs, "--x")
