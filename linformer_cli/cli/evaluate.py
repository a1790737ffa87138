"""`lintx eval`: bits/dim over a split of a data set."""

import dataclasses
import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from linformer_cli.data import Split
from linformer_cli.errors import UsageError
from linformer_cli.report.tables import Column
from linformer_cli.system.device import SamplingPrecision
from linformer_cli.units import WINDOWS

from . import options
from .images import load_images_to_fit
from .output import info, print_facts, print_json, print_records, write_plot
from .session import Session, open_session

if TYPE_CHECKING:
    from linformer_cli.config import ImageShape


def evaluate(
    checkpoint: options.CheckpointArgument = None,
    data: options.ModelData = None,
    split: Annotated[
        Split, typer.Option("--split", help="Split to measure. Choose settings on validation, not on test.")
    ] = "validation",
    data_dir: options.DataDir = None,
    length: options.EvaluatedLength = None,
    limit: options.Limit = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Batch size.")] = 64,
    device: options.Device = "auto",
    precision: Annotated[
        SamplingPrecision,
        typer.Option(
            "--precision",
            help="Precision of weights and activations. int8 needs --engine native. auto is fp32 or, with --engine, "
            "what lintx sample would choose.",
        ),
    ] = "fp32",
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            help="Predict step by step with this sampling engine (auto, native, cuda, textbook) instead of in "
            "parallel, to measure the effect of its precision.",
            metavar="NAME",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            help="A second checkpoint. Also show bits/dim minus the second model's bits/dim, on the same images.",
            metavar="CHECKPOINT",
        ),
    ] = None,
    given_class: Annotated[
        bool,
        typer.Option(
            "--given-class", help="Measure a model trained with --hide-class with the class of each image, not without."
        ),
    ] = False,
    by_position: Annotated[
        bool, typer.Option("--by-position", help="Also show bits/dim for each of the positions 0, 1, 2-3, 4-7, ...")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            help="Also plot bits/dim against the position to a .png or .svg file.",
            metavar="FILE",
        ),
    ] = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Measure bits/dim over a split of a data set.

    Bits/dim is the number of bits that the model needs per value, shown with the standard error over images. Every
    value counts: nats are summed over all values of all images, then divided by ln 2 and by the number of values. The
    second figure leaves out the first value of each image, as the code of Katharopoulos 2020 does. Compare it only with
    figures of that paper. A model with classes receives the label of each image, unless it was trained with
    --hide-class. A third figure then adds the cost of the label, log2(classes) bits per image, for comparison with
    models without classes.

    For a model of bytes, an image is a window of bytes, and the result is in bits/byte. If the model needs no
    positions, --length can be larger than in training.

    With --against, also measures a second model on the same images, with its parallel form. The difference is the mean
    of this model's bits/dim minus the second model's, including the cost of the class. Bits/dim usually differ far more
    between images than between two models on one image. The standard error of the difference is then much smaller than
    those of the two figures.

    Examples:

    - `lintx eval runs/first --data mnist --split test --json`
    - `lintx eval --limit 500`
    - `lintx eval runs/second --against runs/first`
    - `lintx eval runs/text --length 65536 --by-position --plot positions.png`
    """
    options.require_plots(plot)
    if precision == "int8" and engine is None:
        raise UsageError("--precision int8 is a format of the sampling engine; add --engine native")
    session = open_session(checkpoint, device, precision, engine)

    from linformer_cli.config import choose_words
    from linformer_cli.evaluation.bits import block_nats, measure_nats, stepped_nats
    from linformer_cli.evaluation.position_plot import render_positions
    from linformer_cli.sampling.engines import EngineCache
    from linformer_cli.units import format_bits

    name = data or session.checkpoint.info.data.name
    words, own, wanted = choose_words(name), session.checkpoint.info.data.words, session.model.config.image
    if own is not words:
        raise UsageError(f"'{session.checkpoint.name}' predicts {own.items}, and '{name}' has {words.items}")
    if length is not None:
        if words is not WINDOWS:
            raise UsageError(f"--length is for windows of bytes, and '{name}' has images; drop --length")
        wanted = wanted.model_copy(update={"width": length})
    _require_size(session, wanted)
    classes, other_classes = _count_classes(session, given_class), 0
    parallel: SamplingPrecision = "fp32" if precision in ("int8", "auto") else precision
    other = None if against is None else open_session(against, device, parallel)
    if other is not None:
        _require_size(other, wanted)
        other_classes = _count_classes(other, given_class and other.model.config.classes > 0)
    images = load_images_to_fit(name, split, data_dir, wanted)
    labels, other_labels = (images.require_labels(count) if count else None for count in (classes, other_classes))
    chosen = images.images if limit is None else images.images[:limit]  # a slice of windows of bytes is read at once
    info(f"{len(chosen):,} of {len(images):,} {split} {words.items} of {name}")
    began = time.perf_counter()
    nats = functools.partial(block_nats, session.model)
    if engine is not None:
        nats = functools.partial(stepped_nats, EngineCache(session.engine, session.model, products=session.products))
    measured = measure_nats(session.model, chosen, batch, nats=nats, labels=labels)
    bits, positions = measured.describe(), measured.describe_positions()
    class_bits = session.model.config.class_bits_per_dim if classes else 0.0
    with_class = bits.bits_per_dim + class_bits
    result = {
        **session.record,
        "data": name,
        "split": split,
        "images_in_split": len(images),
        **dataclasses.asdict(bits),
        "classes": session.model.config.classes,
        "given_class": classes > 0,
        "bits_per_dim_with_class": with_class if classes else None,
        "by_position": positions,
        "plot": plot,
        "seconds": time.perf_counter() - began,
    }
    if other is not None:
        rival = measure_nats(
            other.model, chosen, batch, nats=functools.partial(block_nats, other.model), labels=other_labels
        )
        difference, error = measured.measure_difference(rival)
        difference += class_bits - (other.model.config.class_bits_per_dim if other_classes else 0.0)
        result["against"] = {
            **other.record,
            "bits_per_dim": rival.describe().bits_per_dim,
            "difference": difference,
            "difference_standard_error": error,
        }
    given = ", given the class" if classes else ""
    without = format_bits(bits.bits_per_dim_without_first_value, bits.standard_error_without_first_value)
    facts = {
        words.bits: f"{format_bits(bits.bits_per_dim, bits.standard_error)}  (every value{given})",
        "without first value": f"{without}  (as in the code of Katharopoulos 2020{given})",
        words.items: f"{bits.images:,} of {name} {split}",
    }
    if words is WINDOWS:
        del facts["without first value"]
        facts[words.items] += f", {bits.values_per_image:,} bytes each"
    if classes:
        facts["with the class"] = (
            f"{format_bits(with_class, bits.standard_error)}  (log2({classes})/{bits.values_per_image} added, to "
            "compare with a model without classes)"
        )
    if other is not None:
        sign = "+" if difference > 0 else ""
        facts["difference"] = f"{sign}{format_bits(difference, error)}  (this model minus {other.checkpoint.name})"
    if json:
        print_json(result)
    else:
        print_facts(facts)
        if by_position:
            columns = (Column("place", "position"), Column("bits", words.bits))
            print_records(positions, columns, "table")
    write_plot(plot, lambda kind: render_positions(positions, kind, words))


def _count_classes(session: Session, given_class: bool) -> int:
    """Return the number of classes if the model is measured given the class, or else 0."""
    config = session.model.config
    if given_class and not config.classes:
        raise UsageError(f"'{session.checkpoint.name}' was trained without --classes; drop --given-class")
    return config.classes if given_class else config.required_classes


def _require_size(session: Session, wanted: "ImageShape") -> None:
    """Raise `UsageError` if the model cannot predict images of the size `wanted`."""
    image, path = session.model.config.image, session.checkpoint.name
    if image == wanted:
        return
    if image.height > 1 or image.model_copy(update={"width": wanted.width}) != wanted:
        raise UsageError(f"'{path}' is for images of a different size")
    bound = session.model.find_bound()
    if wanted.width > image.width and bound is not None:
        raise UsageError(f"'{path}' predicts at most {image.width:,} bytes: {bound}; give a smaller --length")
