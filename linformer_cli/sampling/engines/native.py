"""The CPU engine, which makes a whole step in one call into kernels that are compiled on first use (native.cpp).

A step updates and reads the state in one pass. The state is the float32 state of `linear`, so an engine can continue
from a state of `attend`.
"""

import ctypes
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from linformer_cli.attention.linear import LinearAttention
from linformer_cli.errors import LintxError
from linformer_cli.model.blocks import TransformerBlock
from linformer_cli.model.heads import MixtureHead
from linformer_cli.model.pixel_model import PixelModel, PixelState
from linformer_cli.native.compiler import NoCompiler
from linformer_cli.native.constants import COMPILED_MAPS, MOST_LEVELS, WIDEST_HEAD
from linformer_cli.sampling.choose import Filters, UniformStreams

from .base import DAMAGED, Engine
from .native_embedding import NativeEmbedding
from .native_layout import Drawing, load_kernels
from .native_network import NativeNetwork

# Look-ahead passes between two calls of `before_step`.
_PASSES = 32


class NativeEngine(Engine):
    """Fused kernels for transformer blocks with `linear` attention and one of `COMPILED_MAPS`, on the CPU.

    Weights are in the model's type, float32 or bfloat16; the residual stream, all sums and the state are float32.
    With `look_ahead`, a pass draws several values of a single image. Given the random numbers, every value is a
    function of the values before it. A pass therefore computes several values from guesses and keeps the values up to
    the first wrong guess. This is 'predictive sampling' (Wiggers 2020, arXiv 2002.09928) without its learned forecasts.
    The image does not change.
    """

    name = "native"
    # The largest number of positions of a single image in one pass; see `look_ahead` of native.cpp.
    window: ClassVar[int] = 8

    def prepare(self, look_ahead: bool) -> None:
        model, batch = self.model, self.batch
        self._kernels = load_kernels()
        # Several images keep the processor busy without look-ahead.
        self._window = self.window if look_ahead and batch == 1 else 1
        self._embedding = NativeEmbedding(model.embedding, batch, model.config.width, self._window)
        self.network = NativeNetwork(model, self._embedding, batch, self._window)
        self._x = torch.empty(batch * self._window, model.config.width)
        self._out = torch.empty(batch * self._window, model.head.projection.out_features)

    @classmethod
    def refusal(cls, model: PixelModel) -> str | None:
        if model.device.type != "cpu":
            return "it runs on the CPU only"
        if model.dtype not in (torch.float32, torch.bfloat16):
            return "it does not support float64"
        if model.config.mixtures > MOST_LEVELS:
            return f"it supports mixtures up to {MOST_LEVELS}"
        for block in model.blocks:
            if not isinstance(block, TransformerBlock) or not isinstance(block.attention.inner, LinearAttention):
                return "it supports linear attention only"
            inner = block.attention.inner
            if inner.options.feature_map not in COMPILED_MAPS:
                return f"it supports the feature maps {' and '.join(COMPILED_MAPS)} only"
            if max(inner.shape.key_width, inner.shape.value_width) > WIDEST_HEAD:
                return f"it supports heads up to {WIDEST_HEAD} wide"
        try:
            load_kernels()
        except NoCompiler as error:
            return str(error)
        return None

    def start(self, state: PixelState | None = None) -> None:
        self.network.use_states([])  # only one state in memory at a time
        state = self.copy_state(state)
        self.network.use_states(list(state.layers))
        self._embedding.start(state.embedding)
        self.look_aheads = 0

    @property
    def state_bytes(self) -> int:
        layers = (part for state in self.network.states for part in state)
        parts = [self._embedding.carried, self._embedding.label, *layers]
        return sum(part.numel() * part.element_size() for part in parts) + torch.int64.itemsize  # and the position

    def step(self, tokens_t: Tensor) -> Tensor:
        position = self._embedding.read(tokens_t, self._x)
        self._kernels.lintx_step(self.network.address, position, self._x.data_ptr(), self._out.data_ptr())
        return self._out[: self.batch]

    @torch.no_grad()
    def draw_values(
        self,
        parameters: Tensor,
        streams: UniformStreams,
        filters: Filters,
        count: int,
        before_step: Callable[[], None] | None = None,
    ) -> Tensor:
        """The result of `Engine.draw_values`; `before_step` is called less often while looking ahead."""
        if self._window == 1 or filters.active:
            return super().draw_values(parameters, streams, filters, count, before_step)
        uniforms = streams.take_many(count, self.model.device)[:, 0].contiguous()
        values = torch.empty(count, dtype=torch.int64)
        values[:1] = self.draw_unfiltered(parameters, uniforms[:1])
        drawing = self._describe_drawing(uniforms, values)
        while bool(parameters.isfinite().all()):
            if drawing.known == count:
                # A step followed each value but the last.
                self._embedding.position += count - 1
                self.look_aheads += drawing.passes
                return values.to(torch.uint8).unsqueeze(0)
            if before_step is not None:
                before_step()
            self._kernels.lintx_look_ahead(self.network.address, ctypes.addressof(drawing), _PASSES)
            parameters = self._out[:1]
        raise LintxError(DAMAGED)

    def draw_unfiltered(self, parameters: Tensor, uniforms: Tensor) -> Tensor:
        head = self.model.head
        parameters = parameters.float().contiguous()
        values = torch.empty(len(parameters), dtype=torch.int64)
        pointers = (parameters.data_ptr(), uniforms.data_ptr(), values.data_ptr())
        if isinstance(head, MixtureHead):
            sizes = (len(parameters), head.mixtures, head.levels, *head.log_scale_bounds)
            self._kernels.lintx_draw_mixture(*sizes, *pointers)
        else:
            self._kernels.lintx_draw_categorical(len(parameters), head.levels, *pointers)
        return values

    def _describe_drawing(self, uniforms: Tensor, values: Tensor) -> Drawing:
        embedding, head = self._embedding, self.model.head
        lowest, highest, mixtures = (
            (*head.log_scale_bounds, head.mixtures) if isinstance(head, MixtureHead) else (0, 0, 0)
        )
        tables = (embedding.slots, embedding.recent, embedding.table, embedding.places, embedding.label_vector())
        return Drawing(
            *(embedding.slots.shape[1], embedding.ring, head.levels, self.model.config.image.values_per_row),
            *(None if tensor is None else tensor.data_ptr() for tensor in tables),
            *(mixtures, lowest, highest),
            *(tensor.data_ptr() for tensor in (uniforms, values, self._x, self._out)),
            *(len(values), 1, 1, embedding.position, self._window, 0),
        )
