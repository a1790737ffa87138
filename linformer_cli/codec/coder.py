"""Codes batches of sequences: a range coder stores each value with the frequencies that the exact engine predicts.

Each block of adjacent sequences has its own coder. In it, all first values come first, then all second ones.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linformer_cli.errors import UsageError
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.sampling.engines.native import NativeEngine, encode_step
from linformer_cli.system.environment import import_extra
from linformer_cli.system.signals import Check, never_stop

SEMANTICS = 1  # increase this when a change of the engine gives int8 other bits: earlier files can then not be decoded

Integers = NDArray[np.int64]
Rows = slice | Integers


@dataclass(frozen=True)
class Lanes:
    """A batch of B sequences: the number of values of each, int64 [B], and of sequences in each block."""

    lengths: Integers
    blocks: Sequence[int]

    @property
    def longest(self) -> int:
        return int(self.lengths.max(initial=0))

    def pair(self, coders: Sequence[Any]) -> Iterator[tuple[Any, slice]]:
        for coder, size, end in zip(coders, self.blocks, np.cumsum(self.blocks).tolist(), strict=True):
            yield coder, slice(end - size, end)

    def find_active(self, coders: Sequence[Any], position: int) -> Iterator[tuple[Any, Rows]]:
        """Yield the coder of each block, and those of its sequences that have a value at `position`, if any."""
        for coder, rows in self.pair(coders):
            active = self.lengths[rows] > position
            if active.all():
                yield coder, rows
            elif active.any():
                yield coder, rows.start + np.flatnonzero(active)


def identify_program(model: PixelModel) -> bytes:
    """Return the SHA-256 of the int8 program of `model` with its weights, which is also that of its `.lintx` file."""
    return hashlib.sha256(encode_step(model, torch.int8)).digest()


class Predictor:
    """Predicts `batch` sequences value by value. Everything that it returns is the same on every machine."""

    def __init__(self, model: PixelModel, batch: int) -> None:
        self.model, self.batch = model, batch
        self._engine = NativeEngine(model, batch, look_ahead=False, products=torch.int8)
        self._frequencies = np.empty((batch, model.head.levels))
        self._parameters = torch.empty(0)

    def start(self) -> None:
        self._engine.start()

    def predict(self, tokens: Tensor) -> NDArray[np.float64]:
        """Read the next token int64 [B] and return the frequencies of the next value minus 1, [B, levels].

        They are integers that add up to 2^24 - levels, until the next call. Raises `LintxError` for NaN or infinity.
        """
        self._parameters = self._engine.step(tokens)
        self._engine.runner.call("frequencies", self._frequencies)
        return self._frequencies

    def nats(self, values: Tensor) -> Tensor:
        """Return the negative log-likelihood in nats, float32 [B], of values int64 [B] under the last prediction."""
        return -self.model.head.log_likelihood(self._parameters, values)


class Coder:
    """Encodes and decodes batches. Raises `UsageError` if the exact engine does not support the model here."""

    def __init__(self, model: PixelModel, before_step: Check = never_stop) -> None:
        self._stream = import_extra("constriction", "compress").stream
        if (refusal := NativeEngine.refusal(model, torch.int8)) is not None:
            raise UsageError(f"only the engine native in int8 can compress, since its results are exact: {refusal}")
        self.model, self._before_step = model, before_step
        self._predictor: Predictor | None = None
        # Without `perfect`, constriction multiplies by 2^24 - levels, divides by the sum of the given numbers, rounds
        # down and adds 1. The numbers of `Predictor.predict` have exactly this sum, so they become the frequencies.
        self._family = self._stream.model.Categorical(perfect=False)
        classes = model.config.required_classes
        self._uniform = self._stream.model.Uniform(classes) if classes > 1 else None

    @torch.no_grad()
    def encode(self, lanes: Lanes, values: Integers, labels: Integers | None = None) -> tuple[list[bytes], Tensor]:
        """Return the data of each block of values [B, T], and the model's own nats of each sequence, float64 [B].

        `labels` int64 [B] are the classes, if every sequence needs one. Raises `LintxError` for NaN or infinity.
        """
        encoders = [self._stream.queue.RangeEncoder() for _ in lanes.blocks]
        predictor = self._start(len(values))
        nats = torch.zeros(len(values), dtype=torch.float64)
        by_position = torch.from_numpy(np.ascontiguousarray(values.T))
        symbols = by_position.numpy().astype(np.int32)
        counted = torch.from_numpy(lanes.lengths)

        def exchange(position: int, frequencies: NDArray[np.float64]) -> Tensor:
            for encoder, rows in lanes.find_active(encoders, position):
                encoder.encode(symbols[position, rows], self._family, frequencies[rows])
            nats.add_(predictor.nats(by_position[position]) * (counted > position))
            return by_position[position]

        labels = None if self._uniform is None else labels
        if labels is not None:
            for encoder, rows in lanes.pair(encoders):
                encoder.encode(labels[rows].astype(np.int32), self._uniform)
        self._run(predictor, lanes, labels, exchange)
        return [encoder.get_compressed().astype("<u4").tobytes() for encoder in encoders], nats

    @torch.no_grad()
    def decode(self, lanes: Lanes, data: Sequence[bytes]) -> Integers:
        """Decode values [B, T] from each block's data, 0 after a sequence ends. Damaged data give wrong values."""
        if not data:
            return np.zeros((0, 0), dtype=np.int64)
        decoders = [_Decoder(self._stream.queue, part) for part in data]
        by_position = torch.zeros(lanes.longest, len(lanes.lengths), dtype=torch.int64)
        values = by_position.numpy()

        def exchange(position: int, frequencies: NDArray[np.float64]) -> Tensor:
            for decoder, rows in lanes.find_active(decoders, position):
                values[position, rows] = decoder.decode(len(frequencies[rows]), self._family, frequencies[rows])
            return by_position[position]

        labels = None
        if self._uniform is not None:
            counts = ((decoder, rows.stop - rows.start) for decoder, rows in lanes.pair(decoders))
            parts = [decoder.decode(count, self._uniform, count) for decoder, count in counts]
            labels = np.concatenate(parts).astype(np.int64)
        self._run(self._start(len(lanes.lengths)), lanes, labels, exchange)
        return values.T

    def _start(self, batch: int) -> Predictor:
        """Return a predictor that has begun `batch` sequences: the last one, if it has the same size."""
        if self._predictor is None or self._predictor.batch != batch:
            self._predictor = None  # free its memory before the next one is built
            self._predictor = Predictor(self.model, batch)
        self._predictor.start()
        return self._predictor

    def _run(
        self,
        predictor: Predictor,
        lanes: Lanes,
        labels: Integers | None,
        exchange: Callable[[int, NDArray[np.float64]], Tensor],
    ) -> None:
        """Predict the values of all positions. `exchange` turns frequencies [B, levels] into the values int64 [B]."""
        tokens = self.model.start_tokens(len(lanes.lengths), None if labels is None else torch.from_numpy(labels))
        for position in range(lanes.longest):
            self._before_step()
            tokens = exchange(position, predictor.predict(tokens))


class _Decoder:
    """The decoder of one block. Once constriction finds that the data cannot be right, all values are 0."""

    def __init__(self, queue: Any, data: bytes) -> None:
        words = np.frombuffer(data[: len(data) // 4 * 4], dtype="<u4").astype(np.uint32)
        self._decoder: Any | None = queue.RangeDecoder(words)

    def decode(self, count: int, model: Any, parameters: int | NDArray[np.float64]) -> NDArray[np.int32]:
        """Return the next `count` values. `parameters` are the frequencies of each, or else `count` again."""
        if self._decoder is not None:
            try:
                return self._decoder.decode(model, parameters)
            except AssertionError:
                self._decoder = None
        return np.zeros(count, dtype=np.int32)
