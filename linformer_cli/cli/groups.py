"""Groups of commands that are imported when they are used, so that a help page does not wait for all of them."""

import importlib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.main import get_group

from linformer_cli.errors import UsageError

# What the help shows as the value of an option, by its type.
_METAVARS = {
    "<bool>": "",
    "<str>": "TEXT",
    "<int>": "N",
    "<int range>": "N",
    "<float>": "X",
    "<float range>": "X",
    "<path>": "PATH",
}


class LazyGroup(TyperGroup):
    """A group whose `table` has each command's module and function, and its summary: the docstring's first line."""

    table: ClassVar[Mapping[str, tuple[str, str]]]
    # The headings of the help page, each with its commands.
    panels: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        panel = {name: panel for panel, names in self.panels.items() for name in names.split()}
        self.commands = {
            name: TyperCommand(name, help=summary, rich_help_panel=panel.get(name))
            for name, (_, summary) in self.table.items()
        }
        self._loaded: dict[str, Any] = {}

    def get_params(self, ctx: Any) -> list[Any]:
        return _shorten_types(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.table and cmd_name not in self._loaded:
            self._loaded[cmd_name] = _load(cmd_name, self.table[cmd_name][0])
        return self._loaded.get(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._loaded = {**self.commands}
        super().format_help(ctx, formatter)


class _Command(TyperCommand):
    """A command that refuses an empty path, which would mean the working folder."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _shorten_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        empty = {before for before, word in pairwise(["", *args]) if not word}
        empty |= {word.removesuffix("=") for word in args if word.endswith("=")}
        has_empty = "" in args
        rest = super().parse_args(ctx, args)
        for parameter in self.params:
            given = ctx.params.get(parameter.name or "")
            # An empty path and "." are equal once they are parsed.
            here = Path() in (given if isinstance(given, list | tuple) else [given])
            if here and (has_empty if isinstance(parameter, TyperArgument) else empty & {*parameter.opts}):
                name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.opts[0].upper()
                raise UsageError(f"{name} is empty; give it a path")
        return rest


def _shorten_types(parameters: list[Any]) -> list[Any]:
    """Let the help show `N` for a number and nothing for a flag. Typer has built the check of the bounds by now."""
    for one in parameters:
        one.min = one.max = None
        if one.metavar is None:
            one.metavar = _METAVARS.get(one.display_type(None))
    return parameters


def _load(name: str, target: str) -> Any:
    module, _, attribute = target.partition(".")
    found = getattr(importlib.import_module(f".{module}", __package__), attribute)
    holder = typer.Typer(rich_markup_mode="markdown")
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        holder.command(name, cls=_Command)(found)
    return get_group(holder).commands[name]
