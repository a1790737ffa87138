"""The CPU engine: a whole step is one call into kernels that are compiled on first use (native.cpp).

The state is updated and read in one pass; it is the float32 state of `linear`, so stepping goes on from what `attend`
gave.
"""

import ctypes
from collections.abc import Callable
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.attention.kernels.linear import MAPS
from linformer_cli.attention.linear import LinearAttention, LinearState
from linformer_cli.errors import LintxError
from linformer_cli.model.blocks import TransformerBlock
from linformer_cli.model.embedding import EmbeddingState, PixelEmbedding
from linformer_cli.model.heads import MixtureHead
from linformer_cli.model.pixel_model import PixelModel, PixelState
from linformer_cli.native.compiler import NoCompiler
from linformer_cli.sampling.choose import Filters, UniformStreams

from .base import DAMAGED, Engine
from .native_layout import TILE_ROWS, Drawing, Layer, Network, Surroundings, Tables, load_kernels, pack

# Up to so many images a thread, all threads work together on every product: one with fewer of its own would read all
# weights for little. With more each thread takes its share of the images through all layers.
FEW = 2
# Of a single image up to so many positions are computed in one pass; see `look_ahead` of native.cpp.
WINDOW = 8
# So many are made before someone may ask for an end.
_PASSES = 32
# Of the arrays that the kernels keep on the stack.
WIDEST_HEAD, MOST_LEVELS = 256, 1024

# Gain and shift, as pointers; None where there is no norm.
_Norm = tuple[int | None, int | None]


class NativeEngine(Engine):
    """Fused kernels for transformer blocks with `linear` attention (`elu` or `relu`), on the CPU.

    Weights are in the model's type, float32 or bfloat16; the residual stream, all sums and the state are float32.
    A single image is drawn by looking ahead: with its random numbers fixed every value is a function of those before
    it, so several are computed at once from guesses, and kept up to the first wrong one (as in 'predictive sampling',
    Wiggers 2020, arXiv 2002.09928, without its learned forecasts). The image is the same.
    """

    name = "native"
    window: ClassVar[int] = WINDOW

    def __init__(self, model: PixelModel, batch: int, state: PixelState | None = None) -> None:
        super().__init__(model, batch, state)
        self._kernels = load_kernels()
        state = model.init_state(batch) if state is None else state
        self._blocks = cast(list[TransformerBlock], list(model.blocks))
        self._states = [LinearState(*(part.contiguous() for part in layer)) for layer in state.layers]
        # Several images keep the processor busy as they are.
        self._window = self.window if batch == 1 else 1
        self._embedding = _Embedding(model.embedding, state.embedding, batch, model.config.width, self._window)
        self._kept: list[Tensor] = []  # whatever a pointer points at
        self._layers = (Layer * len(self._blocks))(*map(self._describe_layer, range(len(self._blocks))))
        self._network = self._describe_network()
        self._x = torch.empty(batch * self._window, model.config.width)
        self._out = torch.empty(batch * self._window, model.head.projection.out_features)

    @classmethod
    def refusal(cls, model: PixelModel) -> str | None:
        if model.device.type != "cpu":
            return "it runs on the CPU only"
        if model.dtype not in (torch.float32, torch.bfloat16):
            return "it has no float64"
        if model.config.mixtures > MOST_LEVELS:
            return f"it has mixtures up to {MOST_LEVELS}"
        for block in model.blocks:
            if not isinstance(block, TransformerBlock) or not isinstance(block.attention.inner, LinearAttention):
                return "it serves linear attention only"
            inner = block.attention.inner
            if inner.options.feature_map not in MAPS:
                return f"it has the feature maps {' and '.join(MAPS)} only"
            if max(inner.shape.key_width, inner.shape.value_width) > WIDEST_HEAD:
                return f"it has heads up to {WIDEST_HEAD} wide"
        try:
            load_kernels()
        except NoCompiler as error:
            return str(error)
        return None

    @property
    def state_bytes(self) -> int:
        layers = (part for state in self._states for part in state)
        parts = [self._embedding.carried, self._embedding.label, *layers]
        return sum(part.numel() * part.element_size() for part in parts) + torch.int64.itemsize  # and the position

    def step(self, tokens_t: Tensor) -> Tensor:
        position = self._embedding.read(tokens_t, self._x)
        self._kernels.lintx_step(ctypes.addressof(self._network), position, self._x.data_ptr(), self._out.data_ptr())
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
        """As `Engine.draw_values`. A single image is drawn by looking ahead, and `before_step` is called less often."""
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
            self._kernels.lintx_look_ahead(ctypes.addressof(self._network), ctypes.addressof(drawing), _PASSES)
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

    def _describe_layer(self, index: int) -> Layer:
        """Block number `index`. Which norm follows which branch is decided here and in `_describe_network` alone."""
        block, following = self._blocks[index], self._blocks[index + 1 : index + 2]
        if block.pre:
            mid, end = block.feed_forward_norm, following[0].attention_norm if following else self.model.norm
        else:
            mid, end = block.attention_norm, block.feed_forward_norm
        feed_forward = block.feed_forward
        shape = block.attention.inner.shape
        linears = (block.attention.input, block.attention.output, feed_forward.input, feed_forward.output)
        return Layer(
            *(self._pointer(pack(linear.weight)) for linear in linears),
            *(self._pointer(linear.bias.float()) for linear in linears),
            *self._norm(mid),
            *self._norm(end),
            *(part.data_ptr() for part in self._states[index]),
            self._pointer(torch.empty(shape.heads, self._window, shape.key_width + shape.value_width)),
        )

    def _describe_network(self) -> Network:
        model, config, block = self.model, self.model.config, self._blocks[0]
        inner = cast(LinearAttention, block.attention.inner)
        shape, head = inner.shape, model.head.projection
        mixed = shape.heads * shape.value_width
        around = self._describe_surroundings()
        projected = mixed + 2 * shape.heads * shape.key_width
        widest = max(projected, config.feed_forward, config.width, head.out_features, around.hidden)
        # What products give, and what they take, each rounded up.
        taken = (config.width, mixed, config.feed_forward, 2 * around.slots, around.hidden)
        scratch_width = widest + TILE_ROWS + sum(taken) + len(taken)
        scratch = torch.zeros(self.batch * self._window * scratch_width)
        trial = torch.empty(shape.heads, shape.key_width, shape.value_width + 1)
        threads = torch.get_num_threads()
        sizes = (self.batch, config.width, shape.heads, shape.key_width, shape.value_width, config.feed_forward)
        return Network(
            *(*sizes, len(self._blocks), head.out_features),
            int(block.pre),
            int(block.feed_forward.activation is functional.gelu),
            MAPS[inner.options.feature_map],
            int(model.dtype == torch.bfloat16),
            *(threads if self.batch > FEW * threads else 1, widest, scratch_width),
            ctypes.addressof(self._layers),
            *self._norm(block.attention_norm if block.pre else None),
            *self._norm(None if block.pre else model.norm),
            around,
            self._describe_tables(),
            *(self._pointer(pack(head.weight)), self._pointer(head.bias.float()), self._pointer(scratch)),
            *(self._window, self._pointer(trial)),
        )

    def _describe_surroundings(self) -> Surroundings:
        surroundings, embedding = self.model.embedding.surroundings, self._embedding
        if surroundings is None:
            return Surroundings()
        layers = (surroundings.input, surroundings.output)
        return Surroundings(
            *(embedding.around.shape[1], surroundings.input.out_features, surroundings.levels, embedding.ring),
            *(embedding.around.data_ptr(), embedding.recent.data_ptr()),
            *(self._pointer(pack(layer.weight)) for layer in layers),
            *(self._pointer(layer.bias.float()) for layer in layers),
        )

    def _describe_tables(self) -> Tables:
        tables, embedding = self.model.embedding.tables, self._embedding
        if tables is None:
            return Tables()
        linear = tables.output
        return Tables(
            *(self.model.config.image.channels, embedding.levels, embedding.ring),
            *(embedding.together.data_ptr(), embedding.recent.data_ptr()),
            *(self._pointer(part.float()) for part in (tables.rows, linear.weight.T, linear.bias)),
        )

    def _norm(self, norm: nn.LayerNorm | None) -> _Norm:
        return (None, None) if norm is None else (self._pointer(norm.weight.float()), self._pointer(norm.bias.float()))

    def _pointer(self, tensor: Tensor) -> int:
        return self._keep(tensor).data_ptr()

    def _keep(self, tensor: Tensor) -> Tensor:
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1]


