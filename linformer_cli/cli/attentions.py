"""`lintx attentions`: the catalogue of mechanisms."""

from typing import Annotated, Any

import typer

from linformer_cli.report.tables import Column

from . import options
from .output import print_json, print_records


def attentions(
    positions: Annotated[int, typer.Option("--positions", min=1, help="T that state bytes are for.")] = 784,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Heads that state bytes are for.")] = 8,
    head_width: Annotated[int, typer.Option("--head-width", min=1, help="Width of a head they are for.")] = 32,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", "-c", help="Take these sizes from a model.", show_default=False)
    ] = None,
    style: Annotated[options.TableFormat, typer.Option("--format", help="How to print.")] = options.TableFormat.TABLE,
    json: options.Json = False,
) -> None:
    """List every attention.

    Where it comes from, how it approximates, what its state does as images grow, and its options. State bytes are those
    of one layer and one image in float32.

    Examples:

    - `lintx attentions`
    - `lintx attentions --positions 3072 --json`
    """
    import torch

    from linformer_cli.attention import CATALOGUE, build_attention
    from linformer_cli.attention.base import AttentionShape
    from linformer_cli.checkpoint import read_checkpoint

    if checkpoint is not None:
        model = read_checkpoint(checkpoint).info.model
        positions, heads, head_width = model.image.positions, model.heads, model.head_width
    shape = AttentionShape(heads, head_width, head_width, positions, row=max(1, round(positions**0.5)))
    rows: list[dict[str, Any]] = []
    for name, mechanism in CATALOGUE.items():
        fields = mechanism.options_type.model_fields
        rows.append(
            {
                "attention": name,
                "source": mechanism.source,
                "family": mechanism.family,
                "method": mechanism.method,
                "memory": mechanism.memory.value,
                "state_bytes": build_attention(name, {}, shape).state_bytes(1, positions, torch.float32),
                "options": {
                    key: {"default": field.default, "description": field.description} for key, field in fields.items()
                },
            }
        )
    if json:
        print_json({"positions": positions, "heads": heads, "head_width": head_width, "rows": rows})
        return
    for row in rows:
        row["options"] = ", ".join(f"{key}={option['default']}" for key, option in row["options"].items())
    columns = (
        Column("attention", "attention"),
        Column("source", "source"),
        Column("family", "family"),
        Column("method", "method"),
        Column("memory", "state"),
        Column("state_bytes", "state bytes", format=","),
        Column("options", "options"),
    )
    print_records(rows, columns, style.value)
