"""`lintx score`: how likely a model finds pictures."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from linformer_cli.errors import DataError, UsageError
from linformer_cli.report.tables import RecordTable, list_columns
from linformer_cli.units import WINDOWS
from . import options
from .config_options import argument, option, with_fields
from .output import info, print_json, print_tables, write_png
from .session import Session, open_session

if TYPE_CHECKING:
    from linformer_cli.evaluation.scores import FolderScore, Score

_NONE = "none"
_PHOTOGRAPHS = "cifar10-pixel"  # the second model for colour pictures of 32 x 32 pixels


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    pictures: list[Path] = argument("PICTURE...", "Image files, or folders with images.")
    checkpoint: options.CheckpointOption = None
    against: str | None = option(
        None,
        "Rank by the difference from this second model. Default for colour pictures of 32 x "
        f"32: {_PHOTOGRAPHS}; '{_NONE}': no second model.",
        metavar="CHECKPOINT",
    )
    class_name: str | None = option(None, "Class of all pictures, for a model that needs one.", "--class")
    out: Path | None = option(None, "Also draw the oddest and most ordinary pictures with their bits.", "-o", "--out")
    batch: int = option(64, "Batch size.", min=1)
    device: options.Device = "auto"
    style: options.Style = "table"
    quiet: options.Quiet = False
    json: options.Json = False


@with_fields
def score(asked: ScoreOptions) -> None:
    """Say how likely a model finds pictures.

    Examples:

    - `lintx score scans/ --checkpoint runs/first -o sheet.png`
    - `lintx score new/*.png --checkpoint runs/sprites --against none --format csv`
    - `lintx score normal/ broken/ --checkpoint runs/normal`

    The oddest picture comes first. Every model finds smooth pictures likely, so with --against, pictures are ranked by
    the model's bits/dim minus those of a second model that knows pictures in general. If the pictures are in several
    folders, a second table has the area under the curve of each: how often one of its pictures ranks above a picture of
    the others.
    """
    options.require_output("-o", asked.out, ".png")
    session = open_session(asked.checkpoint, asked.device, "fp32")
    if session.words is WINDOWS:
        raise UsageError(f"'{session.checkpoint.name}' predicts bytes, not pictures; use lintx eval with --data")
    other = _open_other(asked, session)

    import numpy as np

    from linformer_cli.evaluation.scores import Score, compare_folders, render_sheet

    label = session.choose_class(asked.class_name, "pictures")
    files = list(_list_pictures(asked.pictures))
    options.require_inputs_kept(files, asked.out)
    failures: list[dict[str, object]] = []
    pictures = list(session.read_pictures(files, failures, framing=True))
    if not pictures:
        raise DataError(f"none of {len(files)} pictures can be read")
    if changed := len({picture.path for picture in pictures if picture.notes}):
        info(f"{changed:,} of {len(files):,} pictures were changed to fit the model, for example resized or recoloured")
    images = np.stack([picture.image for picture in pictures])
    labels = None if label is None else np.full(len(images), label)
    nats = session.measure(images, asked.batch, labels).bits_per_image.tolist()
    others = [None] * len(images) if other is None else other.measure(images, asked.batch).bits_per_image.tolist()
    found = zip((picture.path for picture in pictures), nats, others, strict=True)
    scores = [Score(str(path), own, against, str(path.parent)) for path, own, against in found]
    order = sorted(range(len(scores)), key=lambda place: (-scores[place].rank, scores[place].picture))
    scores, images = [scores[place] for place in order], images[order]
    record = {**session.record, "against": None if other is None else other.record}
    try:
        if asked.out is not None:
            write_png(asked.out, render_sheet(session.model, images, scores, labels), record)
    finally:  # a full disk must not hide the figures
        _print(asked, {**record, "class": label, "out": asked.out}, scores, compare_folders(scores))
    if failures:
        raise DataError(f"{len(failures)} of {len(files)} pictures could not be read; the others have figures")


def _open_other(asked: ScoreOptions, session: Session) -> Session | None:
    shape, name = session.model.config.image, asked.against
    fits = (shape.height, shape.width, shape.channels, shape.palette) == (32, 32, 3, ())
    if name is None and fits and session.checkpoint.name != _PHOTOGRAPHS:
        name = _PHOTOGRAPHS
        info(f"ranked against {name}, because every model finds smooth pictures likely; '--against {_NONE}' does not")
    if name is None or name == _NONE:
        return None
    other = open_session(name, asked.device, "fp32")
    if other.checkpoint.digest == session.checkpoint.digest:
        raise UsageError("--against is the same model; name another one")
    if other.model.config.image != shape:
        raise UsageError(f"'{other.checkpoint.name}' is for images of a different size or palette")
    if other.model.config.required_classes:
        raise UsageError(f"'{other.checkpoint.name}' needs the class of each picture; name a model without classes")
    return other


def _list_pictures(paths: Sequence[Path]) -> Iterator[Path]:
    """List the files named by `paths`, of which a folder stands for the pictures below it. Says what else is there."""
    from linformer_cli.data.listing import list_folder

    for path in paths:
        if not path.is_dir():
            yield path
            continue
        found = list_folder(path)
        inside = [path / name for name in found.pictures if not name.endswith(".npy")]
        for note in (*found.unread, *found.notes):
            info(f"{path}: {note}")
        if not inside:
            raise DataError(f"'{path}' has no pictures")
        yield from inside


def _print(
    asked: ScoreOptions, record: dict[str, object], scores: "Sequence[Score]", folders: "Sequence[FolderScore]"
) -> None:
    from linformer_cli.evaluation.scores import FolderScore, Score

    if asked.json:
        rows = [{**dataclasses.asdict(row), "difference": row.difference} for row in scores]
        print_json({**record, "pictures": rows, "folders": folders})
        return
    keys = "picture bits_per_dim" + (" against difference" if record["against"] else "")
    tables = RecordTable(scores, list_columns(Score, keys)), RecordTable(folders, list_columns(FolderScore))
    print_tables(asked.style, *tables)
