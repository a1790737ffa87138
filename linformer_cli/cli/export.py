"""`lintx export`: a checkpoint without its training state, or a program that needs no Python."""

import os
import re
import tempfile
from pathlib import Path
from typing import Literal

from linformer_cli.checkpoint_files import LICENSE, WEIGHTS
from linformer_cli.errors import UsageError
from linformer_cli.files import require_writable, write_file
from linformer_cli.hub import PREFIX, send_repository
from linformer_cli.system.device import product_dtype, torch_dtype
from . import options
from .config_options import argument, option, with_fields
from .output import info, print_json

Format = Literal["fp32", "bf16", "int8"]


@with_fields
def export(
    checkpoint: str = argument("CHECKPOINT", "A run, checkpoint, shipped model or hf:USER/NAME."),
    out: str = argument("OUT", "The folder to create, a file that ends in .lintx, or hf:USER/NAME."),
    dtype: Format | None = option(
        None,
        "Format of the weights. int8 is for programs only, which then draw the same images on "
        "every processor. Default: fp32 for a folder, int8 for a program.",
    ),
    license: str | None = option(None, "Licence of the weights, such as mit, cc-by-4.0 or other.", metavar="NAME"),
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Copy a model out of its run.

    Examples:

    - `lintx export runs/first digits --dtype bf16`
    - `lintx export runs/first digits.lintx`
    - `lintx export runs/first hf:me/digits --license mit`

    A folder holds the weights, the configuration and the model card, but no training state. A `.lintx` file is a
    program, which C++ runs without Python. `hf:USER/NAME` sends the folder to the Hugging Face Hub; this needs `pip
    install '.[hub]'`, `hf auth login` and --license. A new repository is public; to share with few, create a private
    one first.
    """
    from linformer_cli.native.program_file import SUFFIX

    if license is not None and not re.fullmatch(LICENSE, license):
        raise UsageError(f"--license takes a name of the Hub, such as mit or cc-by-4.0, found '{license}'")
    if not out:
        raise UsageError("OUT is empty; give it a path")
    path, shared = Path(out), out.startswith(PREFIX)
    program = not shared and path.suffix == SUFFIX
    if shared and license is None:
        raise UsageError("say what others may do with the weights, such as --license mit or --license other")
    if not shared and os.path.lexists(path):
        raise UsageError(f"'{out}' exists already; choose another {'file' if program else 'folder'}")
    if dtype == "int8" and not program:
        raise UsageError(f"--dtype int8 is for programs; write to a file that ends in {SUFFIX}, or choose bf16")
    if not shared:
        require_writable(path)
    if program:
        _export_program(checkpoint, path, dtype or "int8", json)
    else:
        _export_folder(checkpoint, out, dtype or "fp32", license, json)


def _export_folder(checkpoint: str, out: str, dtype: Format, license: str | None, json: bool) -> None:
    from linformer_cli.checkpoint import open_checkpoint, save_checkpoint

    found, model = open_checkpoint(checkpoint)
    details = found.info if license is None else found.info.model_copy(update={"license": license})
    with tempfile.TemporaryDirectory() as temporary:
        shared = out.startswith(PREFIX)
        folder = Path(temporary, out.rpartition("/")[2]) if shared else Path(out)
        details = save_checkpoint(folder, model, details, weights_dtype=torch_dtype(dtype), new=True)
        size = (folder / WEIGHTS).stat().st_size
        place = send_repository(out, folder) if shared else out
    info(f"wrote {place}: {size:,} bytes of weights")
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
