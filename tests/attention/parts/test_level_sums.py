"""Tests which buckets a position is merged with; test_log_linear.py tests sums over buckets."""

from linformer_cli.attention.parts.level_sums import count_buckets, count_carries


def test_a_position_is_merged_with_the_buckets_of_its_trailing_one_bits() -> None:
    buckets: set[int] = set()
    for position in range(200):
        carries = count_carries(position)
        assert buckets >= set(range(carries)) and carries not in buckets
        buckets = (buckets - set(range(carries))) | {carries}
        assert sum(2**bucket for bucket in buckets) == position + 1
        assert max(buckets) == count_buckets(position + 1) - 1
