"""`lintx attentions`: the table of mechanisms, or one mechanism in detail."""

import inspect
import types
import typing
from typing import TYPE_CHECKING, Annotated, Any

from linformer_cli.config import LARGEST_SIZE, NetworkConfig
from linformer_cli.documents import parse_config
from linformer_cli.errors import UsageError
from linformer_cli.report.tables import Column, TableStyle
from . import options
from .config_options import argument, count, option, with_fields
from .output import info, print_facts, print_json, print_records

if TYPE_CHECKING:
    from linformer_cli.attention.base import AttentionShape

_COLUMNS = (
    *(Column(key, key) for key in ("attention", "source", "family", "method")),
    Column("memory", "state"),
    Column("state_bytes", "state bytes", format=","),
)
_OPTIONS = Column("options", "options")
_DETAIL_COLUMNS = tuple(Column(key, key) for key in ("option", "default", "values", "description"))


@with_fields
def attentions(
    name: str | None = argument("NAME", "A mechanism to show in detail.", None),
    positions: int | None = count(None, "Number of positions T for state bytes. Default: 784."),
    heads: int | None = count(None, "Number of heads for state bytes. Default: 8."),
    head_width: int | None = count(None, "Width of a head for state bytes. Default: 32."),
    checkpoint: str | None = option(
        None, "Take positions, heads and head width from a checkpoint.", metavar="CHECKPOINT"
    ),
    style: options.Style = "table",
    json: options.Json = False,
) -> None:
    """List the attention mechanisms, or show one.

    Examples:

    - `lintx attentions`
    - `lintx attentions linear`
    - `lintx attentions --positions 3072 --json`

    State bytes are for one layer and one image in float32, with default options. The last rows are baselines: `lstm`,
    and `none`, a block that mixes no positions. With NAME, shows the definition of that mechanism and its options.
    """
    from linformer_cli.attention.base import AttentionShape
    from linformer_cli.checkpoint import read_checkpoint
    from linformer_cli.model.mixers import find_mixer, list_mixers

    if checkpoint is not None:
        if positions or heads or head_width:
            raise UsageError("--checkpoint sets the sizes; drop --positions, --heads and --head-width")
        model = read_checkpoint(checkpoint).info.model
        positions, heads, head_width = model.block_image.positions, model.heads, model.head_width
        row = model.block_image.row_for_attention
        network: NetworkConfig = model
    else:
        positions, heads, head_width = positions or 784, heads or 8, head_width or 32
        row = max(1, round(positions**0.5))
        width = heads * head_width
        widths = {
            "heads": heads,
            "head_width": head_width,
            "width": width,
            "feed_forward": min(LARGEST_SIZE, 4 * width),
        }
        network = parse_config(NetworkConfig, widths, "sizes")
    shape = AttentionShape(heads, head_width, head_width, positions, row)
    chosen = {key: find_mixer(key) for key in (list_mixers() if name is None else [name])}
    rows = [_describe(key, network, shape) for key in chosen]
    sizes = {"positions": positions, "heads": heads, "head_width": head_width}
    if name is None:
        _print_list(rows, sizes, style, json)
    else:
        _print_one({**rows[0], "description": inspect.cleandoc(chosen[name].__doc__ or "")}, sizes, style, json)


def _print_list(rows: list[dict[str, Any]], sizes: dict[str, int], style: TableStyle, json: bool) -> None:
    if json:
        print_json({**sizes, "rows": rows})
        return
    for row in rows:
        row["options"] = ", ".join(f"{key}={_show(option['default'])}" for key, option in row["options"].items())
    if style != "table":
        print_records(rows, (*_COLUMNS, _OPTIONS), style)
        return
    # A terminal is too narrow for a single table, so there are two.
    name, source, *others = _COLUMNS
    print_records(rows, (name, *others), "table")
    print()
    print_records(rows, (name, source, _OPTIONS), "table")
    info("details: lintx attentions NAME")


def _print_one(row: dict[str, Any], sizes: dict[str, int], style: TableStyle, json: bool) -> None:
    if json:
        print_json({**sizes, **row})
        return
    described = row["options"].items()
    records = [{**option, "option": key, "default": _show(option["default"])} for key, option in described]
    if style != "table":
        print_records(records, _DETAIL_COLUMNS, style)
        return
    facts = {column.title: row[column.key] for column in _COLUMNS}
    at = f"T = {sizes['positions']:,}, {sizes['heads']} heads of {sizes['head_width']}"
    facts["bidirectional"] = "yes" if row["bidirectional"] else "no"
    facts["state bytes"] = f"{row['state_bytes']:,} (one layer, one image, float32, {at})"
    print_facts(facts)
    print(f"\n{row['description']}\n")
    if records:
        print_records(records, _DETAIL_COLUMNS, "table")
    else:
        print("no options")


def _describe(name: str, network: NetworkConfig, shape: "AttentionShape") -> dict[str, Any]:
    from linformer_cli.model.mixers import default_state_bytes, find_mixer

    mechanism = find_mixer(name)
    return {
        "attention": name,
        "source": mechanism.source,
        "family": mechanism.family,
        "method": mechanism.method,
        "memory": mechanism.memory.value,
        "bidirectional": getattr(mechanism, "bidirectional", False),
        "state_bytes": default_state_bytes(name, network, shape),
        "options": {
            key: {
                "default": field.default,
                "values": _describe_values(field.annotation),
                "description": field.description,
            }
            for key, field in mechanism.options_type.model_fields.items()
        },
    }


def _describe_values(annotation: Any) -> str:
    """Describe the values of an option: `elu, relu` for a choice, `int` for a number. The value None is left out."""
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(map(str, typing.get_args(annotation)))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return " or ".join(map(_describe_values, kinds))
    if typing.get_origin(annotation) is Annotated:
        return _describe_values(typing.get_args(annotation)[0])
    return str(getattr(annotation, "__name__", annotation))


def _show(default: Any) -> str:
    return "auto" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
