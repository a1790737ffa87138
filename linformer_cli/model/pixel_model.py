"""The whole model, which predicts each value of an image from the values before it, in parallel or step by step."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from linformer_cli.attention.base import measure_state_bytes
from linformer_cli.attention.tensors import HOSTS, defer_checks, may_check
from linformer_cli.config import ModelConfig
from .blocks import Block, initialise_weights
from .channels import ChannelNetwork
from .dropout import Vectors, exact
from .embedding import EmbeddingState, PixelEmbedding
from .heads import MixtureHead, build_head
from .mixers import SOFTMAX, build_blocks


class PixelState(NamedTuple):
    """Recent values, position and class; one state per layer; for blocks over pixels, their last output [B, width]."""

    embedding: EmbeddingState
    layers: tuple[Any, ...]
    pixel: Tensor


class PixelModel(nn.Module):
    """p(x) = product over t of p(x_t | x_0 .. x_{t-1}) for the T values of an image, given its class if it has one.

    The tokens are a start token followed by values (see `shift_values`). The output at token i is the distribution of
    value i, as parameters of `head`. `attend` and `step` agree up to rounding; `lintx check` measures the difference.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.look: Any = None  # the `data.look.Look` of the training images, if known
        self.embedding = PixelEmbedding(config)
        self.blocks = nn.ModuleList(build_blocks(config))
        self.channels = ChannelNetwork(config) if config.steps_over_pixels else None
        self.norm = nn.LayerNorm(config.width)
        self.head = build_head(config)
        initialise_weights(self, self.typed_blocks)
        self.head.start()

    @property
    def typed_blocks(self) -> list[Block]:
        # A ModuleList has no type for its elements.
        return cast(list[Block], list(self.blocks))

    @property
    def device(self) -> torch.device:
        return self.head.projection.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.projection.weight.dtype

    def is_compiled(self, dtype: torch.dtype) -> bool:
        """Return whether any block's `attend` runs compiled kernels for inputs of `dtype`."""
        return any(block.is_compiled(self.device, dtype) for block in self.typed_blocks)

    def find_bound(self) -> str | None:
        """Say why sequences end after T values, or return None if they can go on with a state of constant size."""
        config = self.config
        if not self.embedding.last_values:
            return f"embedding '{config.embedding}' with context '{config.context}' depends on the position"
        if not all(block.unbounded for block in self.typed_blocks):
            return f"'{config.attention}' needs positions, or memory that grows with their number"
        return None

    def start_tokens(self, batch: int, labels: Tensor | None = None) -> Tensor:
        """Return the start token of every image, int64 [B], which is the token of the first step.

        It is the class in `labels` int64 [B], by default none if the class is optional, or else class 0. A model
        without classes ignores it. Raises `ValueError` for a class that the model does not have.
        """
        if labels is None:
            return torch.full((batch,), self.config.default_label, device=self.device)
        most = max(1, self.config.label_count) - 1
        if labels.shape != (batch,) or int(labels.min()) < 0 or int(labels.max()) > most:
            raise ValueError(f"labels must be {batch} classes from 0 to {most}, found {labels.tolist()}")
        return labels.to(self.device, torch.int64)

    def shift_values(self, values: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return tokens [B, T] for values int64 [B, T]: the start token (see `start_tokens`), then all but the last."""
        unclassed = torch.full_like(values[:, :1], self.config.default_label)
        return torch.cat([unclassed if labels is None else labels.unsqueeze(1), values[:, :-1]], dim=1)

    def take_turns(self, indices: Sequence[int]) -> Tensor:
        """Return labels int64 [B] (CPU) for images `indices`: classes in turn, or none if the class is optional."""
        turns = torch.tensor(indices, dtype=torch.int64, device="cpu") % max(1, self.config.required_classes)
        return turns + self.config.default_label

    def attend(self, tokens: Tensor, state: PixelState | None = None) -> tuple[Tensor, PixelState]:
        """Head parameters [B, T, P] at tokens int64 [B, T] that follow the tokens in `state`, and the new state.

        The result is differentiable, and `state` (None: the start) is not modified. Without gradients, it waits once.
        """
        if torch.is_grad_enabled() or self.device.type in HOSTS or not may_check(self.device):
            return self._attend(tokens, state)
        with defer_checks():
            found = self._attend(tokens, state)
        return found if bool(found[0].sum().isfinite()) else self._attend(tokens, state)

    def _attend(self, tokens: Tensor, state: PixelState | None) -> tuple[Tensor, PixelState]:
        before = self.embedding.init_state(len(tokens), tokens.device) if state is None else state.embedding
        embedded, embedding = self.embedding(tokens, before)
        vectors: Vectors = embedded
        layers: list[Any] = [None] * len(self.blocks) if state is None else list(state.layers)
        for index, block in enumerate(self.typed_blocks if embedded.shape[1] else []):
            vectors, layers[index] = block.attend(vectors, layers[index])
        x = exact(vectors)
        pixel = x[:, :0, 0] if state is None else state.pixel
        parameters, pixel = self._read_head(x, tokens, before, pixel)
        return parameters, PixelState(embedding, tuple(layers), pixel)

    def init_state(self, batch: int, capacity: int | None = None, device: torch.device | None = None) -> PixelState:
        """Return the state of `batch` images before their first token, with room for `capacity` positions or T."""
        device = device or self.device
        # How many steps of the blocks belong to the first `capacity` values.
        units = -(-(capacity or self.config.image.positions) // self.embedding.stride)
        layers = tuple(block.init_state(batch, units, device, self.dtype) for block in self.typed_blocks)
        pixel = torch.zeros(batch, 0 if self.channels is None else self.config.width, device=device, dtype=self.dtype)
        return PixelState(self.embedding.init_state(batch, device), layers, pixel)

    @torch.no_grad()
    def step(self, tokens_t: Tensor, state: PixelState) -> tuple[Tensor, PixelState]:
        """Head parameters [B, P] at the next token int64 [B], and the new state; may update `state` in place.

        With look-ahead on a device, there are n tokens [B, n], parameters [B n, P], and no new state.
        """
        tokens = tokens_t if tokens_t.dim() == 2 else tokens_t.unsqueeze(1)
        x, embedding = self.embedding(tokens, state.embedding)
        layers = list(state.layers)
        if x.shape[1]:
            x = x.flatten(0, 1)
            for index, block in enumerate(self.typed_blocks):
                x, layers[index] = block.step(x, layers[index])
            x = exact(x).unsqueeze(1)
        parameters, pixel = self._read_head(x, tokens, state.embedding, state.pixel)
        return parameters.squeeze(1), PixelState(embedding, tuple(layers), pixel)

    def _read_head(self, x: Tensor, tokens: Tensor, before: EmbeddingState, pixel: Tensor) -> tuple[Tensor, Tensor]:
        """Head parameters [B, T, P] at tokens int64 [B, T] after `before` and `pixel`, and the last pixel's vector."""
        if self.channels is None:
            return self.head(self.norm(x)), pixel
        x, predictions, pixel = self.channels(x, tokens, before, pixel)
        parameters = self.head(self.norm(x))
        if isinstance(self.head, MixtureHead):
            parameters = self.head.move_means(parameters, predictions)
        return parameters, pixel

    def nats(self, values: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return nats [B, T] of values int64 [B, T] given `labels` [B]. Raises `ValueError` if a class is needed."""
        if labels is None and self.config.required_classes:
            raise ValueError("a model with classes needs labels to compute a likelihood")
        parameters, _ = self.attend(self.shift_values(values, labels))
        return -self.head.log_likelihood(parameters, values)

    def state_bytes(self, batch: int, positions: int | None = None) -> int:
        """Return bytes of the state of `batch` images after `positions` positions (default: T)."""
        return measure_state_bytes(self.init_state(batch, positions, torch.device("meta")))

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def expected_weights(build: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """Return the `state_dict` of what `build` returns, with shapes and types but no memory. Raises what it raises."""
    with torch.device("meta"), _WithoutWeights():
        return build().state_dict()


def build_skeleton(config: ModelConfig) -> PixelModel:
    """Build a model to fill with `load_state_dict(..., assign=True)`: buffers have memory, most parameters not."""
    with _WithoutWeights():
        return PixelModel(config)


class _WithoutWeights(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return None  # initialising tensors without memory would import torch's compiler, which takes seconds
        if function is torch.empty and kwargs.get("device") is None:  # how most parameters are allocated
            kwargs = {**kwargs, "device": "meta"}
        return function(*args, **kwargs)


def build_softmax_twin(model: PixelModel) -> PixelModel:
    """Build a softmax model of the same size with random weights. Its speed does not depend on the weights."""
    config = model.config.model_copy(update={"attention": SOFTMAX, "attention_options": {}})
    return PixelModel(config).to(device=model.device, dtype=model.dtype).eval()
