"""`lintx export`: a checkpoint without its training state, small enough to share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from linformer_cli.errors import UsageError

from . import options
from .output import print_json, talk


def export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A run, a checkpoint folder or a shipped name.")
    ],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to create.")],
    dtype: Annotated[
        Literal["fp32", "bf16"], typer.Option("--dtype", help="bf16 rounds the weights and halves the file.")
    ] = "fp32",
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Copy a model out of its run.

    The copy holds the weights, the configuration and the model card, but no training state. `lintx eval` shows the
    effect of rounding on bits/dim.

    Examples:

    - `lintx export runs/first digits --dtype bf16`
    """
    from linformer_cli.checkpoint import WEIGHTS, load_weights, read_checkpoint, save_checkpoint
    from linformer_cli.system.device import torch_dtype

    if out.exists():
        raise UsageError(f"'{out}' exists already; name another folder")
    found = read_checkpoint(checkpoint)
    details = save_checkpoint(out, load_weights(found), found.info, weights_dtype=torch_dtype(dtype))
    size = (out / WEIGHTS).stat().st_size
    talk(f"wrote {out}: {size:,} bytes of weights")
    if json:
        print_json({"checkpoint": out, "weights_bytes": size, "weights_sha256": details.weights_sha256})
