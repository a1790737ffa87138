"""The GPU engine: step, draw and the look-up of what was drawn as one CUDA graph, replayed for every value.

Whatever a step needs stays on the device, the position and the random numbers too, so that the host never waits inside
an image. The state of `linear` is float32 and, where Triton is there, `FoldedState`: fused in one kernel a layer, which
writes the sums only every few steps. Without Triton the steps are torch's own, in the same graph.
"""

from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from linformer_cli.attention.base import state_tensors
from linformer_cli.attention.kernels import linear as kernels
from linformer_cli.attention.kernels.folding import build_folded_state
from linformer_cli.attention.linear import LinearAttention, LinearState
from linformer_cli.errors import LintxError
from linformer_cli.model.blocks import TransformerBlock
from linformer_cli.model.embedding import EmbeddingState, PixelEmbedding
from linformer_cli.model.pixel_model import PixelModel, PixelState
from linformer_cli.sampling.choose import Filters, UniformStreams

from .base import DAMAGED, Engine


class CudaEngine(Engine):
    """CUDA graphs for transformer blocks with `linear` attention, on a CUDA device.

    Weights and vectors are in the model's type, float32 or bfloat16; sums and the state are float32.
    """

    name = "cuda"
    tried = False

    def __init__(self, model: PixelModel, batch: int, state: PixelState | None = None) -> None:
        super().__init__(model, batch, state)
        state = model.init_state(batch) if state is None else state
        device, positions = model.device, model.config.image.positions
        # The one look at where the state stands; from here on the host counts by itself.
        self._position = int(state.embedding.position)
        self._embedding = _Embedding(model.embedding, state.embedding, self._position, model.dtype)
        self._blocks = cast(list[TransformerBlock], list(model.blocks))
        self._states = [self._own(block, layer) for block, layer in zip(self._blocks, state.layers, strict=True)]
        # What the graphs read and write: the same tensors at each replay.
        self._tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self._parameters = torch.zeros(batch, model.head.projection.out_features, dtype=model.dtype, device=device)
        self._uniforms = torch.zeros(positions, batch, dtype=torch.float64, device=device)
        self._values = torch.zeros(positions, batch, dtype=torch.uint8, device=device)
        self._drawn = torch.zeros(1, dtype=torch.int64, device=device)
        self._finite = torch.ones((), dtype=torch.bool, device=device)
        self._graphs = _Graphs(device)

    @classmethod
    def refusal(cls, model: PixelModel) -> str | None:
        if model.device.type != "cuda":
            return "it runs on CUDA devices only"
        if model.dtype not in (torch.float32, torch.bfloat16):
            return "it has no float64"
        for block in model.blocks:
            if not isinstance(block, TransformerBlock) or not isinstance(block.attention.inner, LinearAttention):
                return "it serves linear attention only"
            if block.attention.inner.options.feature_map not in kernels.MAPS:
                # Others look up numbers of the host's, which a graph must not.
                return f"it has the feature maps {' and '.join(kernels.MAPS)} only"
        return None

    @property
    def state_bytes(self) -> int:
        # Folded states share the position.
        own = (self._embedding.recent, self._embedding.position, self._embedding.label, *self._states)
        tensors = {id(part): part for part in state_tensors(own)}
        return sum(part.numel() * part.element_size() for part in tensors.values())

    @torch.no_grad()
    def step(self, tokens_t: Tensor) -> Tensor:
        self._count_step()
        self._tokens.copy_(tokens_t)
        self._graphs.run("step", self.take_step)
        return self._parameters

    @torch.no_grad()
    def draw_values(
        self,
        parameters: Tensor,
        streams: UniformStreams,
        filters: Filters,
        count: int,
        before_step: Callable[[], None] | None = None,
    ) -> Tensor:
        """As `Engine.draw_values`; whether all numbers were finite is looked at once, at the end."""
        self._uniforms[:count] = streams.take_many(count, self.model.device)
        self._drawn.zero_()
        self._finite.fill_(True)
        self._parameters.copy_(parameters)

        def advance() -> None:
            self.take_step()
            self.draw_next(filters)

        for drawn in range(count):
            if before_step is not None:
                before_step()
            if drawn:
                self._count_step()
                self._graphs.run(filters, advance)
            else:
                self.draw_next(filters)
        values = self._values[:count].T.clone(memory_format=torch.contiguous_format).cpu()
        if not bool(self._finite):
            raise LintxError(DAMAGED)
        return values

    def take_step(self) -> None:
        """From the tokens to the parameters, on the device alone."""
        x = self._embedding.read(self._tokens)
        for block, state in zip(self._blocks, self._states, strict=True):
            x, _ = block.step(x, state)  # updated in place
        self._parameters.copy_(self.model.head(self.model.norm(x)))

    def draw_next(self, filters: Filters) -> None:
        """From the parameters to the values and the next tokens, on the device alone."""
        self._finite.logical_and_(torch.isfinite(self._parameters).all())
        uniforms = self._uniforms.index_select(0, self._drawn).squeeze(0)
        # What is drawn from no number may be none, and is looked up before anyone knows.
        values = self.draw(self._parameters, uniforms, filters).clamp(0, self.model.head.levels - 1)
        self._values.index_copy_(0, self._drawn, values.to(torch.uint8).unsqueeze(0))
        self._tokens.copy_(values)
        self._drawn += 1

    def _count_step(self) -> None:
        if self._position == self.model.config.image.positions:
            raise ValueError(f"an image has {self._position} values, all of which are drawn")
        self._position += 1

    def _own(self, block: TransformerBlock, layer: LinearState) -> Any:
        """The state as the steps of this layer update it in place."""
        inner = cast(LinearAttention, block.attention.inner)
        s, z = (part.contiguous() for part in layer)
        shape, dtype = inner.shape, self.model.dtype
        if kernels.serves(inner.options.feature_map, s.device, dtype, shape.key_width, shape.value_width):
            return build_folded_state(s, z, self._embedding.position, dtype)
        return LinearState(s, z)


