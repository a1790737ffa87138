"""The shapes of a model's weights, and a model to load them into, without allocating or initialising them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from linformer_cli.config import ModelConfig
from .pixel_model import PixelModel


def expected_weights(build: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """The `state_dict` of the model that `build` returns, as tensors with shapes and types but no memory.

    Raises what `build` raises.
    """
    with torch.device("meta"), _WithoutWeights():
        return build().state_dict()


def build_skeleton(config: ModelConfig) -> PixelModel:
    """A model to fill with `load_state_dict(..., assign=True)`. Most of its parameters have no memory.

    Buffers computed from the configuration are real tensors. Raises `UsageError` for a configuration that fits no
    model.
    """
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
