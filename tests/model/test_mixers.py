"""Tests of the options of baselines."""

from collections.abc import Callable

import pytest

from linformer_cli.config import ModelConfig
from linformer_cli.errors import UsageError
from linformer_cli.model.lstm import LstmOptions
from linformer_cli.model.mixers import build_blocks, parse_options


def test_options_of_a_baseline_are_validated(build_config: Callable[..., ModelConfig]) -> None:
    assert parse_options("lstm", {"hidden": "12"}) == LstmOptions(hidden=12)
    with pytest.raises(UsageError, match=r"'lstm': unknown key 'hiden'; did you mean 'hidden'"):
        parse_options("lstm", {"hiden": 12})
    with pytest.raises(UsageError, match=r"hidden.*greater than 0.*found 0"):
        build_blocks(build_config("lstm", attention_options={"hidden": 0}))
