"""The sizes that general compressors reach, for comparison."""

import importlib
import lzma
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

ZSTD_LEVEL = 19


def measure_baselines(read: Callable[[], Iterable[bytes]]) -> Mapping[str, int | None]:
    """Measure the bytes of gzip -9, xz -9e and zstd -19 for the chunks of `read()`; None if there is no zstd."""
    deflater = zlib.compressobj(9, wbits=31)
    packer = lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME)
    return {"gzip": _feed(deflater, read()), "xz": _feed(packer, read()), "zstd": measure_zstd(read)}


def measure_zstd(read: Callable[[], Iterable[bytes]]) -> int | None:
    """Return the bytes of zstd -19, or None if neither Python nor the system has zstd."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        return _feed(module.ZstdCompressor(level=ZSTD_LEVEL), read())
    program = shutil.which("zstd")
    return None if program is None else _run(program, read())


def _feed(compressor: Any, chunks: Iterable[bytes]) -> int:
    return sum(len(compressor.compress(chunk)) for chunk in chunks) + len(compressor.flush())


def _run(program: str, chunks: Iterable[bytes]) -> int | None:
    with tempfile.TemporaryFile() as data, tempfile.TemporaryFile() as output:
        data.writelines(chunks)
        data.seek(0)
        command = [program, f"-{ZSTD_LEVEL}", "-q", "-c"]
        done = subprocess.run(command, stdin=data, stdout=output, stderr=subprocess.DEVNULL)
        return None if done.returncode else output.seek(0, 2)
