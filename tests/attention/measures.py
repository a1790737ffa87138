"""Counts operations, bytes read and written, sizes, and bytes saved for training, without timing anything."""

import functools
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


@functools.cache
def _counted(func: Any) -> tuple[bool, bool, bool]:
    """Whether an operation is a view, whether it handles only the selected rows of its first input, and in place."""
    name = func.name()
    return func.is_view or "view" in name, any(word in name for word in _PICKING), name.endswith("_")


_PICKING = ("index", "gather", "scatter", "embedding")


class CountWork(TorchDispatchMode):
    """Counts the bytes that operations read and write. A view counts as 0; indexing counts only the selected rows."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        is_view, is_picking, in_place = _counted(func)
        if not is_view:
            self.count(args[1:] if is_picking else args)
            self.count((kwargs or {}).values())
            self.count(() if in_place else (results,))
        return results

    def count(self, values: Any) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self.bytes += value.numel() * value.element_size()
            elif isinstance(value, (tuple, list)):
                self.count(value)


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
