"""The GPU engine. For every value, it replays a CUDA graph that steps the model, draws the value and embeds it.

The graph is recorded from the model's own step. Everything that the step changes stays on the device, including the
position and the random numbers, so the host does not wait inside an image. Single numbers of a state decide what a step
does, such as how much of a cache it reads. The host knows them, and there is one graph for each set of these numbers:
one for all positions with running sums and with rows whose numbers are on the device, one for every `_ROOM` positions
where a step reads a cache whole, and `period` graphs with chunks. A mechanism from outside that counts on the host has
one for each. With Triton, the state of `linear` is a `FoldedState`, and each layer has one fused kernel that writes the
sums only every few steps. `softmax` has one kernel per layer, too.
"""

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from linformer_cli.attention.base import (
    Attention,
    Shared,
    SumAttention,
    fork_into,
    map_states,
    select_images,
    state_tensors,
)
from linformer_cli.attention.kernels.registry import STEP_SUMS, fuse_steps
from linformer_cli.attention.parts.caches import FixedCache
from linformer_cli.attention.parts.folded_sums import FoldedState, refill
from linformer_cli.attention.tensors import host_number
from linformer_cli.errors import LintxError
from linformer_cli.model.attention_layer import LayerState
from linformer_cli.model.blocks import Block, InnerBlock
from linformer_cli.model.heads import MixtureHead
from linformer_cli.model.pixel_model import PixelModel, PixelState
from linformer_cli.native.gpu import triton_refusal
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.system.signals import Check, never_stop
from .base import DAMAGED, Engine

_log = logging.getLogger(__name__)

# An engine keeps at most this many graphs, since each takes memory. Other steps run as they are.
_MOST_GRAPHS = 1024
_ROOM = 128  # a cache that is read whole is read up to a multiple of this number of rows


