"""Copies weights between models: every tensor whose name and shape fit, and projections part by part."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from linformer_cli.errors import CheckpointError
from linformer_cli.model.attention_layer import AttentionLayer
from linformer_cli.model.blocks import Block
from linformer_cli.model.pixel_model import PixelModel

Layout = dict[str, dict[str, slice]]
# The tables of positions, and the beginnings of the names of tensors with a row for every value.
_POSITIONS, _NUMBERS = {"embedding.row.weight", "embedding.column.weight"}, ("embedding.values", "head.projection")
_BLOCK = re.compile(r"^blocks\.(\d+)\.")


@dataclass(frozen=True)
class Transfer:
    """The names of the model's `copied` and `new` tensors, or parts, and of those of the source that are `left`."""

    copied: tuple[str, ...]
    new: tuple[str, ...]
    left: tuple[str, ...]


@torch.no_grad()
def transfer_weights(model: PixelModel, source: PixelModel) -> Transfer:
    """Copy every tensor of `source` whose name and shape fit into `model`, and tables of positions of another length.

    The latter are interpolated. Tables of the numbers of another palette, which mean other colours, are not copied. The
    branches of additional blocks initially output zero, so with LayerNorm before the branches, the model computes the
    same as `source` (as in Net2Net, Chen 2016), and so do the vectors of classes that only `model` has. Raises
    `CheckpointError`, with `model` unchanged, if no tensor fits.
    """
    # The place of each of the source's blocks in the model, evenly spaced if that has more.
    blocks = len(source.blocks)
    places = [index * max(blocks, len(model.blocks)) // blocks for index in range(blocks)]
    ours, theirs = split_projections(model, source, places)
    for name in _POSITIONS & ours.keys() & theirs.keys():
        if ours[name].shape[1:] == theirs[name].shape[1:]:
            table = theirs[name].float().T[None]
            theirs[name] = functional.interpolate(table, len(ours[name]), mode="linear", align_corners=True)[0].T
    if model.config.image.palette != source.config.image.palette:
        theirs = {name: tensor for name, tensor in theirs.items() if not name.startswith(_NUMBERS)}
    copied, used = [], set()
    for name, tensor in ours.items():
        origin = _find_origin(name, tensor, theirs)
        if origin is not None:
            tensor.copy_(theirs[origin])
            copied.append(name)
            used.add(origin)
    if not copied:
        hint = "drop the options that change its sizes"
        raise CheckpointError(
            f"none of the {len(theirs)} tensors of the checkpoint fits the model by name and shape; {hint}"
        )
    if model.embedding.classes is not None and source.embedding.classes is None:
        model.embedding.classes.weight.zero_()
    if len(model.blocks) > len(source.blocks):
        for index in set(range(len(model.blocks))) - set(places):
            for last in cast(Block, model.blocks[index]).branch_ends():
                last.weight.zero_()
                last.bias.zero_()
    new = tuple(name for name in ours if name not in copied)
    origins = {place: index for index, place in enumerate(places)}
    return Transfer(tuple(copied), new, tuple(_move_name(name, origins) for name in theirs if name not in used))


def _move_name(name: str, places: Sequence[int] | Mapping[int, int]) -> str:
    return _BLOCK.sub(lambda block: f"blocks.{places[int(block[1])]}.", name)


def split_projections(
    model: PixelModel, source: PixelModel, places: Sequence[int]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return tensors of both models as views by name. Blocks of `source` are named after their `places` in `model`.

    One Linear projects to queries, keys, values, the extra scalars of a mechanism and the output gate. If the layouts
    differ, and a part fits, the tensor is split into `name[q]`, `name[k]`, `name[v]`, `name[qk]` (shared by queries and
    keys), `name[gate]` and `name[extra of MECHANISM]`, whose meaning differs between mechanisms. The table of classes
    is split into `name[class]` and `name[no class]` if the class is optional in one of the models.
    """
    ours, our_layout = model.state_dict(), _layout(model)
    theirs = {_move_name(name, places): tensor for name, tensor in source.state_dict().items()}
    their_layout = {_move_name(name, places): parts for name, parts in _layout(source).items()}
    for name in our_layout.keys() & their_layout.keys():
        if our_layout[name] == their_layout[name]:
            continue
        mine, other = (
            {f"{name}[{part}]": tensors[name][rows] for part, rows in layout[name].items()}
            for tensors, layout in ((ours, our_layout), (theirs, their_layout))
        )
        if any(_find_origin(part, tensor, other) for part, tensor in mine.items()):
            del ours[name], theirs[name]
            ours, theirs = ours | mine, theirs | other
    return dict(sorted(ours.items())), dict(sorted(theirs.items()))


def _layout(model: PixelModel) -> Layout:
    """Return the rows of each part of the input projections and of the table of classes, by tensor name."""
    layout: Layout = {}
    classes, labels = model.config.classes, model.config.label_count
    if classes:
        rows = {"class": slice(classes), "no class": slice(classes, labels)}
        layout["embedding.classes.weight"] = rows if labels > classes else {"class": rows["class"]}
    for name, layer in model.named_modules():
        if isinstance(layer, AttentionLayer):
            own = {"extra": f"extra of {model.config.attention}"}
            parts = {own.get(part, part): rows for part, rows in layer.input_rows.items()}
            layout |= {f"{name}.input.{kind}": parts for kind in ("weight", "bias")}
    return layout


def _find_origin(name: str, tensor: Tensor, theirs: Mapping[str, Tensor]) -> str | None:
    """Find the tensor in `theirs` with the values for `name`, or None if no tensor has the right shape.

    A shared projection is copied to both queries and keys, and the queries' projection to a shared one, whose mechanism
    normalises the keys anyway.
    """
    names = [name]
    for part, other in (("[q]", "[qk]"), ("[k]", "[qk]"), ("[qk]", "[q]")):
        if name.endswith(part):
            names.append(name.removesuffix(part) + other)
    return next((key for key in names if key in theirs and theirs[key].shape == tensor.shape), None)


def summarise_names(names: Iterable[str]) -> str:
    """Join names in one line. `blocks.0.x` and `blocks.1.x` become `blocks.0-1.x`."""
    groups: dict[str, list[int]] = {}
    for name in names:
        block = _BLOCK.match(name)
        pattern = f"blocks.*.{name[block.end() :]}" if block else name
        groups.setdefault(pattern, []).extend([int(block[1])] if block else [])
    shown = (pattern.replace("*", _ranges(numbers), 1) if numbers else pattern for pattern, numbers in groups.items())
    return ", ".join(shown) or "none"


def _ranges(numbers: list[int]) -> str:
    """Return `0-3`, or `0-1,5` if numbers are missing."""
    # Numbers that follow each other differ from their places by the same amount.
    groups = itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
