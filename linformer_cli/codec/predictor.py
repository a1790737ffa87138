"""The exact engine as a source of integer distributions, for the entropy coder."""

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.sampling.engines.native import NativeEngine, encode_step

# The version of the exact engine's results. Increase it when a change of the engine gives int8 other bits, because
# files that were written before can then not be decoded.
SEMANTICS = 1


def identify_program(model: PixelModel) -> bytes:
    """The SHA-256 of the int8 program of `model`, with its weights: that of the file which `lintx export` writes."""
    return hashlib.sha256(encode_step(model, torch.int8)).digest()


class Predictor:
    """Predicts `batch` sequences value by value. Everything that it returns is the same on every machine."""

    def __init__(self, model: PixelModel, batch: int) -> None:
        self.model, self.batch = model, batch
        self._engine = NativeEngine(model, batch, look_ahead=False, products=torch.int8)
        self._frequencies = np.empty((batch, model.head.levels))
        self._parameters = torch.empty(0)

    def start(self) -> None:
        """Begin new sequences. The first tokens are those of `PixelModel.start_tokens`."""
        self._engine.start()

    def predict(self, tokens: Tensor) -> NDArray[np.float64]:
        """Read the next token int64 [B] and return the frequencies of the next value minus 1, [B, levels].

        They are integers of at least 0, and those of a sequence add up to 2^24 - levels. The next call overwrites them.
        Raises `LintxError` if the prediction is NaN or infinite.
        """
        self._parameters = self._engine.step(tokens)
        self._engine.runner.call("frequencies", self._frequencies)
        return self._frequencies

    def nats(self, values: Tensor) -> Tensor:
        """The negative log-likelihood in nats, float32 [B], of values int64 [B] under the last prediction."""
        return -self.model.head.log_likelihood(self._parameters, values)
