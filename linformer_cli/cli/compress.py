"""`lintx compress`: pictures, data sets and files as compressed files."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from linformer_cli.checkpoint_files import find_shipped_name
from linformer_cli.config import ImageShape
from linformer_cli.data import Split
from linformer_cli.errors import DataError, LintxError, UsageError
from linformer_cli.files import STREAM, open_atomically, require_writable
from linformer_cli.units import WINDOWS, count_words
from . import options
from .config_options import argument, option, with_fields
from .display import Bar
from .output import info, print_json, read_stdin, require_binary_stdout, warn, write_stdout
from .session import Session, load_images_to_fit, open_session

if TYPE_CHECKING:
    from linformer_cli.codec.coder import Coder
    from linformer_cli.codec.header import Header
    from linformer_cli.codec.pack import Packed
    from linformer_cli.codec.sources import Source

Batch = Annotated[int, typer.Option("--batch", min=1, max=2**16, help="Images or windows at once, at least a block.")]


@dataclass(frozen=True, kw_only=True)
class CompressOptions:
    images: list[str] | None = argument(
        "[IMAGES]...", "Pictures, or folders of pictures; for a model of bytes, any files. '-' is stdin.", None
    )
    out: str = option("", "The file to write; '-' is stdout.", "-o", "--out", metavar="FILE")
    checkpoint: options.CheckpointOption = None
    data: str | None = option(None, "Compress a data set instead of files.", metavar="NAME")
    split: Split | None = option(None, "The split of the data set. Default: test.")
    data_dir: options.DataDir = None
    limit: options.Limit = None
    tile: bool = option(False, "Cut pictures of any size into tiles of the model's size.", "--tile")
    class_name: str | None = option(None, "Class of all pictures, for a model that needs one.", "--class")
    length: int | None = option(
        None, "Bytes in a window, for a model that needs no positions. Default: as in training.", min=2, max=65_536
    )
    block: int | None = option(
        None,
        "Images or windows in a block, which damage destroys as a whole. Default: 500, or "
        "fewer if their states need more than 512 MiB.",
        min=1,
        max=2**16,
    )
    batch: Batch = 500
    verify: bool = option(True, "Decode the new file and compare it with the input.")
    force: bool = option(False, "Overwrite FILE if it exists.", "--force")
    quiet: options.Quiet = False
    json: options.Json = False


@with_fields
def compress(asked: CompressOptions) -> None:
    """Compress images without loss.

    Examples:

    - `lintx compress digits/ -o digits.lintz`
    - `lintx compress --data mnist --split test -o mnist.lintz`
    - `lintx compress scan.png --tile -o scan.lintz`
    - `lintx compress --checkpoint runs/text book.txt -o book.lintz`
    - `tar c src | lintx compress --checkpoint runs/text - -o src.tar.lintz`

    The file has about as many bits per value as the model's bits/dim say: it is small if the images are like those that
    the model was trained on. `lintx decompress` returns the same pixels, names and order on every processor, with the
    same model; a picture comes back as a PNG without metadata. Pictures must have the size, the channels and the
    palette of the model's images, unless --tile is given. Needs `pip install '.[compress]'`.
    """
    _check_options(asked)
    session = open_session(asked.checkpoint, "cpu", "int8", "native")

    from linformer_cli.codec.coder import Coder, identify_program
    from linformer_cli.codec.header import Header
    from linformer_cli.codec.pack import choose_block, write_packed

    coder, is_bytes = Coder(session.model), session.words is WINDOWS
    shape = _choose_shape(asked, session)
    with contextlib.ExitStack() as stack:
        if asked.data is not None:
            source = _open_data_set(asked, session, asked.data)
        else:
            source = _open_paths(asked, session, lambda: stack.enter_context(read_stdin()), shape)
        size = asked.block or choose_block(session.model.state_bytes(1, shape.positions))
        name = find_shipped_name(session.checkpoint.path)
        header = Header(identify_program(session.model), name, source.contents, size, ())
        items = count_words(source.contents.count, "file" if is_bytes else "image")
        info(f"{items} of {source.contents.values:,} values, in blocks of {size:,}")
        began = time.perf_counter()
        with _open_output(asked.out) as file:
            with Bar("compressing", source.contents.sequences, source.contents.unit) as bar:
                packed = write_packed(file, header, source, coder, asked.batch, bar.show)
            seconds = time.perf_counter() - began
            if asked.verify:
                _verify(file, packed, coder, asked.batch)
        result = {**session.record, **_describe(asked, header, packed), "seconds": seconds}
        _show_sizes(result, session)
        # This takes a while, and Ctrl-C must not hide that the file was written.
        result["rivals"] = _measure_baselines(source) if is_bytes else None
    if result["rivals"]:
        rivals = result["rivals"].items()
        sizes = (f"{name} {'not installed' if size is None else f'{size:,}'}" for name, size in rivals)
        info(f"for comparison, of {packed.values:,} bytes: {', '.join(sizes)}")
    if asked.json:
        print_json(result)


def _check_options(asked: CompressOptions) -> None:
    if bool(asked.images) == (asked.data is not None):
        raise UsageError("name pictures to compress, or a data set with --data; not both")
    if asked.data is None and any(option is not None for option in (asked.split, asked.limit, asked.data_dir)):
        raise UsageError("--split, --limit and --data-dir are for --data; drop them")
    if asked.data is not None and (asked.tile or asked.class_name is not None):
        raise UsageError("--tile and --class are for pictures, not for --data, whose images have a size and classes")
    if asked.images and asked.images.count(STREAM) > 1:
        raise UsageError("'-' is given twice, and there is only one stdin")
    if not asked.out:
        raise UsageError("name the file to write with -o FILE; '-o -' writes to stdout")
    if asked.out == STREAM:
        require_binary_stdout(asked.json)
    elif Path(asked.out).is_file() and not asked.force:
        raise UsageError(f"'{asked.out}' exists already; choose another file, or overwrite it with --force")
    else:
        require_writable(asked.out)


def _describe(asked: CompressOptions, header: "Header", packed: "Packed") -> dict[str, Any]:
    return {
        "file": asked.out,
        "items": header.contents.count,
        "sequences": packed.sequences,
        "values": packed.values,
        "bytes": packed.size,
        "block": header.block,
        "bits_per_dim": packed.bits_per_dim,
        "model_bits_per_dim": packed.own_bits_per_dim,
        "overhead_percent": packed.overhead_percent,
        "deflated_blocks": packed.deflated_blocks,
        "program_sha256": header.program.hex(),
        "verified": asked.verify,
    }


def _choose_shape(asked: CompressOptions, session: Session) -> ImageShape:
    shape, path, length = session.model.config.image, session.checkpoint.name, asked.length
    is_bytes = session.words is WINDOWS
    if is_bytes and asked.data is not None:
        raise UsageError(f"'{path}' is a model of bytes, which compresses files: leave out --data and name them")
    if length is None or (is_bytes and length == shape.width):
        return shape
    if not is_bytes:
        raise UsageError(f"--length is for models of bytes, and '{path}' predicts images; drop --length")
    if (reason := session.model.find_bound()) is not None:
        raise UsageError(f"windows of --length {length} are impossible: {reason}; drop --length")
    return shape.model_copy(update={"width": length})


def _open_data_set(asked: CompressOptions, session: Session, name: str) -> "Source":
    from linformer_cli.codec.sources import ArraySource

    shape, classes = session.model.config.image, session.model.config.required_classes
    images = load_images_to_fit(name, asked.split or "test", asked.data_dir, session.look)
    labels = images.require_labels(classes)[: asked.limit] if classes else None
    return ArraySource(images.images[: asked.limit], labels, shape)


def _open_paths(asked: CompressOptions, session: Session, stdin: Callable[[], BinaryIO], shape: ImageShape) -> "Source":
    from linformer_cli.codec.inputs import list_inputs, open_files, open_pictures
    from linformer_cli.codec.items import Tiling

    is_bytes = session.words is WINDOWS
    label = session.choose_class(asked.class_name, "pictures")
    if label is not None and session.model.config.optional_class:
        raise UsageError("the class is optional, and the file is coded without it; drop --class")
    if is_bytes and asked.tile:
        raise UsageError("--tile is for pictures, and the model compresses files of any length; drop --tile")
    inputs = list_inputs(asked.images or [], stdin, is_bytes)
    options.require_inputs_kept((one.file for one in inputs if isinstance(one.file, Path)), asked.out)
    tiling = Tiling(shape, is_bytes)
    if is_bytes:
        return open_files(inputs, tiling, label)
    return open_pictures(inputs, tiling, asked.tile, label, warn)


@contextlib.contextmanager
def _open_output(out: str) -> Iterator[BinaryIO]:
    if out == STREAM:
        with tempfile.TemporaryFile() as file:
            yield file
            write_stdout(file)
    else:
        with open_atomically(Path(out)) as file:
            yield file


def _verify(file: BinaryIO, packed: "Packed", coder: "Coder", batch: int) -> None:
    """Raise `LintxError` unless the file decodes to the values that were compressed."""
    from linformer_cli.codec.pack import PackedFile, digest_values

    found = PackedFile(file)
    with Bar("verifying", packed.sequences, found.header.contents.unit) as bar:
        try:
            digest = digest_values(found.read_blocks(coder, batch, bar.show))
        except DataError:
            digest = None
    if digest != packed.digest:
        raise LintxError("the file does not decode to the same values, so it was not kept; please report this")


def _measure_baselines(source: "Source") -> dict[str, int | None] | None:
    import numpy as np

    from linformer_cli.codec.baselines import measure_baselines

    def read() -> Iterator[bytes]:
        place, contents = 0, source.contents
        for piece in source.read():
            lengths = contents.lengths(place, place + len(piece.values))
            place += len(piece.values)
            yield piece.values[np.arange(contents.tiling.positions) < lengths[:, None]].astype(np.uint8).tobytes()

    try:
        return dict(measure_baselines(read))
    except DataError as error:  # a file has changed since it was compressed
        warn(f"{error}; not compared with other compressors")
        return None


def _show_sizes(result: dict[str, Any], session: Session) -> None:
    unit = session.checkpoint.info.data.words
    items = count_words(result["items"], "file" if unit is WINDOWS else "image")
    info(
        f"wrote {'to stdout' if result['file'] == STREAM else result['file']}: {items}, "
        f"{result['bytes']:,} bytes, {result['bits_per_dim']:.4f} {unit.bits}; the model's own "
        f"{result['model_bits_per_dim']:.4f}, overhead {result['overhead_percent']:.2f} %"
        + ("" if result["verified"] else "; not verified")
    )
    if result["deflated_blocks"]:
        info(f"{count_words(result['deflated_blocks'], 'block')} deflated, which is smaller than coding with the model")
