"""The network for the channels of a pixel, in a model whose blocks step over pixels."""

import torch
from torch import Tensor, nn

from linformer_cli.config import ModelConfig
from linformer_cli.native.program import NO_BUFFER, Builder
from .blocks import FeedForward
from .dropout import add_dropped
from .embedding import LEFT, UP, EmbeddingState, count_from, find_pixels, read_values, ring_slots, sum_tables, take_rows
from .neighbours import Differences


class ChannelNetwork(nn.Module):
    """Maps the vector of each pixel, and the pixel's earlier channels, to one vector for each of its channels.

    A channel's vector x is the sum of the pixel's vector, a vector of the channel, a vector looked up from the value of
    each earlier channel, and a linear function of the differences of the earlier channels and of the pixels to the left
    and above. The output is x + feed_forward(norm(x)), with a hidden layer of twice the model's width.
    """

    sources: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        image, width = config.image, config.width
        self.levels, self.count = image.levels, image.channels
        self.differences = Differences(image.levels, self.count, self.count - 1, 0, 1)
        self.register_buffer("sources", find_pixels(image, (LEFT, UP)), persistent=False)
        # Random vectors would hide what the numbers say about a channel, until training has reduced them.
        self.values = nn.Parameter(torch.zeros((self.count - 1) * (self.levels + 1), width))
        self.channel = nn.Embedding(self.count, width)
        nn.init.normal_(self.channel.weight, std=0.5)
        self.numbers = nn.Linear(self.sources.shape[1] + self.count, width)
        self.norm = nn.LayerNorm(width)
        changes = {"feed_forward": 2 * width, "feed_forward_kind": "dense"}
        self.feed_forward = FeedForward(config.model_copy(update=changes))
        self.dropout = config.dropout

    def forward(
        self, pixels: Tensor, tokens: Tensor, state: EmbeddingState, pixel: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return vectors [B, T, width] and predictions [B, T] in [-1, 1] at tokens int64 [B, T] that follow `state`.

        The third result is the vector [B, width] of the last pixel. `pixels` [B, pixels, width] begin at these tokens,
        and the first tokens may belong to `pixel` [B, width] before them.
        """
        start, length = int(state.position), tokens.shape[1]
        if start % self.count:
            pixels = torch.cat([pixel.unsqueeze(1).to(pixels.dtype), pixels], dim=1)
        x = pixels.repeat_interleave(self.count, dim=1)[:, start % self.count :][:, :length]
        values = read_values(tokens, state, take_rows(self.sources, state.tokens, length), self.levels)
        x = x + sum_tables(values[..., : self.count - 1], self.values, self.levels)
        dtype = self.numbers.weight.dtype
        x = x + self.numbers(self.differences.numbers(values, dtype))
        channels = count_from(state.tokens, length, x.device) % self.count
        x = x + self.channel(channels)
        # bfloat16 cannot hold every prediction.
        predictions = self.differences.predict(values, channels, torch.promote_types(dtype, torch.float32))
        return add_dropped(x, self.feed_forward(self.norm(x)), self.dropout), predictions, pixels[:, -1]

    def emit(self, builder: Builder, recent: int, pixel: int) -> int:
        """Emit a step without predictions, from the ring `recent` and the state `pixel`; returns the slots' buffer."""
        count = self.count - 1
        slots = ring_slots(self.sources, builder.buffers[recent].width).to(torch.int32)
        every, own = builder.shared(slots), builder.shared(slots[:, :count])
        table = builder.shared(self.values)
        places = builder.shared(self.channel(torch.arange(len(self.sources), device=self.values.device) % self.count))
        reader = {"ring": recent, "slots": own, "table": table, "places": places}
        absent = {"label": NO_BUFFER, "classes": NO_BUFFER}
        sizes = {"D": builder.width, "sources": count, "levels": self.levels, "period": 0}
        builder.emit("embed", output=builder.x, **reader, **absent, **sizes)
        builder.add(pixel)
        numbers = builder.scratch("numbers", self.numbers.in_features)
        sizes = self.differences.arguments(slots.shape[1])
        builder.emit("take_differences", output=numbers, ring=recent, slots=every, **sizes)
        # The numbers are differences, which need finer steps than int8 has.
        builder.add(builder.project(self.numbers, numbers, "branch", sensitive=True))
        builder.add_branch(self.norm, True, lambda x: self.feed_forward.emit(builder, x))
        return every

    def emit_predictions(self, builder: Builder, recent: int, slots: int, parameters: int, mixtures: int) -> None:
        """Emit the addition of the prediction to the means in the buffer `parameters` of a mixture head."""
        sizes = self.differences.arguments(self.sources.shape[1])
        builder.emit("add_predictions", output=parameters, ring=recent, slots=slots, **sizes, means=mixtures)