class StepwiseEngine(NativeEngine):
    """The same one value at a time, also for a single image: to see what looking ahead brings."""

    name = "stepwise"
    automatic = False
    window = 1


class _Embedding:
    """Tokens to vectors, with the last values in a ring: value number v stands in place v mod its length.

    It is longer than what a position reaches, by what a window looks ahead. `around` int32 [T, slots] says in which
    places stand the values that `Surroundings` looks at, `together` those of `NeighbourTables`, -1 for none.
    """

    def __init__(self, embedding: PixelEmbedding, state: EmbeddingState, batch: int, width: int, window: int) -> None:
        self._kernels = load_kernels()
        self._batch, self._width = batch, width
        self.levels, reach = embedding.levels, embedding.reach
        self.ring = reach + window - 1
        self.position = int(state.position)
        # Column c of the state is token position - reach + c, which holds the value before it.
        places = torch.arange(reach) + self.position - reach - 1
        self.recent = state.recent.new_zeros(batch, self.ring)
        self.recent[:, places % self.ring] = state.recent
        self.carried = self.recent[:, :reach]
        places = torch.where(embedding.sources < 0, -1, embedding.sources % self.ring).to(torch.int32)
        parts = places.tensor_split(embedding.bounds, dim=1)
        self.slots, self.around, self.together = (part.contiguous() for part in parts)
        table, place = embedding.values.detach().float(), embedding.places().detach().float()
        # Where value and position stand side by side, each is 0 in the other's columns.
        self.table = functional.pad(table, (0, width - table.shape[1])).contiguous()
        self.places = functional.pad(place, (width - place.shape[1], 0)).contiguous()
        self._classes = None if embedding.classes is None else embedding.classes.weight.detach().float()
        self.label = state.label

    def read(self, tokens_t: Tensor, x: Tensor) -> int:
        """x [B, D] becomes the vectors of the next token int64 [B], whose position is returned."""
        position, sources = self.position, self.slots.shape[1]
        if position == len(self.slots):
            raise ValueError(f"an image has {position} values, all of which are drawn")
        if position:
            self.recent[:, (position - 1) % self.ring] = tokens_t
        self._kernels.lintx_embed(
            *(self._batch, self._width, sources, self.ring, self.levels),
            self.slots.data_ptr() + position * sources * self.slots.element_size(),
            *(self.recent.data_ptr(), self.table.data_ptr()),
            self.places.data_ptr() + position * self._width * self.places.element_size(),
            x.data_ptr(),
        )
        if self._classes is not None:
            if position == 0:
                self.label = tokens_t.unsqueeze(1).clone()
            x += self._classes[self.label[:, 0]]
        self.position += 1
        return position

    def label_vector(self) -> Tensor | None:
        """What the class of a single image adds everywhere, [D]."""
        return None if self._classes is None else self._classes[int(self.label)]
