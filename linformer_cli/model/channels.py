"""The network for the channels of a pixel, in a model whose blocks step over pixels."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.config import ModelConfig
from linformer_cli.native.program import Builder

from .blocks import FeedForward
from .dropout import add_dropped
from .embedding import EmbeddingState, find_own_channels, read_values, ring_slots
from .surroundings import scale_values


class ChannelNetwork(nn.Module):
    """Maps the vector of each pixel, and the pixel's earlier channels, to one vector for each of its channels.

    A channel's vector x is the sum of the pixel's vector, a vector of the channel, and for each earlier channel a
    vector looked up from its value and a linear function of its value. The output is x + feed_forward(norm(x)), with a
    hidden layer of twice the model's width.
    """

    sources: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        image, width = config.image, config.width
        self.levels, self.count = image.levels, image.channels
        self.register_buffer("sources", find_own_channels(image), persistent=False)
        # Random vectors would hide what the numbers say about a channel, until training has reduced them.
        self.values = nn.Parameter(torch.zeros((self.count - 1) * (self.levels + 1), width))
        self.channel = nn.Embedding(self.count, width)
        nn.init.normal_(self.channel.weight, std=0.5)
        self.numbers = nn.Linear(2 * (self.count - 1), width)
        self.norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(
            config.model_copy(update={"feed_forward": 2 * width, "feed_forward_kind": "dense"})
        )
        self.dropout = config.dropout

    def forward(self, pixels: Tensor, tokens: Tensor, state: EmbeddingState, pixel: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors [B, T, width] at tokens int64 [B, T] that follow `state`, and the last pixel's vector [B, width].

        `pixels` [B, pixels, width] are the vectors of the pixels that begin at these tokens. `pixel` [B, width] is the
        vector of the pixel before them, to which the first tokens may belong.
        """
        start, length = int(state.position), tokens.shape[1]
        if start % self.count:
            pixels = torch.cat([pixel.unsqueeze(1).to(pixels.dtype), pixels], dim=1)
        x = pixels.repeat_interleave(self.count, dim=1)[:, start % self.count :][:, :length]
        values = read_values(tokens, state, self.sources[start : start + length], self.levels)
        rows = values + torch.arange(self.count - 1, device=values.device) * (self.levels + 1)
        x = x + functional.embedding_bag(rows.flatten(0, 1), self.values, mode="sum").unflatten(0, x.shape[:2])
        x = x + self.numbers(scale_values(values, self.levels, self.numbers.weight.dtype))
        x = x + self.channel(torch.arange(start, start + length, device=x.device) % self.count)
        return add_dropped(x, self.feed_forward(self.norm(x)), self.dropout), pixels[:, -1]

    def emit(self, builder: Builder, recent: int, pixel: int) -> None:
        """Emit a step. `recent` is the ring of recent values, and `pixel` the state with the pixel's vector."""
        slots = builder.shared(ring_slots(self.sources, builder.buffers[recent].width).to(torch.int32))
        table = builder.shared(self.values)
        places = builder.shared(self.channel(torch.arange(len(self.sources), device=self.values.device) % self.count))
        buffers = (builder.x, recent, slots, table, places, -1, -1)
        builder.emit("embed", buffers, (builder.width, self.count - 1, self.levels, 0))
        builder.add(pixel)
        count = self.count - 1
        numbers = builder.scratch("numbers", 2 * count)
        builder.emit("look_around", (numbers, recent, slots), (count, self.levels))
        builder.add(builder.project(self.numbers, numbers, "branch"))
        builder.add_branch(self.norm, True, lambda x: self.feed_forward.emit(builder, x))
