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
    of one layer and one image in float32. Gated ones have one head of their own widths, in place of the heads given.
    The last is no attention but a recurrent baseline, which --attention takes as well.

    Examples:

    - `lintx attentions`
    - `lintx attentions --positions 3072 --json`
    """
    import torch

    from linformer_cli.attention import CATALOGUE, build_for_model
    from linformer_cli.attention.base import Attention, AttentionShape
    from linformer_cli.checkpoint import read_checkpoint
    from linformer_cli.config import NetworkConfig, parse_config
    from linformer_cli.model.catalogue import BASELINES
    from linformer_cli.model.lstm import LstmBlock

    if checkpoint is not None:
        model = read_checkpoint(checkpoint).info.model
        positions, heads, head_width = model.image.positions, model.heads, model.head_width
        network: NetworkConfig = model
    else:
        width = heads * head_width
        sizes = {"heads": heads, "head_width": head_width, "width": width, "feed_forward": 4 * width}
        network = parse_config(NetworkConfig, sizes, "sizes")
    shape = AttentionShape(heads, head_width, head_width, positions, row=max(1, round(positions**0.5)))
    state_bytes = {
        name: build_for_model(name, {}, shape, network.width).state_bytes(1, positions, torch.float32)
        for name in CATALOGUE
    }
    for name, baseline in BASELINES.items():
        with torch.device("meta"):  # its size alone is wanted, and its weights grow with the width
            block = baseline(network, baseline.options_type())
        state_bytes[name] = block.state_bytes(1, positions, torch.float32)
    rows: list[dict[str, Any]] = []
    everything: dict[str, type[Attention] | type[LstmBlock]] = {**CATALOGUE, **BASELINES}
    for name, mechanism in everything.items():
        fields = mechanism.options_type.model_fields
        rows.append(
            {
                "attention": name,
                "source": mechanism.source,
                "family": mechanism.family,
                "method": mechanism.method,
                "memory": mechanism.memory.value,
                "state_bytes": state_bytes[name],
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
