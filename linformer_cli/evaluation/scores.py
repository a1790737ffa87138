"""How likely a model finds each of some pictures, and a sheet of the oddest and the most ordinary ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from linformer_cli.data.sequence import images_to_values, paint
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.report.grids import render_captioned_row, render_grid, render_title, stack_rows
from linformer_cli.report.tables import Shown

_ACROSS = 12
_LONG_SIDE = 64  # pixels of a picture on the sheet, about
# Red, green and blue of a heat map, from no bits to the most.
_HEAT = np.array([(0, 0, 4), (87, 16, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164)])


@dataclass(frozen=True)
class Score:
    """The bits/dim of a picture, and those of a second model; the difference tells odd pictures from complex ones."""

    picture: Annotated[str, Shown("picture", names=True)]
    bits_per_dim: Annotated[float, Shown("bits/dim", ".3f")]
    against: Annotated[float | None, Shown("against", ".3f")] = None
    folder: str = ""

    @property
    def difference(self) -> Annotated[float | None, Shown("difference", "+.3f")]:
        return None if self.against is None else self.bits_per_dim - self.against

    @property
    def rank(self) -> float:
        return self.bits_per_dim if self.difference is None else self.difference


@dataclass(frozen=True)
class FolderScore:
    """The pictures of a folder among all. `area` is how often one of them ranks above a picture of another folder."""

    folder: Annotated[str, Shown("folder")]
    pictures: Annotated[int, Shown("pictures")]
    mean: Annotated[float, Shown("mean", ".3f")]
    area: Annotated[float, Shown("area under the curve", ".3f")]


def compare_folders(scores: Sequence[Score]) -> list[FolderScore]:
    """Return one row for each of two or more folders, the oddest first; none for fewer."""
    folders, ranks = np.array([score.folder for score in scores]), np.array([score.rank for score in scores])
    names = np.unique(folders)
    if len(names) < 2:
        return []
    rows = []
    for name in names:
        own, others = ranks[folders == name], ranks[folders != name]
        rows.append(FolderScore(str(name), len(own), float(own.mean()), area_under_curve(own, others)))
    return sorted(rows, key=lambda row: -row.area)


def area_under_curve(positive: NDArray[np.float64], negative: NDArray[np.float64]) -> float:
    """Return the share of pairs in which the positive number is larger; equal ones count half."""
    ordered = np.sort(negative)
    below, up_to = (np.searchsorted(ordered, positive, side).mean() for side in ("left", "right"))
    return float((below + up_to) / 2 / len(negative))


@torch.no_grad()
def render_sheet(
    model: PixelModel, images: NDArray[np.uint8], scores: Sequence[Score], labels: NDArray[np.int64] | None
) -> Image.Image:
    """Draw the 12 oddest and 12 most ordinary of `images` [N, H, W, C], in the order of `scores`, and their bits."""
    shape, count = model.config.image, len(images)
    oddest = range(min(_ACROSS, count))
    parts = [("oddest", oddest), ("most ordinary", range(max(oddest.stop, count - _ACROSS), count))]
    chosen = [place for _, part in parts for place in part]
    given = None if labels is None else torch.from_numpy(labels[chosen]).to(model.device)
    nats = model.nats(images_to_values(images[chosen], shape).to(model.device), given)
    heat = nats.double().cpu().numpy().reshape(-1, shape.height, shape.width, shape.channels).sum(axis=3)
    heat = heat / max(float(np.quantile(heat, 0.99)), 1e-9)
    levels = np.linspace(0, 1, len(_HEAT))
    maps = np.stack([np.interp(heat, levels, band) for band in _HEAT.T], axis=3).round().astype(np.uint8)
    scale = max(1, round(_LONG_SIDE / max(shape.height, shape.width)))
    rows = []
    for title, part in parts:
        if not part:
            continue
        columns = [
            stack_rows(
                [
                    render_grid(paint(images[place : place + 1], shape), scale=scale),
                    render_grid(maps[chosen.index(place), None], scale=scale),
                ],
                gap=2,
            )
            for place in part
        ]
        captions = [f"{scores[place].rank:.2f}" for place in part]
        rows += [render_title(title), render_captioned_row(columns, captions, gap=4)]
    return stack_rows(rows)
