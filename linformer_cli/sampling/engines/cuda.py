"""The GPU engine. For every value, it replays one CUDA graph that steps the model, draws the value and embeds it.

Everything that a step needs stays on the device, including the position and the random numbers, so the host does not
wait inside an image. The state of `linear` is float32. With Triton, the state is a `FoldedState`, and each layer has
one fused kernel that writes the sums only every few steps. `softmax` has a cache with room for the whole image, and
one kernel per layer, too. Without Triton, the graph contains torch's own operations.
"""

from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from linformer_cli.attention.base import fork_into, state_tensors
from linformer_cli.attention.kernels.registry import FOLDED_STEP, find_kernel
from linformer_cli.attention.linear import LinearAttention, LinearState
from linformer_cli.attention.parts.caches import KeyValueCache, step_fixed_cache
from linformer_cli.attention.parts.folded_sums import FoldedState, build_folded_state, refill, step_folded
from linformer_cli.attention.softmax import SoftmaxAttention
from linformer_cli.errors import LintxError
from linformer_cli.model.attention_layer import AttentionLayer
from linformer_cli.model.blocks import TransformerBlock
from linformer_cli.model.dropout import exact
from linformer_cli.model.embedding import EmbeddingState, PixelEmbedding, fill_ring, ring_slots
from linformer_cli.model.pixel_model import PixelModel, PixelState
from linformer_cli.native.constants import COMPILED_MAPS
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.system.signals import Check, never_stop

from .base import DAMAGED, Engine

# The state of a layer: of `linear` with and without Triton, and of `softmax`.
_LayerState = FoldedState | LinearState | KeyValueCache


