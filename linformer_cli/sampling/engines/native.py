"""The CPU engine: the program of a step (`native/program.py`), run by C++ (`native/runner.h`)."""

import time
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from linformer_cli.attention.base import fork_into
from linformer_cli.errors import LintxError
from linformer_cli.model.compile_step import compile_step, describe_images, encode_model
from linformer_cli.model.embedding import fill_ring
from linformer_cli.model.pixel_model import PixelModel, PixelState
from linformer_cli.native.library import NoLibrary, load_library
from linformer_cli.native.program import Kind, NoProgram
from linformer_cli.native.runner import Runner
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.sampling.particles import KeptImage
from linformer_cli.system.signals import Check, never_stop
from .base import Engine

# Between two calls of `before_step`, the engine draws for about this number of seconds, in at most this many steps.
_SECONDS, _STEPS = 0.05, 64


class NativeEngine(Engine):
    """Compiled operations on the CPU, for models whose blocks have a program.

    Products have inputs and weights in the model's type (float32 or bfloat16) or in int8; `compile_step` says what else
    is rounded. With int8, the results have the same bits on every processor: products are sums of integers, and
    everything else is rounded in a fixed order.

    With `look_ahead`, a pass draws several values of a single image. Given the random numbers, every value is a
    function of the values before it, so a pass can compute several values from guesses and keep those up to the first
    wrong one: 'predictive sampling' (Wiggers 2020, arXiv 2002.09928) without learned forecasts.
    """

    name = "native"
    # The largest number of positions of a single image in one pass; see `draw_ahead` of runner.cpp.
    window: ClassVar[int] = 8

    def prepare(self, look_ahead: bool) -> None:
        # Several images keep the processor busy without look-ahead. Two rows may be one image with guidance.
        self.program = compile_step(self.model, self.window if look_ahead and self.batch <= 2 else 1, self.products)
        self.runner = Runner.of(self.program, describe_images(self.model), self.batch)
        if self.model.find_bound() is None:
            self.runner.call("draw_without_end")
        self._views = {
            n: self.runner.view(n, self.batch, buffer.dtype)
            for n, buffer in enumerate(self.program.buffers)
            if buffer.kind == Kind.STATE or n == self.program.output
        }
        self._values = self.runner.values(self.batch, self.model.config.image.positions)
        self._output = self._views[self.program.output][:, : self.model.head.projection.out_features]
        self.use_threads(torch.get_num_threads())

    def use_threads(self, threads: int) -> None:
        self.runner.call("use_threads", threads)

    @classmethod
    def refusal(cls, model: PixelModel, products: torch.dtype | None = None) -> str | None:
        if model.device.type != "cpu":
            return "it runs on the CPU only"
        try:
            compile_step(model, products=products)
            load_library()
        except (NoProgram, NoLibrary) as error:
            return str(error)
        return None

    def start(self, state: PixelState | None = None) -> None:
        self.runner.call("resize", self.batch)
        self.runner.call("guide", 1.0)
        self.runner.call("start", 0, 0, None)
        if state is None:
            return
        recent = self._views[self.program.recent]
        fork_into(recent, fill_ring(state.embedding, recent.shape[1]))
        if self.program.label >= 0:
            fork_into(self._views[self.program.label], state.embedding.label)
        if self.program.pixel >= 0:
            fork_into(self._views[self.program.pixel], state.pixel)
        for indices, block, layer in zip(self.program.states, self.model.typed_blocks, state.layers, strict=True):
            for index, part in zip(indices, block.list_states(layer), strict=True):
                fork_into(self._views[index], part.reshape(len(part), -1))
        self.runner.call("place", int(state.embedding.position))

    @property
    def state_bytes(self) -> int:
        return self.program.state_bytes(self.batch)

    @property
    def look_aheads(self) -> int:
        return self.runner.call("look_aheads")

    @property
    def states(self) -> list[Tensor]:
        """The memory of every state, each [B, width]."""
        return [view for n, view in self._views.items() if n != self.program.output]

    @torch.no_grad()
    def step(self, tokens_t: Tensor) -> Tensor:
        self.runner.call("read", tokens_t.to(torch.int64).contiguous())
        return self._output[: len(tokens_t)]

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        """Do what `Engine.read` does, but in steps: with int8, the results have the same bits on every processor."""
        self.start()
        self.runner.call("resize", len(tokens))
        for tokens_t in tokens.unbind(dim=1):
            self.step(tokens_t)
        self.fork(torch.arange(len(tokens)).repeat_interleave(self.batch // len(tokens)))
        return self._output

    def fork(self, ancestors: Tensor) -> None:
        """Do what `Engine.fork` does. Between draws with guidance, `ancestors` are those with their class."""
        self.runner.call("fork", len(ancestors), ancestors.contiguous())

    @torch.no_grad()
    def draw_values(
        self, parameters: Tensor, streams: UniformStreams, filters: Filters, count: int, before_step: Check = never_stop
    ) -> Tensor:
        """Do what `Engine.draw_values` does. `before_step` is called before every few steps."""
        if parameters.data_ptr() != self._output.data_ptr():
            self._output[: len(parameters)] = parameters
        values = torch.empty(len(parameters) // filters.rows_per_image, count, dtype=torch.uint8)
        done = 0
        self._seed(streams, filters)
        for drawn in self._draw(count, before_step):
            known = self.runner.call("known")
            values[:, done : done + drawn] = self._values[: len(values), known - drawn : known]
            done += drawn
        streams.skip(count)
        return values

    @torch.no_grad()
    def keep_values(
        self, starts: Tensor, given: Tensor, streams: UniformStreams, filters: Filters, before_step: Check = never_stop
    ) -> KeptImage:
        """Do what `Engine.keep_values` does. `before_step` is called before every few steps."""
        self.runner.call("resize", len(starts))
        self.step(starts)
        self._seed(streams, filters)
        self.runner.call("keep", self.batch // len(starts), given.contiguous())
        for _ in self._draw(len(given), before_step):
            pass
        figures = np.empty(3)
        image = self.runner.call("pick", figures)
        return KeptImage(self._values[image, : len(given)].clone(), *figures.tolist())

    def _seed(self, streams: UniformStreams, filters: Filters) -> None:
        self._filter(filters)
        self.runner.call("seed", streams.seed, np.array(streams.indices, np.uint64), streams.taken)

    def _draw(self, count: int, before_step: Check) -> Iterator[int]:
        done, steps = 0, 1
        while done < count:
            before_step()
            began = time.perf_counter()
            drawn = self.runner.call("draw", count - done, steps)
            done += drawn
            yield drawn
            steps = min(2 * steps, _STEPS) if time.perf_counter() - began < _SECONDS else (steps + 1) // 2

    def draw(self, parameters: Tensor, uniforms: Tensor, filters: Filters) -> Tensor:
        self._filter(filters)
        parameters = parameters.float().contiguous()
        values = torch.empty(len(parameters) // filters.rows_per_image, dtype=torch.int64)
        self.runner.call("choose", len(values), parameters, parameters.stride(0), uniforms.contiguous(), values)
        return values

    def _filter(self, filters: Filters) -> None:
        top_k = min(filters.top_k or 0, self.model.head.levels)
        self.runner.call("filter", filters.temperature, top_k, filters.top_p or 0)
        self.runner.call("guide", filters.guidance)


def encode_step(model: PixelModel, products: torch.dtype | None) -> bytes:
    """Return the file of the program that this engine runs. Raises `LintxError` if the model has no program."""
    try:
        return encode_model(model, NativeEngine.window, products)
    except NoProgram as error:
        raise LintxError(f"the model cannot become a program: {error}") from None
