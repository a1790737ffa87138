"""A model's weights and sizes in the layout of the `native` engine's kernels."""

import ctypes
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.attention.linear import LinearAttention, LinearState
from linformer_cli.model.blocks import TransformerBlock
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.native.constants import COMPILED_MAPS, TILE_ROWS

from .native_embedding import NativeEmbedding
from .native_layout import Layer, Network, Surroundings, Tables, pack

# Up to this many images per thread, all threads share every product: a thread with its own few images would read all
# weights for little work. With more images, each thread takes its share of them through all layers.
FEW = 2

# The pointers to gain and shift, which are None if there is no norm.
_Norm = tuple[int | None, int | None]


class NativeNetwork:
    """The `Network` of network.h for `batch` images or up to `window` positions of one image, with its memory."""

    def __init__(self, model: PixelModel, embedding: NativeEmbedding, batch: int, window: int) -> None:
        self._model, self._embedding, self._batch, self._window = model, embedding, batch, window
        self._blocks = cast(list[TransformerBlock], list(model.blocks))
        self._kept: list[Tensor] = []  # keeps the memory behind the pointers alive
        self._layers = (Layer * len(self._blocks))(*map(self._describe_layer, range(len(self._blocks))))
        self._network = self._describe_network()
        self.states: list[LinearState] = []

    @property
    def address(self) -> int:
        assert self.states, "an engine must be started before it steps"
        return ctypes.addressof(self._network)

    def use_states(self, states: list[LinearState]) -> None:
        """From now on, read and update these states: float32 s [B, H, C, V] and z [B, H, C] of each layer."""
        self.states = [LinearState(*(part.contiguous() for part in state)) for state in states]
        for layer, state in zip(self._layers, self.states, strict=False):  # without states, only drop the old states
            layer.s, layer.z = (part.data_ptr() for part in state)

    def _describe_layer(self, index: int) -> Layer:
        """Block number `index` as a layer. Only this method and `_describe_network` decide where each norm goes."""
        block, following = self._blocks[index], self._blocks[index + 1 : index + 2]
        if block.pre:
            mid, end = block.feed_forward_norm, following[0].attention_norm if following else self._model.norm
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
            *(None, None),  # see `use_states`
            self._pointer(torch.empty(shape.heads, self._window, shape.key_width + shape.value_width)),
        )

    def _describe_network(self) -> Network:
        model, config, block = self._model, self._model.config, self._blocks[0]
        inner = cast(LinearAttention, block.attention.inner)
        shape, head = inner.shape, model.head.projection
        mixed = shape.heads * shape.value_width
        around = self._describe_surroundings()
        projected = mixed + 2 * shape.heads * shape.key_width
        widest = max(projected, config.feed_forward, config.width, head.out_features, around.hidden)
        # The scratch memory holds the outputs of products and their inputs, each rounded up.
        inputs = (config.width, mixed, config.feed_forward, 2 * around.slots, around.hidden)
        scratch_width = widest + TILE_ROWS + sum(inputs) + len(inputs)
        scratch = torch.zeros(self._batch * self._window * scratch_width)
        trial = torch.empty(shape.heads, shape.key_width, shape.value_width + 1)
        threads = torch.get_num_threads()
        sizes = (self._batch, config.width, shape.heads, shape.key_width, shape.value_width, config.feed_forward)
        return Network(
            *(*sizes, len(self._blocks), head.out_features),
            int(block.pre),
            int(block.feed_forward.activation is functional.gelu),
            COMPILED_MAPS[inner.options.feature_map],
            int(model.dtype == torch.bfloat16),
            *(threads if self._batch > FEW * threads else 1, widest, scratch_width),
            ctypes.addressof(self._layers),
            *self._norm(block.attention_norm if block.pre else None),
            *self._norm(None if block.pre else model.norm),
            around,
            self._describe_tables(),
            *(self._pointer(pack(head.weight)), self._pointer(head.bias.float()), self._pointer(scratch)),
            *(self._window, self._pointer(trial)),
        )

    def _describe_surroundings(self) -> Surroundings:
        surroundings, embedding = self._model.embedding.surroundings, self._embedding
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
        tables, embedding = self._model.embedding.tables, self._embedding
        if tables is None:
            return Tables()
        linear = tables.output
        return Tables(
            *(self._model.config.image.channels, embedding.levels, embedding.ring),
            *(embedding.together.data_ptr(), embedding.recent.data_ptr()),
            *(self._pointer(part.float()) for part in (tables.rows, linear.weight.T, linear.bias)),
        )

    def _norm(self, norm: nn.LayerNorm | None) -> _Norm:
        return (None, None) if norm is None else (self._pointer(norm.weight.float()), self._pointer(norm.bias.float()))

    def _pointer(self, tensor: Tensor) -> int:
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()
