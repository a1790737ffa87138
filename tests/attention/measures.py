"""Counts operations, bytes read and written, sizes, and bytes saved for training, without timing anything."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountOperations(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class LargestTensor(TorchDispatchMode):
    """Finds the number of elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.numel = max(self.numel, *(x.numel() for x in tree_leaves(results) if isinstance(x, Tensor)), 0)
        return results


# These operations read or write only the selected rows of their first input.
_PICKING = ("index", "gather", "scatter", "embedding")


class CountWork(TorchDispatchMode):
    """Counts the bytes that operations read and write. A view counts as 0; indexing counts only the selected rows."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if not func.is_view and "view" not in func.name():
            inputs = args[1:] if any(word in func.name() for word in _PICKING) else args
            written = () if func.name().endswith("_") else (results,)
            for part in (*inputs, *(kwargs or {}).values(), *written):
                tensors = part if isinstance(part, list | tuple) else (part,)
                self.bytes += sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))
        return results


def measure_saved_bytes(run: Callable[..., Any], *arguments: Any) -> int:
    """Return the bytes that autograd saves for the backward pass of `run(*arguments)`; each storage counts once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = run(*arguments)
    # The results stay alive until here, so no address is reused.
    del results
    return sum(storages.values())
