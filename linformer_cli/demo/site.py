"""The files of the demo: the page, the engine, and the programs of a model and of its rival."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from linformer_cli.config import CLASS_GUIDANCE
from linformer_cli.data.look import Look
from linformer_cli.system.device import seeded
from linformer_cli.units import WINDOWS
from linformer_cli.version import __version__

if TYPE_CHECKING:
    from linformer_cli.checkpoint import Checkpoint
    from linformer_cli.model.pixel_model import PixelModel

FOLDER = Path(__file__).parent
WASM, BINARY = "application/wasm", "application/octet-stream"
# The media types of the files of the page.
PAGES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".wasm": WASM,
}
MODEL, RIVAL, DESCRIPTION = "model.lintx", "rival.lintx", "model.json"


@dataclass(frozen=True)
class File:
    media_type: str
    data: bytes


@dataclass(frozen=True)
class Description:
    """What the page says about the model. `states` names the states of a layer, if the page knows their shapes."""

    name: str
    attention: str
    layers: int
    heads: int
    head_width: int
    parameters: int
    bits_per_dim: float | None
    bits_unit: str
    text: bool  # the model draws bytes, and the page shows only its state
    weights_sha256: str
    optional_class: bool
    guidance: float  # of images with a class, if the class is optional
    look: dict[str, object]  # see `list_look`
    states: tuple[str, ...]
    rival: str | None  # the attention of the second program
    sizes: dict[str, int]  # bytes of the files that the page shows a progress bar for
    models: tuple[str, ...]  # the names of all models of the site
    version: str = __version__


def list_pages() -> list[Path]:
    """List the files of the page that are the same for all models."""
    return sorted(path for path in FOLDER.iterdir() if path.suffix in PAGES)


def list_look(look: Look) -> dict[str, object]:
    """Return how the page turns pictures into values: what a checkpoint stores, and what follows from its shape."""
    frame = look.frame.model_dump() if look.frame else None
    return {**look.stored, "frame": frame, "palette": look.shape.colours, "keeps_opacity": look.keeps_opacity}


def build_sites(models: Mapping[str, str | Path]) -> dict[str, File]:
    """Build the files of a demo of several checkpoints, by their names. Those of the second one are in a folder `1`."""
    from linformer_cli.checkpoint import open_checkpoint

    files: dict[str, File] = {}
    for place, (name, checkpoint) in enumerate(models.items()):
        site = build_site(*open_checkpoint(checkpoint), name, tuple(models))
        if place:
            site = {f"{place}/{file}": site[file] for file in (MODEL, RIVAL, DESCRIPTION) if file in site}
        files |= site
    return files


def build_site(
    checkpoint: "Checkpoint", model: "PixelModel", name: str | None = None, names: tuple[str, ...] = ()
) -> dict[str, File]:
    """Build the demo's files by name. `name` is what the user calls the checkpoint, among the `names` of a site."""
    import torch

    from linformer_cli.model.blocks import InnerBlock
    from linformer_cli.model.mixers import SOFTMAX
    from linformer_cli.model.pixel_model import build_softmax_twin
    from linformer_cli.sampling.engines.native import encode_step

    info, network = checkpoint.info, model.config
    text = info.data.words is WINDOWS
    with seeded(0):  # the rival has the same random weights in every site
        models = [model] if text or network.attention == SOFTMAX else [model, build_softmax_twin(model)]
    site = {path.name: File(PAGES[path.suffix], path.read_bytes()) for path in list_pages()}
    for file, made in zip((MODEL, RIVAL), models, strict=False):
        site[file] = File(BINARY, encode_step(made, torch.int8))
    shape = model.blocks[0].inner.shape if isinstance(model.blocks[0], InnerBlock) else None
    description = Description(
        name=name or checkpoint.name,
        attention=network.attention,
        layers=network.layers,
        heads=shape.heads if shape else 1,
        head_width=shape.value_width if shape else network.width,
        parameters=model.parameter_count(),
        bits_per_dim=info.training.validation_bits_per_dim,
        bits_unit=info.data.words.bits,
        text=text,
        weights_sha256=checkpoint.digest,
        optional_class=network.optional_class,
        guidance=CLASS_GUIDANCE,
        look=list_look(Look.of(info)),
        states=("s", "z") if network.attention == "linear" and not network.short_convolution else (),
        rival=SOFTMAX if len(models) > 1 else None,
        sizes={file: len(found.data) for file, found in site.items() if found.media_type in (BINARY, WASM)},
        models=names,
    )
    site[DESCRIPTION] = File("application/json", json.dumps(asdict(description)).encode())
    return site
