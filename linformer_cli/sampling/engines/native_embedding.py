"""The embedding of the `native` engine, with the recent values in a ring."""

import torch
from torch import Tensor
from torch.nn import functional

from linformer_cli.model.embedding import EmbeddingState, PixelEmbedding, fill_ring, ring_slots

from .native_layout import load_kernels


class NativeEmbedding:
    """Runs `PixelEmbedding` one token at a time, with tables in float32.

    The ring of recent values holds `reach` + `window` - 1 values. `slots`, `around` and `together`, int32 [T, ...], are
    the slots of the ring that a position, its `Surroundings` and its `NeighbourTables` read. A missing value has -1.
    """

    def __init__(self, embedding: PixelEmbedding, batch: int, width: int, window: int) -> None:
        self._kernels = load_kernels()
        self._batch, self._width = batch, width
        self.levels, reach = embedding.levels, embedding.reach
        self.ring = reach + window - 1
        self.recent = torch.zeros(batch, self.ring, dtype=torch.int16)
        self.carried = self.recent[:, :reach]
        slots = ring_slots(embedding.sources, self.ring).to(torch.int32)
        parts = slots.tensor_split(embedding.bounds, dim=1)
        self.slots, self.around, self.together = (part.contiguous() for part in parts)
        table, place = embedding.values.detach().float(), embedding.places().detach().float()
        # If value and position are concatenated, each of them is 0 in the columns of the other.
        self.table = functional.pad(table, (0, width - table.shape[1])).contiguous()
        self.places = functional.pad(place, (width - place.shape[1], 0)).contiguous()
        self._classes = None if embedding.classes is None else embedding.classes.weight.detach().float()

    def start(self, state: EmbeddingState) -> None:
        """Continue from `state`."""
        self.position, self.label = int(state.position), state.label
        self.recent.copy_(fill_ring(state, self.ring))  # kernels point at this tensor

    def read(self, tokens_t: Tensor, x: Tensor) -> int:
        """Write the vectors of the next token int64 [B] to x [B, D]; returns the token's position."""
        position, sources = self.position, self.slots.shape[1]
        if position == len(self.slots):
            raise ValueError(f"all {position} values of the image are drawn already")
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
        """The vector [D] that the class of a single image adds at every position."""
        return None if self._classes is None else self._classes[int(self.label)]
