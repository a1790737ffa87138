"""`lintx export`: a checkpoint without its training state, or a program that needs no Python."""

import os
from pathlib import Path
from typing import Literal

from linformer_cli.checkpoint_files import WEIGHTS
from linformer_cli.errors import UsageError
from linformer_cli.files import require_writable, write_file
from linformer_cli.system.device import product_dtype, torch_dtype
from . import options
from .config_options import argument, option, with_fields
from .output import info, print_json

Format = Literal["fp32", "bf16", "int8"]


@with_fields
def export(
    checkpoint: str = argument("CHECKPOINT", "A run, a checkpoint folder or a shipped name."),
    out: Path = argument("OUT", "The folder to create, or a file that ends in .lintx."),
    dtype: Format | None = option(
        None,
        "Format of the weights. bf16 halves the size. int8 divides it by four and is for programs only; an "
        "int8 program draws the same images on every processor. Default: fp32 for a folder, int8 for a program.",
    ),
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Copy a model out of its run.

    A folder holds the weights, the configuration and the model card, but no training state. `lintx eval` shows the
    effect of rounding on bits/dim.

    A `.lintx` file is a program: the weights and the list of operations that draw an image. The C++ code in lintx can
    run a program without Python.

    Examples:

    - `lintx export runs/first digits --dtype bf16`
    - `lintx export runs/first digits.lintx`
    """
    from linformer_cli.native.program_file import SUFFIX

    program = out.suffix == SUFFIX
    if os.path.lexists(out):
        raise UsageError(f"'{out}' exists already; choose another {'file' if program else 'folder'}")
    if dtype == "int8" and not program:
        raise UsageError(f"--dtype int8 is for programs; write to a file that ends in {SUFFIX}, or choose bf16")
    require_writable(out)
    if program:
        _export_program(checkpoint, out, dtype or "int8", json)
    else:
        _export_folder(checkpoint, out, dtype or "fp32", json)


def _export_folder(checkpoint: str, out: Path, dtype: Format, json: bool) -> None:
    from linformer_cli.checkpoint import open_checkpoint, save_checkpoint

    found, model = open_checkpoint(checkpoint)
    details = save_checkpoint(out, model, found.info, weights_dtype=torch_dtype(dtype), new=True)
    size = (out / WEIGHTS).stat().st_size
    info(f"wrote {out}: {size:,} bytes of weights")
    if json:
        print_json({"checkpoint": out, "weights_bytes": size, "weights_sha256": details.weights_sha256})


def _export_program(checkpoint: str, out: Path, dtype: Format, json: bool) -> None:
    from linformer_cli.checkpoint import open_checkpoint
    from linformer_cli.sampling.engines.native import encode_step

    found, model = open_checkpoint(checkpoint, dtype=torch_dtype(dtype))
    data = encode_step(model, product_dtype(dtype))
    write_file(out, data)
    info(f"wrote {out}: {len(data):,} bytes")
    if json:
        print_json({"program": out, "bytes": len(data), "weights_sha256": found.digest})