class CudaEngine(Engine):
    """CUDA graphs for transformer blocks with `linear` or `softmax` attention, on a CUDA device.

    Weights, vectors and caches are in the model's type, float32 or bfloat16; sums are float32.
    """

    name = "cuda"

    def prepare(self, look_ahead: bool) -> None:
        model, batch = self.model, self.batch
        device, positions = model.device, model.config.image.positions
        self._position = 0
        self._embedding = _Embedding(model.embedding, batch, model.dtype)
        self._blocks = cast(list[TransformerBlock], list(model.blocks))
        # Each replay of a graph reads and writes the same tensors, including the states.
        self.states = [self._own(*pair) for pair in zip(self._blocks, model.init_state(batch).layers, strict=True)]
        self._tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self._parameters = torch.zeros(batch, model.head.projection.out_features, dtype=model.dtype, device=device)
        self._uniforms = torch.zeros(positions, batch, dtype=torch.float64, device=device)
        self._values = torch.zeros(positions, batch, dtype=torch.uint8, device=device)
        self._drawn = torch.zeros(1, dtype=torch.int64, device=device)
        self._finite = torch.ones((), dtype=torch.bool, device=device)
        self._graphs = Graphs(device)

    @classmethod
    def refusal(cls, model: PixelModel, products: torch.dtype | None = None) -> str | None:
        if model.device.type != "cuda" or torch.version.cuda is None:  # AMD's devices are called cuda, too
            return "it runs on CUDA devices only"
        if model.dtype not in (torch.float32, torch.bfloat16):
            return "it does not support float64"
        if model.channels is not None:
            return "it supports blocks that step over values only"
        for block in model.blocks:
            layer = block.attention if isinstance(block, TransformerBlock) else None
            inner = None if layer is None else layer.inner
            if layer is None or not isinstance(inner, LinearAttention | SoftmaxAttention):
                return "it supports linear attention and softmax only"
            if model.config.embedding == "none":
                return "it supports embeddings with positions only"
            if layer.has_parts:
                return "it supports attention layers without optional parts only"
            if isinstance(inner, LinearAttention) and inner.options.feature_map not in COMPILED_MAPS:
                # Other maps read numbers from the host, and a graph cannot do that.
                return f"it supports the feature maps {' and '.join(COMPILED_MAPS)} only"
        return cls.refuse_products(model, products)

    def start(self, state: PixelState | None = None) -> None:
        state = self.model.init_state(1) if state is None else state  # copied to every image below
        # From here on the host counts the steps itself, because reading the position would wait for the device.
        self._position = int(state.embedding.position)
        self._embedding.start(state.embedding)
        for own, layer in zip(self.states, state.layers, strict=True):
            if isinstance(own, FoldedState):
                refill(own, *layer)
            elif isinstance(own, KeyValueCache):
                for part, new in ((own.keys, layer.keys), (own.values, layer.values)):
                    fork_into(part[:, :, : self._position], new[:, :, : self._position])
            else:
                for part, new in zip(own, layer, strict=True):
                    fork_into(part, new)

    @property
    def state_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the state. Each is listed once, although folded states share the position."""
        own = (self._embedding.recent, self._embedding.position, self._embedding.label, *self.states)
        return list({id(part): part for part in state_tensors(own)}.values())

    def fork(self, ancestors: Tensor) -> None:
        images = functional.pad(ancestors, (0, self.batch - len(ancestors))).to(self.model.device)
        for part in self.tensors():
            if part.dim():  # all images share the position
                part.copy_(part.index_select(0, images))

    @torch.no_grad()
    def step(self, tokens_t: Tensor) -> Tensor:
        self._count_step()
        self._tokens[: len(tokens_t)] = tokens_t
        self._graphs.run("step", self.take_step)
        return self._parameters[: len(tokens_t)]

    @torch.no_grad()
    def draw_values(
        self,
        parameters: Tensor,
        streams: UniformStreams,
        filters: Filters,
        count: int,
        before_step: Check = never_stop,
    ) -> Tensor:
        """Do what `Engine.draw_values` does. NaN and infinity are reported only at the end."""
        images = self.batch // filters.rows_per_image
        self._uniforms[:count, :images] = streams.take_many(count, self.model.device)
        self._drawn.zero_()
        self._finite.fill_(True)
        self._parameters.copy_(parameters)

        def advance() -> None:
            self.take_step()
            self.draw_next(filters)

        for drawn in range(count):
            before_step()
            if drawn:
                self._count_step()
                self._graphs.run(filters, advance)
            else:
                self.draw_next(filters)
        values = self._values[:count, :images].T.clone(memory_format=torch.contiguous_format).cpu()
        if not bool(self._finite):
            raise LintxError(DAMAGED)
        return values

    def take_step(self) -> None:
        """Compute the parameters from the tokens, on the device only."""
        x = self._embedding.read(self._tokens)
        for block, state in zip(self._blocks, self.states, strict=True):
            x = _step_block(block, x, state)
        self._parameters.copy_(self.model.head(self.model.norm(x)))

    def draw_next(self, filters: Filters) -> None:
        """Draw values from the parameters, on the device only. The values are the next tokens."""
        self._finite.logical_and_(torch.isfinite(self._parameters).all())
        images = self.batch // filters.rows_per_image
        uniforms = self._uniforms[:, :images].index_select(0, self._drawn).squeeze(0)
        # A draw from NaN may give any number. It is clamped, because it is used as an index before NaN is reported.
        values = self.draw(self._parameters, uniforms, filters).clamp(0, self.model.head.levels - 1)
        self._values[:, :images].index_copy_(0, self._drawn, values.to(torch.uint8).unsqueeze(0))
        self._tokens.copy_(values.repeat(filters.rows_per_image))
        self._drawn += 1

    def _count_step(self) -> None:
        if self._position == self.model.config.image.positions:
            raise ValueError(f"all {self._position} values of the image have already been drawn")
        self._position += 1

    def _own(self, block: TransformerBlock, layer: LinearState | KeyValueCache) -> _LayerState:
        """Return the state that the steps of this layer update in place."""
        if isinstance(layer, KeyValueCache):
            return layer._replace(position=self._embedding.position)  # counts a position before the blocks see it
        inner = cast(LinearAttention, block.attention.inner)
        s, z = (part.contiguous() for part in layer)
        shape, dtype = inner.shape, self.model.dtype
        widths = shape.key_width, shape.value_width
        if find_kernel(FOLDED_STEP, s.device, dtype, widths, inner.options.feature_map):
            return build_folded_state(s, z, self._embedding.position, dtype)
        return LinearState(s, z)


def _step_block(block: TransformerBlock, x_t: Tensor, state: _LayerState) -> Tensor:
    """Return the result of `block.step`, without waiting for the device. Updates `state` in place."""
    if isinstance(state, LinearState):
        return block.step(x_t, state)[0]
    layer = cast(AttentionLayer, block.attention)

    def attention(x_t: Tensor) -> tuple[Tensor, Any]:
        inputs, _ = layer.project(x_t)
        q_t, k_t, v_t = inputs.q, inputs.k, inputs.v
        if isinstance(state, KeyValueCache):
            y_t = step_fixed_cache(q_t, k_t, v_t, state)
        else:
            y_t = step_folded(q_t, k_t, v_t, state, cast(LinearAttention, layer.inner).options.feature_map)
        return layer.finish(y_t, inputs.gate), state

    return exact(block.add_branches(x_t, attention)[0])


class Graphs:
    """Pieces of work that always read and write the same tensors. On a CUDA device, later runs replay a graph.

    The first run of a piece is an ordinary run. It compiles and loads everything, because neither must happen while a
    graph is recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._warm: set[Hashable] = set()
        # This holds only the graphs. A reference to the work would be cyclic and keep the engine and its memory alive.
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def run(self, name: Hashable, work: Callable[[], None]) -> None:
        """Run `work`, which must be the same for the same `name`."""
        if name in self._warm and self._device.type == "cuda":
            if name not in self._graphs:
                self._graphs[name] = self.record(work)
            self._graphs[name].replay()
        else:
            work()
            self._warm.add(name)

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record the kernels that `work` launches, without running them."""
        with torch.cuda.device(self._device):
            graph = torch.cuda.CUDAGraph()
            # torch's default stream for graphs belongs to the first device that recorded one.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(self._device)):
                work()
        return graph


class _Embedding:
    """Runs `PixelEmbedding` one token at a time, with the position on the device and the recent values in a ring."""

    def __init__(self, embedding: PixelEmbedding, batch: int, dtype: torch.dtype) -> None:
        device, reach = embedding.sources.device, embedding.reach
        self.recent, position, self.label = embedding.init_state(batch, device)
        self.position = position.to(device)
        self._levels, self._reach, self._table = embedding.levels, reach, embedding.values
        self._slots = ring_slots(embedding.sources, reach)
        self._bounds, self._channels = embedding.bounds, embedding.grid.channels
        self._value_width = embedding.value_width
        self._rows = torch.arange(embedding.slots, device=device) * (embedding.levels + 1)
        places = embedding.places()
        assert places is not None, "`refusal` refuses models without positions"
        self._places = places.to(dtype)
        self._beside = embedding.sinusoids is not None
        self._surroundings, self._tables = embedding.surroundings, embedding.tables
        self._classes = embedding.classes

    def start(self, state: EmbeddingState) -> None:
        """Continue from `state`, using the same tensors as before."""
        fork_into(self.recent, fill_ring(state, self._reach))
        self.position.copy_(state.position)
        fork_into(self.label, state.label)

    def read(self, tokens_t: Tensor) -> Tensor:
        """Return the vectors [B, D] of the next token int64 [B]."""
        # At position 0 this writes the start token. Value number reach - 1 overwrites it before its slot is read.
        position = self.position.unsqueeze(0)
        newest = (position - 1) % self._reach
        self.recent.index_copy_(1, newest, tokens_t.to(self.recent.dtype).unsqueeze(1))
        slots = self._slots.index_select(0, position).squeeze(0)
        values = self.recent.index_select(1, slots.clamp(min=0)).long()
        values = torch.where(slots < 0, self._levels, values)
        values, around, together = values.tensor_split(self._bounds, dim=1)
        if self._table is None:
            x = self._places.new_zeros(len(tokens_t), self._value_width)
        else:
            x = functional.embedding_bag(values + self._rows, self._table, mode="sum")
        place = self._places.index_select(0, position)
        x = torch.cat([x, place.expand(len(x), -1)], dim=-1) if self._beside else x + place
        if self._surroundings is not None:
            x = x + self._surroundings(around)
        if self._tables is not None:
            x = x + self._tables(together, position % self._channels)
        if self._classes is not None:
            self.label.copy_(torch.where(position == 0, tokens_t.unsqueeze(1), self.label))
            x = x + self._classes(self.label.squeeze(1))
        self.position += 1
        return x