class CudaEngine(Engine):
    """CUDA graphs of the model's own step, in its type: float32 or bfloat16. Sums are float32."""

    name = "cuda"

    def prepare(self, look_ahead: bool) -> None:
        model, batch = self.model, self.batch
        device, positions = model.device, model.config.image.positions
        self._position = 0
        self._place = torch.zeros((), dtype=torch.int64, device=device)
        # The number of positions of the blocks, which may be whole pixels.
        self._unit = self._place if model.channels is None else torch.zeros_like(self._place)
        self._room = host_number(positions)
        # Each replay of a graph reads and writes the same tensors, including the states.
        self._state = self._fix(model.init_state(batch))
        # The numbers of the state that the host knows, and after how many positions they decide the same again.
        self._numbers: tuple[int, ...] = ()
        layers = zip(model.typed_blocks, self._state.layers, strict=True)
        self._periods = [model.embedding.stride, *(period for pair in layers for period in self._list_periods(*pair))]
        parts = [part for part in state_tensors(self._state) if self._is_number(part)]
        self._rooms = {index for index, part in enumerate(parts) if part is self._room}
        self._tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        # A network for channels adds its predictions in float32.
        dtype = torch.float32 if model.channels is not None and isinstance(model.head, MixtureHead) else model.dtype
        self._parameters = torch.zeros(batch, model.head.projection.out_features, dtype=dtype, device=device)
        self._uniforms = torch.zeros(positions, batch, dtype=torch.float64, device=device)
        self._values = torch.zeros(positions, batch, dtype=torch.uint8, device=device)
        self._drawn = torch.zeros(1, dtype=torch.int64, device=device)
        self._finite = torch.ones((), dtype=torch.bool, device=device)
        self._graphs = Graphs(device)
        # The numbers after each recorded step.
        self._after: dict[Hashable, tuple[int, ...]] = {}

    @classmethod
    def refusal(cls, model: PixelModel, products: torch.dtype | None = None) -> str | None:
        if model.device.type != "cuda" or torch.version.cuda is None:  # AMD's devices are called cuda, too
            return "it runs on CUDA devices only"
        if model.dtype not in (torch.float32, torch.bfloat16):
            return "it does not support float64"
        return cls.refuse_products(model, products)

    @classmethod
    def doubt(cls, model: PixelModel, forks: bool) -> str | None:
        if forks:
            return "its copies of states have not run on a GPU yet; --engine cuda uses them"
        config = model.config
        tried = config.attention in ("linear", "softmax") and config.context in ("previous", "neighbours", "wide")
        tried &= config.embedding != "none" and config.feed_forward_kind == "dense" and not config.image.palette
        parts = (config.short_convolution, config.normalise_keys, config.norm_heads, config.output_gate)
        # Only the kernels for this width and this map have run, and without them, steps are plain torch.
        tried &= config.head_width == 32 and config.attention_options.get("feature_map", "elu") == "elu"
        if tried and not any(parts) and triton_refusal(model.device) is None:
            return None
        return "its graphs of such a model have not run on a GPU yet; --engine cuda uses them"

    def start(self, state: PixelState | None = None) -> None:
        state = self.model.init_state(1) if state is None else state  # copied to every image below
        # From here on the host counts the steps itself, because reading the place would wait for the device.
        self._position = int(state.embedding.position)
        self._place.fill_(self._position)
        self._set_numbers(self._refill(self._state, state))

    @property
    def states(self) -> tuple[Any, ...]:
        return self._state.layers

    @property
    def state_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the state on the device. Each is listed once, although many states share the place."""
        parts = {id(part): part for part in state_tensors(self._state) if not self._is_number(part)}
        return list(parts.values())

    def fork(self, ancestors: Tensor) -> None:
        images = functional.pad(ancestors, (0, self.batch - len(ancestors))).to(self.model.device)
        self._keep(select_images(self._state, images))

    @torch.no_grad()
    def step(self, tokens_t: Tensor) -> Tensor:
        self._count_step()
        self._tokens[: len(tokens_t)] = tokens_t
        self._run("step", self.take_step)
        return self._parameters[: len(tokens_t)]

    @torch.no_grad()
    def draw_values(
        self, parameters: Tensor, streams: UniformStreams, filters: Filters, count: int, before_step: Check = never_stop
    ) -> Tensor:
        """Do what `Engine.draw_values` does. NaN and infinity are reported only at the end."""
        images = self.batch // filters.rows_per_image
        self._uniforms[:count, :images] = streams.take_many(count, self.model.device)
        self._drawn.zero_()
        self._finite.fill_(True)
        self._parameters.copy_(parameters)

        def advance() -> None:
            self.take_step()
            self.draw_next(filters)

        for drawn in range(count):
            before_step()
            if drawn:
                self._count_step()
                self._run(filters, advance)
            else:
                self.draw_next(filters)
        values = self._values[:count, :images].T.clone(memory_format=torch.contiguous_format).cpu()
        if not bool(self._finite):
            raise LintxError(DAMAGED)
        return values

    def take_step(self) -> None:
        """Compute the parameters from the tokens, and the next state, on the device only."""
        if self._unit is not self._place:
            self._unit.copy_(self._place // self.model.embedding.stride)
        numbers = iter(self._numbers)

        def place(x: Tensor) -> Tensor:
            return host_number(next(numbers)) if self._is_number(x) else x

        state = map_states(lambda x: x, self._state, common=place)
        parameters, state = self.model.step(self._tokens, state)
        self._parameters.copy_(parameters)
        self._set_numbers(self._keep(state))

    def draw_next(self, filters: Filters) -> None:
        """Draw values from the parameters, on the device only. The values are the next tokens."""
        self._finite.logical_and_(torch.isfinite(self._parameters).all())
        images = self.batch // filters.rows_per_image
        uniforms = self._uniforms[:, :images].index_select(0, self._drawn).squeeze(0)
        values = self.choose(self._parameters, uniforms, filters)
        self._values[:, :images].index_copy_(0, self._drawn, values.to(torch.uint8).unsqueeze(0))
        self._tokens.copy_(values.repeat(filters.rows_per_image))
        self._drawn += 1

    def choose(self, parameters: Tensor, uniforms: Tensor, filters: Filters) -> Tensor:
        """Draw values. One from NaN may be any number; it is clamped, because it is an index before NaN is reported."""
        return self.draw(parameters, uniforms, filters).clamp(0, self.model.head.levels - 1)

    def _run(self, name: Hashable, work: Callable[[], None]) -> None:
        """Do `work`, which takes a step, by a graph if there is one or room for one."""
        key = name, self._numbers
        if key in self._after or len(self._after) < _MOST_GRAPHS:

            def begin() -> None:
                self._numbers = key[1]
                work()

            self._graphs.run(key, begin)
            self._numbers = self._after.setdefault(key, self._numbers)
        else:
            work()

    def _count_step(self) -> None:
        if self._position == self.model.config.image.positions and self.model.find_bound() is not None:
            raise ValueError(f"all {self._position} values of the image have already been drawn")
        unit = self._position // self.model.embedding.stride
        room = min((unit // _ROOM + 1) * _ROOM, self.model.config.block_image.positions)
        self._numbers = tuple(room if index in self._rooms else n for index, n in enumerate(self._numbers))
        self._position += 1

    def _is_number(self, x: Tensor) -> bool:
        """Return whether a tensor of the state is a number that the host knows."""
        return x.dim() == 0 and x is not self._place and x is not self._unit

    def _set_numbers(self, numbers: list[int]) -> None:
        """Set the numbers of the state to the smallest ones that decide the same."""
        pairs = zip(numbers, self._periods, strict=True)
        self._numbers = tuple(n if p is None or n < 2 * p else p + n % p for n, p in pairs)

    def _list_periods(self, block: Block, layer: Any) -> list[int | None]:
        """Return the period of each number in the state of a block."""
        period = block.inner.period if isinstance(block, InnerBlock) else None
        return [period for part in state_tensors(layer) if self._is_number(part)]

    def _fix(self, state: PixelState) -> PixelState:
        """Return `state` in the form in which steps update it in place."""

        def fix(block: Block, layer: Any) -> Any:
            if isinstance(layer, LayerState):
                return layer._replace(inner=fix(block, layer.inner))
            return self.fix_layer(block.inner, layer) if isinstance(block, InnerBlock) else layer

        layers = tuple(fix(*pair) for pair in zip(self.model.typed_blocks, state.layers, strict=True))
        return state._replace(embedding=state.embedding._replace(place=self._place), layers=layers)

    def fix_layer(self, mixer: Attention, state: Any) -> Any:
        """Return the state of a mechanism in the form in which its steps update it in place."""
        return mixer.fix_state(state, self._unit, self._room, self.model.dtype)

    def _keep(self, state: PixelState) -> list[int]:
        """Copy what is new in `state`, of the same images, to the engine's own state. Return its numbers."""
        numbers = []
        for own, new in zip(state_tensors(self._state), state_tensors(state), strict=True):
            if self._is_number(own):
                numbers.append(int(new))
            elif own is not new:
                own.copy_(new)
        return numbers

    def _refill(self, own: Any, new: Any) -> list[int]:
        """Copy `new`, of as many or fewer images, to `own`, which may have more room. Return its numbers."""
        if isinstance(own, FoldedState):
            refill(own, *new)
        elif isinstance(own, FixedCache):
            return [*self._refill(own[:2], new[:2]), *(() if own.room is None else (int(own.room),))]
        elif isinstance(own, tuple) and not isinstance(own, Shared):
            return [number for pair in zip(own, new, strict=True) for number in self._refill(*pair)]
        elif isinstance(own, Tensor) and own.dim():
            room = [slice(min(sizes)) for sizes in zip(own.shape[1:], new.shape[1:], strict=True)]
            fork_into(own[:, *room], new[:, *room])
        elif isinstance(own, Tensor) and self._is_number(own):
            return [int(new)]
        return []


