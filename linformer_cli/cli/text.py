"""Text drawn by a model of bytes, on stdout as it is drawn."""

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from linformer_cli.errors import UsageError
from linformer_cli.units import format_bytes, format_duration
from .output import info, print_json

if TYPE_CHECKING:
    from linformer_cli.sampling.decode import Sampler


def print_text(
    sampler: "Sampler", prompt: bytes, count: int | None, index: int, record: Mapping[str, object] | None = None
) -> None:
    """Print `prompt` and the bytes that follow it on stdout.

    Without `count`, the text goes on without end if the model allows it, and otherwise to the end of a window. A
    terminal gets safe text, and a pipe or a file the bytes themselves. With `record`, the text is printed at the end as
    part of a JSON document that begins with `record`. Raises `UsageError` if such a text had no end.
    """
    import torch

    from linformer_cli.report.terminal import SafeText
    from linformer_cli.sampling.stream import Stream

    model = sampler.model
    if count is None and model.find_bound() is not None:
        count = max(0, model.config.image.positions - len(prompt))
    stream = Stream(sampler, torch.tensor(list(prompt), dtype=torch.int64), count)
    if count is None and record is not None:
        raise UsageError("--json prints the text at its end, and this text has none; limit the bytes with -n")
    if count is None:
        info("without end; stop with Ctrl-C, or limit the bytes with -n")
    text = SafeText() if sys.stdout.isatty() else None
    whole = bytearray()

    def write(data: bytes, last: bool = False) -> None:
        if record is not None:
            whole.extend(data)
            return
        if text is None:
            sys.stdout.buffer.write(data)
        else:
            sys.stdout.write(text.decode(data, last) + "\n" * last)
        sys.stdout.flush()

    drawn, began = 0, time.perf_counter()

    def finish() -> None:
        seconds = time.perf_counter() - began
        write(b"", last=True)
        state = format_bytes(model.state_bytes(1))
        info(f"{drawn:,} bytes in {format_duration(seconds)}: {drawn / seconds:.3g} bytes/s, state {state}")
        if record is not None:
            print_json(
                {
                    **record,
                    "text": whole.decode(errors="replace"),
                    "prompt_bytes": len(prompt),
                    "bytes": drawn,
                    "bytes_per_second": drawn / seconds,
                    "seconds": seconds,
                    "state_bytes": model.state_bytes(1),
                }
            )

    try:
        write(prompt)
        for part in stream.draw(index):
            write(part)
            drawn += len(part)
    except KeyboardInterrupt:  # the usual end of a text without end
        finish()
        raise
    finish()
