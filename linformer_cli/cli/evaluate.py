"""`lintx eval`: bits/dim over a split of a data set."""

import dataclasses
import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linformer_cli.config import ImageShape, choose_words
from linformer_cli.data import Split
from linformer_cli.errors import UsageError
from linformer_cli.files import write_file
from linformer_cli.report.tables import Column, render_records
from linformer_cli.system.device import SamplingPrecision
from linformer_cli.units import WINDOWS, Words, format_bits
from . import options
from .config_options import option, with_fields
from .output import info, print_facts, print_json, print_records, write_plot
from .session import Session, load_images_to_fit, open_session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from linformer_cli.data.images import ImageSet
    from linformer_cli.evaluation.bits import Bits, ImageNats


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    checkpoint: options.CheckpointArgument = None
    data: options.ModelData = None
    split: Split = option("validation", "Split to measure. Choose settings on validation, not on test.")
    data_dir: options.DataDir = None
    length: options.EvaluatedLength = None
    limit: options.Limit = None
    batch: int = option(64, "Batch size.", min=1)
    device: options.Device = "auto"
    precision: SamplingPrecision = option(
        "fp32", "int8 needs --engine native. auto is fp32 or, with --engine, what lintx sample would choose."
    )
    engine: str | None = option(
        None,
        "Predict step by step with this engine, as in lintx sample, to measure the effect of its precision.",
        metavar="NAME",
    )
    against: str | None = option(None, "Also show bits/dim minus those of this model.", metavar="CHECKPOINT")
    given_class: bool = option(False, "Give images' classes to a model trained with --hide-class.", "--given-class")
    by_position: bool = option(False, "Also show bits/dim of the positions 0, 1, 2-3, 4-7, ...", "--by-position")
    plot: Path | None = option(None, "Also plot bits/dim against the position (.png or .svg).", metavar="FILE")
    per_image: Path | None = option(None, "Also write the bits/dim of each image to a CSV file.", metavar="FILE")
    quiet: options.Quiet = False
    json: options.Json = False


@with_fields
def evaluate(asked: EvaluateOptions) -> None:
    """Measure bits/dim over a split of a data set.

    Examples:

    - `lintx eval runs/first --data mnist --split test --json`
    - `lintx eval --limit 500`
    - `lintx eval runs/second --against runs/first`
    - `lintx eval runs/text --length 65536 --by-position --plot positions.png`

    Bits/dim is the number of bits that the model needs per value, with the standard error over images. The second
    figure leaves out the first value of each image, as the code of Katharopoulos 2020 does. For a model with classes, a
    third figure adds the cost of the class, for comparison with models without classes. For a model of bytes, an image
    is a window, and the result is in bits/byte.

    With --against, also measures a second model on the same images. The difference has a much smaller standard error
    than either figure.
    """
    options.require_plots(asked.plot)
    options.require_output("--per-image", asked.per_image, ".csv")
    if asked.precision == "int8" and asked.engine is None:
        raise UsageError("--precision int8 is a format of the sampling engine; add --engine native")
    session = open_session(asked.checkpoint, asked.device, asked.precision, asked.engine)

    from linformer_cli.evaluation.bits import render_positions

    name = asked.data or session.checkpoint.info.data.name
    wanted = _choose_size(asked, session, name)
    model = _Measured(session, _count_classes(session, asked.given_class))
    other = _open_other(asked, wanted)
    images = load_images_to_fit(name, asked.split, asked.data_dir, dataclasses.replace(session.look, shape=wanted))
    if other is not None:
        other.find_labels(images)  # raises its error before the first model is measured
    items = f"{min(len(images), asked.limit or len(images)):,} of {len(images):,} {asked.split} {session.words.items}"
    info(f"{items} of {name}")
    began = time.perf_counter()
    measured = model.measure(images, asked.limit, asked.batch, stepped=asked.engine is not None)
    bits, positions = measured.describe(), measured.describe_positions()
    result = {
        **session.record,
        "data": name,
        "split": asked.split,
        "images_in_split": len(images),
        **dataclasses.asdict(bits),
        "classes": session.model.config.classes,
        "given_class": model.classes > 0,
        "bits_per_dim_with_class": bits.bits_per_dim + model.class_bits if model.classes else None,
        "by_position": positions,
        "plot": asked.plot,
        "seconds": time.perf_counter() - began,
    }
    others = None if other is None else other.measure(images, asked.limit, asked.batch)
    if other is not None and others is not None:
        result["against"] = _compare(model, measured, other, others)
    if asked.json:
        print_json(result)
    else:
        print_facts(_list_facts(result, bits, session.words))
        if asked.by_position:
            print_records(positions, (Column("place", "position"), Column("bits", session.words.bits)), "table")
    _write_bits(asked.per_image, images, measured, others)
    write_plot(asked.plot, lambda kind: render_positions(positions, kind, session.words))


