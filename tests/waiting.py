"""Modes of torch: one checks where tensors are, one stands for CUDA graphs, and one counts kernels."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from linformer_cli.sampling.engines.cuda import Graphs


class OnlyOn(TorchDispatchMode):
    """Checks that every operation has all its tensors on `device`, except single numbers that it does not copy."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        found = operation(*arguments, **(named or {}))
        for part in tree_leaves((arguments, named, found)):
            if isinstance(part, Tensor) and part.device.type != self._device:
                is_number = part.dim() == 0 and part.device.type == "cpu"
                assert is_number and not copies(operation, found), f"{operation} on {part.device}"
        return found


def copies(operation: Any, found: Any) -> bool:
    """Whether an operation copies a tensor to a device."""
    return "copy" in str(operation) and isinstance(found, Tensor) and found.device.type != "cpu"


class Recorder(TorchDispatchMode):
    """Stands for a CUDA graph: `replay` repeats the recorded operations on the same tensors, and no Python code.

    Here, unlike on a GPU, recorded operations also run. The first replay therefore does nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, ...]] = []
        self._has_run = True

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        found = operation(*arguments, **(named or {}))
        self._calls.append((operation, arguments, named or {}, found))
        return found

    @classmethod
    def replace_graphs(cls, monkeypatch: Any) -> "list[Recorder]":
        """The engine `cuda` records into these recorders, one for each graph."""
        made: list[Recorder] = []

        def record(graphs: Graphs, work: Any) -> Recorder:
            made.append(cls())
            with made[-1]:
                work()
            return made[-1]

        monkeypatch.setattr(Graphs, "record", record)
        return made

    @staticmethod
    def watch(module: ModuleType) -> Any:
        """`module`, whose functions launch kernels, which the recorder that is active records."""

        def watch(name: str) -> Any:
            def launch(*arguments: Any) -> Any:
                recorder = _get_current_dispatch_mode()
                with _disable_current_modes():  # Triton's interpreter uses torch
                    found = getattr(module, name)(*arguments)
                if isinstance(recorder, Recorder):
                    recorder._calls.append((launch, arguments, {}, found))
                return found

            return launch

        return type("Watched", (), {"__getattr__": lambda _, name: watch(name)})()

    @torch.no_grad()
    def replay(self) -> None:
        for operation, arguments, named, found in [] if self._has_run else self._calls:
            for old, new in zip(tree_leaves(found), tree_leaves(operation(*arguments, **named)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        self._has_run = False


class KernelCounter(TorchDispatchMode):
    """Counts the kernels that a GPU would run: operations on more than single numbers that are not views, and calls of
    the modules in `watch`."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        found = operation(*arguments, **(named or {}))
        sized = any(isinstance(part, Tensor) and part.dim() for part in tree_leaves((arguments, named, found)))
        self.kernels += (
            sized and not operation.is_view and not any(x in str(operation) for x in ("empty", "detach", "prim."))
        )
        return found

    def watch(self, module: ModuleType) -> Any:
        """`module`, each of whose functions launches one kernel."""

        def watch(name: str) -> Any:
            def launch(*arguments: Any) -> Any:
                self.kernels += 1
                with _disable_current_modes():  # Triton's interpreter uses torch
                    return getattr(module, name)(*arguments)

            return launch

        return type("Watched", (), {"__getattr__": lambda _, name: watch(name)})()