class _Graphs:
    """Pieces of work that read and write the same tensors each time: on a CUDA device graphs from the second time on.

    The first time a piece runs as it is, which compiles and loads all that must not be while a graph is recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._warm: set[Hashable] = set()
        # Graphs alone: who kept the work would keep the engine, and its memory, in a circle.
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def run(self, name: Hashable, work: Callable[[], None]) -> None:
        """`work`, the same for the same `name`."""
        if name in self._warm and self._device.type == "cuda":
            if name not in self._graphs:
                self._graphs[name] = self._record(work)
            self._graphs[name].replay()
        else:
            work()
            self._warm.add(name)

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """What `work` launches, without running it."""
        with torch.cuda.device(self._device):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
        return graph


class _Embedding:
    """Tokens to vectors with the position on the device: value number v stands in slot v mod reach of a ring."""

    def __init__(self, embedding: PixelEmbedding, state: EmbeddingState, start: int, dtype: torch.dtype) -> None:
        device, reach, sources = embedding.values.device, embedding.reach, embedding.sources
        # Column c of the state is token start - reach + c, which holds the value before it.
        places = torch.arange(reach, device=device) + start - reach - 1
        self.recent = torch.empty_like(state.recent).index_copy_(1, places % reach, state.recent)
        self.position = torch.tensor(start, device=device)
        self._levels, self._reach, self._table = embedding.levels, reach, embedding.values
        self._slots = torch.where(sources < 0, -1, sources % reach)
        self._bounds, self._channels = embedding.bounds, embedding.image.channels
        self._rows = torch.arange(embedding.slots, device=device) * (embedding.levels + 1)
        self._places = embedding.places().to(dtype)
        self._beside = embedding.sinusoids is not None
        self._surroundings, self._tables = embedding.surroundings, embedding.tables
        self._classes = embedding.classes
        self.label = state.label.clone()

    def read(self, tokens_t: Tensor) -> Tensor:
        """The vectors [B, D] of the next token int64 [B]."""
        # At position 0 it is the start token, whose slot is not read before value number reach - 1 takes it.
        position = self.position.unsqueeze(0)
        newest = (position - 1) % self._reach
        self.recent.index_copy_(1, newest, tokens_t.to(self.recent.dtype).unsqueeze(1))
        slots = self._slots.index_select(0, position).squeeze(0)
        values = self.recent.index_select(1, slots.clamp(min=0)).long()
        values = torch.where(slots < 0, self._levels, values)
        values, around, together = values.tensor_split(self._bounds, dim=1)
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
