"""Look-ahead on the device: a CUDA graph that draws several values of one image, without the host."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linformer_cli.attention.base import Attention
from linformer_cli.attention.kernels.registry import KEPT_ROWS, TRITON_WIDTHS, find_kernel, fuse_steps
from linformer_cli.attention.parts.folded_sums import AheadState, build_folded_state
from linformer_cli.attention.tensors import host_number
from linformer_cli.errors import LintxError
from linformer_cli.model.pixel_model import PixelModel, PixelState
from linformer_cli.native.constants import COMPILED_MAPS
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.system.signals import Check, never_stop
from .base import DAMAGED
from .cuda import FusedCudaEngine


class Ahead(NamedTuple):
    """What the passes of W positions share. Two rows (B = 2) are one image with its class and without.

    `tokens` int64 [B, W] are the last known value and the guesses that follow it, and `numbers` float64 [W] the random
    numbers of the values to draw. `line` int64 [T + W] holds the values so far, followed by guesses. `uniforms` float64
    [T + W] are the random numbers of all values. `counts` int64 [4]: values so far, values and guesses in `line`,
    values wanted, and 1 unless a prediction was NaN or infinite. `recent` int16 [B, reach] are the last values that
    were read, `place` (0-d int64) the number of all, and `kept` int64 [B] how many rows of the last pass were right.
    """

    tokens: Tensor
    numbers: Tensor
    line: Tensor
    uniforms: Tensor
    counts: Tensor
    recent: Tensor
    place: Tensor
    kept: Tensor


class AheadEngine(FusedCudaEngine):
    """`FusedCudaEngine` with the look-ahead of `NativeEngine` for a single image, in passes of `window` positions.

    The positions of a pass are rows of its products. What it keeps, and where the image is, stays on the device. The
    host asks only after as many passes as the values that are left need at least.
    """

    name = "cuda-fused:look-ahead=16"
    window = 16  # the rows of a tile of a product

    @classmethod
    def refusal(cls, model: PixelModel, products: torch.dtype | None = None) -> str | None:
        config = model.config
        fits = config.attention == "linear" and config.attention_options.get("feature_map", "elu") in COMPILED_MAPS
        fits &= config.head_width in TRITON_WIDTHS and not (config.short_convolution or config.steps_over_pixels)
        needs = "'linear' attention with the map elu or relu and heads of 16, 32 or 64"
        reason = f"its look-ahead needs {needs}, and no short convolution or context 'residual'"
        return super().refusal(model, products) or (None if fits else reason)

    def prepare(self, look_ahead: bool) -> None:
        device, positions = self.model.device, self.model.config.image.positions
        self._looks_ahead = look_ahead and self.batch <= 2  # two rows may be one image with guidance
        integers, reals = (partial(torch.zeros, dtype=x, device=device) for x in (torch.int64, torch.float64))
        self._kept = integers(self.batch)
        super().prepare(look_ahead)
        window, room = self.window, positions + self.window
        buffers = integers(self.batch, window), reals(window), integers(room), reals(room), integers(4)
        self._ahead = Ahead(*buffers, self._state.embedding.recent, self._place, self._kept)

    def fix_layer(self, mixer: Attention, state: Any) -> Any:
        if not self._looks_ahead:
            return super().fix_layer(mixer, state)
        return AheadState(*build_folded_state(state.s, state.z, self._kept, self.model.dtype, self.window + 1))

    def start(self, state: PixelState | None = None) -> None:
        super().start(state)
        self._kept.zero_()
        self._passes = 0

    @property
    def look_aheads(self) -> int:
        return self._passes

    def take_step(self) -> None:
        super().take_step()
        self._kept.fill_(1)

    @torch.no_grad()
    def draw_values(
        self, parameters: Tensor, streams: UniformStreams, filters: Filters, count: int, before_step: Check = never_stop
    ) -> Tensor:
        """Do what `CudaEngine.draw_values` does. `before_step` is called before every pass."""
        if not self._looks_ahead or self.batch != filters.rows_per_image:
            return super().draw_values(parameters, streams, filters, count, before_step)
        before_step()
        for _ in range(count - 1):
            self._count_step()
        ahead = self._ahead
        ahead.uniforms[:count] = streams.take_many(count, self.model.device).squeeze(1)
        first = self.choose(parameters, ahead.uniforms[:1], filters)
        ahead.line[:1] = first
        ahead.tokens[:] = first
        ahead.numbers.copy_(ahead.uniforms[1 : 1 + self.window])
        ahead.counts.fill_(1)
        ahead.counts[2] = count
        ahead.counts[3] = torch.isfinite(parameters).all()
        left = count - 1
        while left > 0:
            for _ in range(-(-left // self.window)):
                before_step()
                self._run(("ahead", filters), lambda: self.take_pass(filters))
                self._passes += 1
            left = count - int(ahead.counts[0])
        if not bool(ahead.counts[3]):
            raise LintxError(DAMAGED)
        return ahead.line[:count].to("cpu", torch.uint8).unsqueeze(0)

    def take_pass(self, filters: Filters) -> None:
        """Read the tokens of a pass, draw a value after each, and keep those that are right, on the device only."""
        model, ahead = self.model, self._ahead
        with fuse_steps():
            keep = find_kernel(KEPT_ROWS, model.device, model.dtype)
            assert keep is not None
            # The position on the host only tells that the start token has been read.
            embedding = self._state.embedding._replace(position=host_number(1))
            parameters, _ = model.step(ahead.tokens, self._state._replace(embedding=embedding))
            finite = torch.isfinite(parameters).unflatten(0, ahead.tokens.shape).movedim(0, 1).flatten(1).all(dim=1)
            keep(self.choose(parameters, ahead.numbers, filters), finite, ahead, model.config.image.values_per_row)
