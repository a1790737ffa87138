"""`lintx decompress`: the pictures or files of a compressed file."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from linformer_cli.checkpoint_files import shipped_checkpoints
from linformer_cli.errors import DataError, UsageError
from linformer_cli.files import STREAM, is_special
from linformer_cli.units import count_words
from . import options
from .compress import Batch
from .config_options import argument, option, with_fields
from .display import Bar
from .output import info, print_json, read_stdin, require_binary_stdout, warn, write_stdout
from .session import Session, open_session

if TYPE_CHECKING:
    from linformer_cli.codec.coder import Coder
    from linformer_cli.codec.header import Header
    from linformer_cli.codec.pack import PackedFile, Restored
    from linformer_cli.codec.restore import Outcome

_MOST_NAMED = 10  # the damaged blocks that are named one by one


@dataclass(frozen=True, kw_only=True)
class DecompressOptions:
    file: str = argument("FILE", "A file of `lintx compress`; '-' is stdin.")
    out: str = option("", "The folder to write to. '-' writes one file to stdout.", "-o", "--out", metavar="FOLDER")
    checkpoint: str | None = option(
        None, "The model that the file was compressed with. Not needed for shipped models.", metavar="CHECKPOINT"
    )
    batch: Batch = 500
    force: bool = option(False, "Overwrite files that exist.", "--force")
    quiet: options.Quiet = False
    json: options.Json = False


@with_fields
def decompress(asked: DecompressOptions) -> None:
    """Unpack a compressed file.

    Examples:

    - `lintx decompress digits.lintz -o digits`
    - `lintx decompress book.lintz --checkpoint runs/text -o books`
    - `lintx decompress src.tar.lintz --checkpoint runs/text -o - | tar x`

    Writes its pictures or files to a folder. Needs the model that the file was compressed with, and `pip install
    '.[compress]'`. A damaged block is lost alone: everything else is written, what is lost is named, and the exit code
    is 1. What is left of a damaged item is written as damaged-NAME.
    """
    if not asked.out:
        raise UsageError("name the folder to write to with -o FOLDER; '-o -' writes a single file to stdout")
    if asked.out == STREAM:
        require_binary_stdout(asked.json)
    elif Path(asked.out).exists() and not Path(asked.out).is_dir():
        raise UsageError(f"'{asked.out}' is a file, not a folder; choose another name")
    faults: dict[int, str] = {}
    with _open_input(asked.file) as opened, _describe_errors(asked.file):
        from linformer_cli.codec.pack import PackedFile

        packed = PackedFile(opened)
        _check_names(asked, packed.header)
        session, coder = _open_model(asked, packed)
        contents = packed.header.contents
        items, parts = count_words(contents.count, "item"), count_words(len(packed.header.blocks), "block")
        info(f"{items} of {contents.values:,} values, in {parts}")
        with Bar("decompressing", contents.sequences, contents.unit) as bar:
            blocks = packed.read_blocks(coder, asked.batch, bar.show)
            outcome = _write(packed, _note_faults(blocks, faults), asked.out)
        for index, fault in list(faults.items())[:_MOST_NAMED]:
            warn(f"block {index} is lost: {fault}")
        if packed.surplus > 0:
            warn(f"{packed.surplus:,} bytes after the end of the file are ignored")
    if asked.json:
        record = {"items": contents.count, "written": outcome.written, "out": asked.out, "lost_blocks": faults}
        lists = {"lost": outcome.lost, "partly_lost": outcome.partly_lost}
        print_json({**session.record, "file": asked.file, **record, **lists})
    info(f"wrote {outcome.written:,} of {items} to {'stdout' if asked.out == STREAM else asked.out}")
    if lost := [*outcome.lost, *outcome.partly_lost]:
        names = ", ".join(lost[:_MOST_NAMED]) + (", ..." if len(lost) > _MOST_NAMED else "")
        others = "; the others were written" if outcome.written else ""
        counts = f"{len(faults):,} of {parts} and {len(lost):,} of {items}"
        raise DataError(f"'{asked.file}' is damaged: {counts} lost{others}. Lost: {names}")
    if packed.surplus > 0:
        raise DataError(f"'{asked.file}' is longer than its header says; all items were written")


def _check_names(asked: DecompressOptions, header: "Header") -> None:
    from linformer_cli.codec.restore import require_distinct_names, require_free_names

    if asked.out == STREAM:
        if (count := header.contents.count) != 1:
            raise UsageError(f"'{asked.file}' has {count:,} items, and '-o -' writes only one; name a folder")
        return
    require_distinct_names(header)
    if not asked.force:
        require_free_names(header, Path(asked.out))


def _open_model(asked: DecompressOptions, packed: "PackedFile") -> "tuple[Session, Coder]":
    session = open_session(_choose_checkpoint(asked, packed), "cpu", "int8", "native")

    from linformer_cli.codec.coder import Coder, identify_program

    packed.require_program(identify_program(session.model), session.checkpoint.name)
    # A forged header may have any size.
    own, tiling = session.model.config.image, packed.header.contents.tiling
    longer = tiling.shape.width != own.width and tiling.is_bytes and session.model.find_bound() is None
    if tiling.shape != (own.model_copy(update={"width": tiling.shape.width}) if longer else own):
        raise DataError("the size of its images is not that of the model")
    return session, Coder(session.model)


def _open_input(file: str) -> BinaryIO:
    if file == STREAM:
        return read_stdin()
    if is_special(Path(file)):
        raise DataError(f"'{file}' is a pipe or a device; pass its data to '-'")
    try:
        return open(file, "rb")
    except OSError as error:
        raise DataError(f"cannot read '{file}': {error.strerror or error}") from None


@contextlib.contextmanager
def _describe_errors(file: str) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise DataError(f"'{file}' cannot be decompressed: {error}") from None


def _choose_checkpoint(asked: DecompressOptions, packed: "PackedFile") -> str:
    name = packed.header.checkpoint
    if asked.checkpoint is not None:
        return asked.checkpoint
    if name in shipped_checkpoints():
        return str(shipped_checkpoints()[name])
    model = f"the model '{name}', which this version does not have" if name else "a model that is not shipped"
    raise UsageError(f"'{asked.file}' was compressed with {model}; name it with --checkpoint")


def _note_faults(blocks: "Iterator[Restored]", faults: dict[int, str]) -> "Iterator[Restored]":
    for block in blocks:
        if block.fault is not None:
            faults[block.index] = block.fault
        yield block


def _write(packed: "PackedFile", blocks: "Iterator[Restored]", out: str) -> "Outcome":
    from linformer_cli.codec.restore import restore_items

    if out != STREAM:
        return restore_items(packed.header, blocks, Path(out))
    with tempfile.TemporaryDirectory() as folder:
        outcome = restore_items(packed.header, blocks, Path(folder))
        if outcome.written:
            with open(Path(folder, *packed.header.contents.item(0).name.split("/")), "rb") as found:
                write_stdout(found)
    return outcome
