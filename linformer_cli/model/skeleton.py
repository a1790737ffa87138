"""Builds a model whose weights will be loaded, without allocating or initialising them."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from linformer_cli.config import ModelConfig

from .pixel_model import PixelModel


def build_skeleton(config: ModelConfig) -> PixelModel:
    """A model whose parameters have shapes but no memory. Buffers computed from the configuration are real tensors.

    Fill it with `load_state_dict(..., assign=True)`. Raises `UsageError` for a configuration that fits no model.
    """
    with _Skeleton():
        return PixelModel(config)


class _Skeleton(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return None  # initialising tensors without memory would import torch's compiler, which takes seconds
        if function is torch.empty and kwargs.get("device") is None:  # how parameters are allocated
            kwargs = {**kwargs, "device": "meta"}
        return function(*args, **kwargs)