class FusedCudaEngine(CudaEngine):
    """`CudaEngine` with fewer kernels a step, in Triton: a layer has five for `linear`, `gla` and the delta rules."""

    name = "cuda-fused"

    @classmethod
    def refusal(cls, model: PixelModel, products: torch.dtype | None = None) -> str | None:
        return super().refusal(model, products) or triton_refusal(model.device)

    @classmethod
    def doubt(cls, model: PixelModel, forks: bool) -> str | None:
        return f"its kernels have not run on a GPU yet; --engine {cls.name} uses them"

    def take_step(self) -> None:
        with fuse_steps():
            super().take_step()


class HalfSumsEngine(FusedCudaEngine):
    """`FusedCudaEngine` that stores running sums and the states of delta rules in bfloat16.

    An update reads them into float32 and stores them rounded. Sums too large for the kernel stay in float32.
    """

    name = "cuda-fused:state=bf16"

    def fix_layer(self, mixer: Attention, state: Any) -> Any:
        state = super().fix_layer(mixer, state)
        fits = isinstance(mixer, SumAttention) and STEP_SUMS.fits(state.s)
        return state._replace(s=state.s.bfloat16()) if fits else state


class Graphs:
    """Pieces of work that always read and write the same tensors. On a CUDA device, later runs replay a graph.

    The first run of a piece is an ordinary run. It compiles and loads what must not be loaded while recording.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._warm: set[Hashable] = set()
        # Whether the device can record. If it fails once, steps run one operation at a time.
        self._records = True
        # This holds only the graphs. A reference to the work would be cyclic and keep the engine and its memory alive.
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        # All graphs use the same memory for intermediate results, and one workspace of matrix products.
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def run(self, name: Hashable, work: Callable[[], None]) -> None:
        """Run `work`, which must be the same for the same `name`."""
        if name in self._warm and self._device.type == "cuda" and name not in self._graphs and self._records:
            try:
                self._graphs[name] = self.record(work)
            except RuntimeError as error:
                _log.warning("no CUDA graphs here, which is slower: %s", str(error).partition("\n")[0])
                self._records = False
        if name in self._graphs:
            self._graphs[name].replay()
        else:
            work()
            self._warm.add(name)

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record the kernels that `work` launches, without running them."""
        with torch.cuda.device(self._device):
            graph = torch.cuda.CUDAGraph()
            # torch's default stream for graphs belongs to the first device that recorded one.
            self._stream = self._stream or torch.cuda.Stream(self._device)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                work()
            self._pool = graph.pool()
        return graph
