"""Command line options made from fields, so that a command takes many options as one parameter.

A parameter `Annotated[dict[str, Any], Fields(TrainConfig, "Training")]` stands for an option for each field of a
configuration, and the command receives those that were given. A parameter of a dataclass stands for its fields. Other
parameters and fields are an `option`, or annotated as for Typer.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from linformer_cli.config import Duration
from linformer_cli.documents import Config
from linformer_cli.presets import DEFAULT_PRESET, PRESETS, preset_defaults
from .options import LARGEST_COUNT, Plugins, parse_duration, parse_numbers, parse_pairs, parse_sizes

_OPTION = "option"  # the key under which a field of a dataclass keeps its option
# What the help shows as the value of settings that are texts.
_METAVARS = {"image_size": "HEIGHTxWIDTH", "ground": "COLOUR", "range": "LO,HI", "channels": "N", "device": "DEVICE"}


@dataclass(frozen=True)
class Fields:
    """The fields of `config` as options under the heading `panel`: all or some. `help` replaces their descriptions."""

    config: type[Config]
    panel: str
    only: Collection[str] | None = None
    without: Collection[str] = ()
    help: str | None = None

    @property
    def names(self) -> list[str]:
        known = self.config.model_fields
        return [name for name in known if name not in self.without and (self.only is None or name in self.only)]

    def take_given(self, values: dict[str, Any]) -> dict[str, Any]:
        """Remove these fields from `values`, and return those that were given."""
        taken = {name: values.pop(name) for name in self.names}
        return {
            name: parse_pairs(value, _flag(name, self.config.model_fields[name])) if isinstance(value, list) else value
            for name, value in taken.items()
            if value is not None
        }


def option(default: Any, help: str, *flags: str, **settings: Any) -> Any:
    """Declare an option with this default, help and settings of `typer.Option`. Without `flags`, `name` is `--name`."""
    return dataclasses.field(default=default, metadata={_OPTION: typer.Option(*flags, help=help, **settings)})


def argument(metavar: str, help: str, default: Any = dataclasses.MISSING) -> Any:
    """Declare an argument, like an `option`. `metavar` is its name in the help. It is required without a default."""
    return dataclasses.field(default=default, metadata={_OPTION: typer.Argument(metavar=metavar, help=help)})


# An option that is a number of things.
count = functools.partial(option, min=1, max=LARGEST_COUNT)
# An option that is a time. The command gets seconds.
duration = functools.partial(option, parser=parse_duration, metavar="TIME")
# An option whose value has parts separated by commas.
several = functools.partial(option, metavar="LIST")

# Options that are lists of numbers.
sizes = functools.partial(several, parser=parse_sizes)
numbers = functools.partial(several, parser=parse_numbers)


def with_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` for Typer. Each parameter that stands for a group of options is replaced by these options."""
    signature = inspect.signature(command)
    given = signature.parameters
    parameters = [one for each in given.values() for one in _expand(each.name, each.annotation, each.default)]
    parameters += _expand("plugin", Plugins, None)  # every command may meet mechanisms from outside

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(**{name: _take(name, parameter.annotation, values) for name, parameter in given.items()})

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _expand(name: str, annotation: Any, default: Any) -> list[inspect.Parameter]:
    """Return the options that a parameter of a command, or a field of a dataclass, stands for."""
    if (group := _find_group(annotation)) is not None:
        return [_build_parameter(field, group) for field in group.names]
    if dataclasses.is_dataclass(annotation):
        fields = dataclasses.fields(annotation)
        return [parameter for field in fields for parameter in _expand(field.name, field.type, field)]
    if isinstance(default, dataclasses.Field):
        if (setting := default.metadata.get(_OPTION)) is not None:
            if setting.parser in (parse_sizes, parse_numbers):  # their messages name the option
                # Typer keeps the first flag as the default, until it has seen the annotation.
                flag = setting.default if isinstance(setting.default, str) else f"--{name.replace('_', '-')}"
                setting.parser = functools.partial(setting.parser, option=flag)
            # With a parser, the type says what the command gets, and Typer must not look at it.
            annotation = Annotated[Any if setting.parser else annotation, setting]
        default = inspect.Parameter.empty if default.default is dataclasses.MISSING else default.default
    return [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)]


def _take(name: str, annotation: Any, values: dict[str, Any]) -> Any:
    """Remove the options of a parameter from `values`, and return its value."""
    if (group := _find_group(annotation)) is not None:
        return group.take_given(values)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        fields = dataclasses.fields(annotation)
        return annotation(**{field.name: _take(field.name, field.type, values) for field in fields})
    return values.pop(name)


def _find_group(annotation: Any) -> Fields | None:
    marks = typing.get_args(annotation)[1:] if typing.get_origin(annotation) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, Fields)), None)


def _build_parameter(name: str, group: Fields) -> inspect.Parameter:
    kind, metadata = unwrap(field := group.config.model_fields[name])
    annotation: Any = kind
    option: dict[str, Any] = {"rich_help_panel": group.panel, "metavar": _METAVARS.get(name)}
    option["help"] = group.help or f"{field.description}{describe_default(name, field)}"
    if typing.get_origin(kind) is dict:
        annotation, option["metavar"] = list[str], "KEY=VALUE"
    elif any(isinstance(mark, Duration) for mark in metadata):
        option |= {"parser": parse_duration, "metavar": "TIME"}
    elif kind in (int, float):
        option |= {"parser": _build_parser(kind, metadata), "metavar": "N" if kind is int else "X"}
    elif any(isinstance(mark, BeforeValidator) for mark in metadata):
        annotation, option["parser"] = str, _build_parser(kind, metadata)
    annotated = Annotated[annotation | None, typer.Option(_flag(name, field), **option)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotated)


def _flag(name: str, field: FieldInfo) -> str:
    """Return `--attention` for `attention`, `--fast/--no-fast` for a bool `fast`, `--option` for a table `options`."""
    flag, (kind, _) = name.replace("_", "-"), unwrap(field)
    if kind is bool:
        return f"--{flag}/--no-{flag}"
    return f"--{flag.removesuffix('s')}" if typing.get_origin(kind) is dict else f"--{flag}"


def unwrap(field: FieldInfo) -> tuple[Any, list[Any]]:
    """Return the type of a field, without None, and the annotations of the type."""
    kind: Any = field.annotation
    metadata = list(field.metadata)
    if type(None) in typing.get_args(kind):
        (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is Annotated:
        kind, *more = typing.get_args(kind)
        metadata += more
    return kind, metadata


def describe_default(name: str, field: FieldInfo) -> str:
    """Return the default of a setting as a sentence, or an empty text. If presets differ, it names one."""
    values = {preset: preset_defaults(preset).get(name, field.default) for preset in PRESETS}
    default = values[DEFAULT_PRESET]
    if default is None or default == {}:
        return ""
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    return f" In {DEFAULT_PRESET}: {shown}." if len(set(values.values())) > 1 else f" Default: {shown}."


def _build_parser(kind: type, metadata: list[Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        annotated: Any = Annotated[kind, *metadata]
        adapter: TypeAdapter[Any] = TypeAdapter(annotated, config=ConfigDict(allow_inf_nan=False))
        try:
            return adapter.validate_python(text)
        except ValidationError as error:
            raise typer.BadParameter(f"{error.errors()[0]['msg']}, found '{text}'") from None

    return parse
