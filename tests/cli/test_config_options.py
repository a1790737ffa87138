"""Tests of options that are created from fields of a configuration.

The name, type, bounds, default and help text of an option come from its field.
"""

from typing import Annotated, Any, Literal

import pytest
import typer
from loops import loop_over
from pydantic import Field
from typer.testing import CliRunner

from linformer_cli.cli.config_options import Fields, describe_default, with_fields
from linformer_cli.config import CountOrZero, NetworkConfig, Seconds, TrainConfig
from linformer_cli.documents import Config
from linformer_cli.errors import UsageError
from linformer_cli.presets import PRESETS


class Sizes(Config):
    width: CountOrZero = Field(4, description="How wide.")
    slope: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="How steep.")
    kind: Literal["round", "square"] = Field("round", description="The shape.")
    fast: bool = Field(False, description="Hurry.")
    pause: Seconds | None = Field(None, description="How long to wait.")
    extra_options: dict[str, str] = Field({}, description="More.")


received: list[dict[str, Any]] = []
app = typer.Typer()


@app.command()
@with_fields
def draw(
    *,
    name: Annotated[str, typer.Argument()],
    sizes: Annotated[dict[str, Any], Fields(Sizes, "Sizes", without=("missing",))],
    loud: bool = False,
) -> None:
    received.append({"name": name, "loud": loud, **sizes})


def run(*arguments: str) -> tuple[int, str]:
    received.clear()
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_only_given_options_are_passed_on() -> None:
    assert run("a") == (0, "")
    assert received == [{"name": "a", "loud": False}]
    given = ["--width", "0", "--slope", "1", "--kind", "square", "--no-fast", "--pause", "1h30m", "--loud"]
    assert run("a", *given, "--extra-option", "x=1", "--extra-option", "y=a=b")[0] == 0
    values = {"width": 0, "slope": 1.0, "kind": "square", "fast": False, "pause": 5400.0}
    assert received == [{"name": "a", "loud": True, **values, "extra_options": {"x": "1", "y": "a=b"}}]


@loop_over(
    ("option", "value"),
    [
        *(("--width", value) for value in ("-1", "1.5", str(2**63), "9" * 400)),
        *(("--slope", value) for value in ("0", "1.01", "nan")),
        ("--kind", "oval"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_the_name_of_its_option(option: str, value: str) -> None:
    code, text = run("a", option, value)
    assert (code, received) == (2, []) and option in text


def test_a_wrong_time_is_refused() -> None:
    with pytest.raises(UsageError, match="'soon' is not a time"):
        CliRunner().invoke(app, ["a", "--pause", "soon"], catch_exceptions=False)


def test_defaults_come_from_the_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    def default(config: type[Config], name: str) -> str:
        return describe_default(name, config.model_fields[name])

    assert default(Sizes, "kind") == " Default: round."
    assert default(TrainConfig, "accumulation") == " Default: 1."
    assert default(TrainConfig, "steps") == default(NetworkConfig, "attention_options") == ""
    assert default(TrainConfig, "learning_rate") == " In mnist-wide: 0.008."
    assert default(NetworkConfig, "width") == " In mnist-wide: 128."
    for name in PRESETS:
        monkeypatch.setitem(PRESETS, name, PRESETS["tiny"])
    assert default(NetworkConfig, "width") == " Default: 32."


def test_every_setting_is_an_option_of_train(lintx, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = lintx("train", "--help").stdout
    for name in (*NetworkConfig.model_fields, *TrainConfig.model_fields):
        assert f"--{name.replace('_', '-').removesuffix('s')}" in text
