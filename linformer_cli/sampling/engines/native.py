"""The CPU engine: the program of a step (`native/program.py`), run by C++."""

import ctypes
from typing import ClassVar

import torch
from torch import Tensor

from linformer_cli.attention.base import fork_into
from linformer_cli.errors import LintxError
from linformer_cli.model.embedding import fill_ring
from linformer_cli.model.heads import MixtureHead
from linformer_cli.model.pixel_model import PixelModel, PixelState
from linformer_cli.model.program import compile_step, encode_model
from linformer_cli.native.library import NoLibrary
from linformer_cli.native.program import Kind, NoProgram
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.system.signals import Check, never_stop

from .base import DAMAGED, Engine
from .native_memory import Drawing, Head, Memory, load_kernels

# The number of look-ahead passes between two calls of `before_step`.
_PASSES = 32


class NativeEngine(Engine):
    """Compiled operations on the CPU, for models whose blocks have a program.

    Products have inputs and weights in the model's type (float32 or bfloat16) or in int8. Cached keys and values are
    bfloat16, unless products are float32. The residual stream and the rest of the state are float32, and so are the
    sums of products of floats. With int8, the results have the same bits on every processor: all products are sums of
    integers, and everything else is rounded in a fixed order.

    With `look_ahead`, a pass draws several values of a single image, which has two rows if it is drawn with guidance.
    Given the random numbers, every value is a function of the values before it. A pass can therefore compute several
    values from guesses and keep those up to the first wrong guess. This is 'predictive sampling' (Wiggers 2020, arXiv
    2002.09928) without its learned forecasts. The image does not change.
    """

    name = "native"
    # The largest number of positions of a single image in one pass; see `look_ahead` of engine.cpp.
    window: ClassVar[int] = 8

    def prepare(self, look_ahead: bool) -> None:
        # Several images keep the processor busy without look-ahead. Two rows may be one image with guidance.
        self.program = compile_step(self.model, self.window if look_ahead and self.batch <= 2 else 1, self.products)
        self._memory = Memory(self.program, self.batch)
        self._kernels = self._memory.kernels
        self._heads: dict[Filters, Head] = {}
        self._is_bounded = self.model.find_bound() is not None
        self.use_threads(torch.get_num_threads())

    def use_threads(self, threads: int) -> None:
        """Let up to `threads` threads work on every step."""
        self.threads = threads
        self._memory.use_threads(threads)

    @classmethod
    def refusal(cls, model: PixelModel, products: torch.dtype | None = None) -> str | None:
        if model.device.type != "cpu":
            return "it runs on the CPU only"
        try:
            compile_step(model, products=products)
            load_kernels()
        except (NoProgram, NoLibrary) as error:
            return str(error)
        return None

    def start(self, state: PixelState | None = None) -> None:
        self._memory.start()
        self._position, self.look_aheads = 0, 0
        if state is None:
            return
        self._position = int(state.embedding.position)
        fork_into(self._recent, fill_ring(state.embedding, self._recent.shape[1]))
        if self.program.label >= 0:
            fork_into(self._memory.tensors[self.program.label], state.embedding.label)
        if self.program.pixel >= 0:
            fork_into(self._memory.tensors[self.program.pixel], state.pixel)
        for index, (block, layer) in enumerate(zip(self.model.typed_blocks, state.layers, strict=True)):
            self._memory.set_layer(index, block.list_states(layer))

    @property
    def state_bytes(self) -> int:
        return self.program.state_bytes(self.batch)

    @property
    def states(self) -> list[Tensor]:
        """The memory of every state, each [B, width]."""
        return [self._memory.tensors[n] for n, buffer in enumerate(self.program.buffers) if buffer.kind == Kind.STATE]

    @property
    def _recent(self) -> Tensor:
        """The ring of recent values, int16 [B, length]."""
        return self._memory.tensors[self.program.recent]

    @property
    def _output(self) -> Tensor:
        """The head's parameters after a pass, [rows, P]."""
        return self._memory.tensors[self.program.output][:, : self.model.head.projection.out_features]

    def step(self, tokens_t: Tensor) -> Tensor:
        position = self._position
        if self._is_bounded and position == self.model.config.image.positions:
            raise ValueError(f"all {position} values of the image have already been drawn")
        rows = len(tokens_t)
        if position:
            self._recent[:rows, (position - 1) % self._recent.shape[1]] = tokens_t
        elif self.program.label >= 0:
            self._memory.tensors[self.program.label][:rows, 0] = tokens_t
        self._kernels.lintx_step(self._memory.address, position)
        self._position += 1
        return self._output[:rows]

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        """Do what `Engine.read` does, but in steps: with int8, the results have the same bits on every processor."""
        rows = len(tokens)
        self.start()
        self._memory.use_rows(rows)
        for tokens_t in tokens.unbind(dim=1):
            parameters = self.step(tokens_t)
        self._memory.use_rows(self.batch)
        for state in self.states:
            fork_into(state, state[:rows].clone())
        return parameters.repeat_interleave(self.batch // rows, dim=0)

    @torch.no_grad()
    def draw_values(
        self,
        parameters: Tensor,
        streams: UniformStreams,
        filters: Filters,
        count: int,
        before_step: Check = never_stop,
    ) -> Tensor:
        """Do what `Engine.draw_values` does. While looking ahead, `before_step` is called less often."""
        if self.program.window == 1 or self.batch != filters.rows_per_image:
            return super().draw_values(parameters, streams, filters, count, before_step)
        uniforms = streams.take_many(count, self.model.device)[:, 0].contiguous()
        values = torch.empty(count, dtype=torch.int64)
        values[:1] = self.draw(parameters, uniforms[:1], filters)
        drawing = self._describe_drawing(uniforms, values, filters)
        while bool(parameters.isfinite().all()):
            if drawing.known == count:
                # A step followed each value but the last.
                self._position += count - 1
                self.look_aheads += drawing.passes
                return values.to(torch.uint8).unsqueeze(0)
            before_step()
            self._kernels.lintx_look_ahead(self._memory.address, ctypes.addressof(drawing), _PASSES)
            parameters = self._output[:: self.program.window]
        raise LintxError(DAMAGED)

    def draw(self, parameters: Tensor, uniforms: Tensor, filters: Filters) -> Tensor:
        parameters = parameters.float()
        if parameters.stride(1) != 1:
            parameters = parameters.contiguous()
        values = torch.empty(len(parameters) // filters.rows_per_image, dtype=torch.int64)
        rows = (len(values), parameters.data_ptr(), parameters.stride(0))
        if filters not in self._heads:
            self._heads[filters] = self.describe_head(filters)
        self._kernels.lintx_draw(self._heads[filters].address, *rows, uniforms.data_ptr(), values.data_ptr())
        return values

    def describe_head(self, filters: Filters) -> Head:
        """The distribution of a value after `filters`, for the functions of the library."""
        head = self.model.head
        bounds = (head.mixtures, *head.log_scale_bounds) if isinstance(head, MixtureHead) else (0, 0, 0)
        top_k = min(filters.top_k or 0, head.levels)
        return Head(head.levels, *bounds, filters.guidance, filters.temperature, top_k, filters.top_p or 0)

    def _describe_drawing(self, uniforms: Tensor, values: Tensor, filters: Filters) -> Drawing:
        return Drawing(
            self.describe_head(filters),
            *(self.program.recent, self._recent.shape[1], self.program.output),
            self.model.config.image.values_per_row,
            *(uniforms.data_ptr(), values.data_ptr()),
            *(len(values), 1, 1, self._position, self.program.window, 0),
        )


def encode_step(model: PixelModel, products: torch.dtype | None) -> bytes:
    """The file of the program that this engine runs. Raises `LintxError` if the model has no program."""
    try:
        return encode_model(model, NativeEngine.window, products)
    except NoProgram as error:
        raise LintxError(f"the model cannot become a program: {error}") from None