@dataclass(frozen=True)
class _Measured:
    """A model to measure, given the class of each image if there are `classes`, which is 0 otherwise."""

    session: Session
    classes: int

    @property
    def class_bits(self) -> float:
        return self.session.model.config.class_bits_per_dim if self.classes else 0.0

    def find_labels(self, images: "ImageSet") -> "NDArray[np.int64] | None":
        return images.require_labels(self.classes) if self.classes else None

    def measure(self, images: "ImageSet", limit: int | None, batch: int, stepped: bool = False) -> "ImageNats":
        """Return the nats of the first `limit` images, with the session's engine if `stepped`."""
        from linformer_cli.evaluation.bits import block_nats, stepped_nats
        from linformer_cli.sampling.engines import EngineCache

        session, model = self.session, self.session.model
        # A slice of windows of bytes is read at once.
        chosen = images.images if limit is None else images.images[:limit]
        nats = functools.partial(block_nats, model)
        if stepped:
            nats = functools.partial(stepped_nats, EngineCache(session.engine, model, products=session.products))
        return session.measure(chosen, batch, self.find_labels(images), nats)


def _choose_size(asked: EvaluateOptions, session: Session, data: str) -> ImageShape:
    words, own, wanted = choose_words(data), session.words, session.model.config.image
    if own is not words:
        raise UsageError(f"'{session.checkpoint.name}' predicts {own.items}, and '{data}' has {words.items}")
    if asked.length is not None:
        if words is not WINDOWS:
            raise UsageError(f"--length is for windows of bytes, and '{data}' has images; drop --length")
        wanted = wanted.model_copy(update={"width": asked.length})
    _require_size(session, wanted)
    return wanted


def _open_other(asked: EvaluateOptions, wanted: ImageShape) -> _Measured | None:
    if asked.against is None:
        return None
    precision = "fp32" if asked.precision in ("int8", "auto") else asked.precision
    session = open_session(asked.against, asked.device, precision)
    _require_size(session, wanted)
    return _Measured(session, _count_classes(session, asked.given_class and session.model.config.classes > 0))


def _compare(model: _Measured, nats: "ImageNats", other: _Measured, others: "ImageNats") -> dict[str, object]:
    difference, error = nats.measure_difference(others)
    return {
        **other.session.record,
        "bits_per_dim": others.describe().bits_per_dim,
        "difference": difference + model.class_bits - other.class_bits,
        "difference_standard_error": error,
    }


def _write_bits(path: Path | None, images: "ImageSet", nats: "ImageNats", others: "ImageNats | None") -> None:
    """Write the number, the label and the bits/dim of each image, in the order of the split, unless `path` is None."""
    if path is None:
        return
    columns = {"label": images.labels, "bits_per_dim": nats.bits_per_image}
    columns |= {"against_bits_per_dim": others.bits_per_image} if others is not None else {}
    lists = {key: values[: len(nats.whole)].tolist() for key, values in columns.items() if values is not None}
    rows = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
    records = [{"image": number, **row} for number, row in enumerate(rows)]
    write_file(path, render_records(records, [Column(key, key) for key in ("image", *lists)], "csv").encode())
    info(f"wrote {path}")


def _list_facts(result: dict[str, Any], bits: "Bits", words: Words) -> dict[str, str]:
    given, classes = ", given the class" if result["given_class"] else "", result["classes"]
    facts = {words.bits: f"{format_bits(bits.bits_per_dim, bits.standard_error)}  (every value{given})"}
    if words is not WINDOWS:
        without = format_bits(bits.bits_per_dim_without_first_value, bits.standard_error_without_first_value)
        facts["without first value"] = f"{without}  (as in the code of Katharopoulos 2020{given})"
    facts[words.items] = f"{bits.images:,} of {result['data']} {result['split']}"
    if words is WINDOWS:
        facts[words.items] += f", {bits.values_per_image:,} bytes each"
    if result["given_class"]:
        note = f"log2({classes})/{bits.values_per_image} added, to compare with a model without classes"
        facts["with the class"] = f"{format_bits(result['bits_per_dim_with_class'], bits.standard_error)}  ({note})"
    if (against := result.get("against")) is not None:
        difference = format_bits(against["difference"], against["difference_standard_error"], sign="+")
        facts["difference"] = f"{difference}  (this model minus {against['checkpoint']})"
    return facts


def _count_classes(session: Session, given_class: bool) -> int:
    config = session.model.config
    if given_class and not config.classes:
        raise UsageError(f"'{session.checkpoint.name}' was trained without --classes; drop --given-class")
    return config.classes if given_class else config.required_classes


def _require_size(session: Session, wanted: ImageShape) -> None:
    image, path = session.model.config.image, session.checkpoint.name
    if image == wanted:
        return
    if image.height > 1 or image.model_copy(update={"width": wanted.width}) != wanted:
        raise UsageError(f"'{path}' is for images of a different size")
    bound = session.model.find_bound()
    if wanted.width > image.width and bound is not None:
        raise UsageError(f"'{path}' predicts at most {image.width:,} bytes: {bound}; give a smaller --length")
