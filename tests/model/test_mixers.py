"""Tests of the names that `attention` can have in a configuration, and of the block for each name."""

from collections.abc import Callable
from typing import Any

import pytest

from linformer_cli.config import ModelConfig
from linformer_cli.errors import UsageError
from linformer_cli.model.lstm import LstmOptions
from linformer_cli.model.mixers import build_blocks, parse_options

BuildConfig = Callable[..., ModelConfig]


def test_an_unknown_name_gets_a_suggestion(raises_one_line: Any, build_config: BuildConfig) -> None:
    for wrong, right in (("lsmt", "lstm"), ("linaer", "linear"), ("flsh", "flash")):
        with raises_one_line(UsageError, f"unknown attention '{wrong}'", f"did you mean '{right}'?"):
            parse_options(wrong, {})
    with raises_one_line(UsageError, "unknown attention 'xyz'", "lstm", "softmax"):
        build_blocks(build_config("xyz"))


def test_options_of_a_baseline_are_validated(build_config: BuildConfig) -> None:
    assert parse_options("lstm", {"hidden": "12"}) == LstmOptions(hidden=12)
    with pytest.raises(UsageError, match=r"'lstm': unknown key 'hiden'; did you mean 'hidden'"):
        parse_options("lstm", {"hiden": 12})
    with pytest.raises(UsageError, match=r"hidden.*greater than 0.*found 0"):
        build_blocks(build_config("lstm", attention_options={"hidden": 0}))
