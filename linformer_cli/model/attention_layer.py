"""The layers around attention mechanisms: projections and optional parts."""

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.attention.base import Attention
from linformer_cli.attention.kernels.registry import Unnormed
from linformer_cli.attention.parts.scaling import KEY_FLOOR, OUTPUT_FLOOR, directions
from linformer_cli.attention.tensors import accumulator_dtype, fill_padding
from linformer_cli.config import ModelConfig, NetworkConfig
from linformer_cli.native.constants import TILE_ROWS
from linformer_cli.native.program import NO_BUFFER, Builder, MixInputs
from .linear_layers import Linear


class ShortConvolution(nn.Module):
    """y_t = sum over n < width of w_n * x_{t - width + 1 + n}, with weights w [width, columns] and width >= 2.

    Every column has its own weights. Inputs before the first position are 0. Before training, y_t is x_t.
    """

    def __init__(self, width: int, columns: int) -> None:
        super().__init__()
        self.width, self.columns = width, columns
        weight = torch.zeros(width, columns)
        weight[-1] = 1
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor, recent: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return y for x [B, T, columns] or [B, columns] after `recent` [B, width - 1, columns] (or 0), and the new."""
        if x.dim() == 2:
            y, recent = self(x.unsqueeze(1), recent)
            return y.squeeze(1), recent
        before = x.new_zeros(len(x), self.width - 1, self.columns) if recent is None else recent.to(x.dtype)
        inputs = torch.cat([before, x], dim=1)
        # A conv2d of height 1 keeps the layout [B, T, columns]. A conv1d reorders it, and took 2.6 times as long.
        pictures = inputs.transpose(1, 2).unsqueeze(2)
        weight = self.weight.T.reshape(self.columns, 1, 1, self.width)
        y = functional.conv2d(pictures, weight, groups=self.columns).squeeze(2).transpose(1, 2)
        # This is a copy, because a view would keep all inputs in memory as long as the state lives.
        return y, inputs[:, x.shape[1] :].clone()

    def init_recent(self, batch: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.zeros(batch, self.width - 1, self.columns, device=device, dtype=dtype)

    def emit(self, builder: Builder, source: int, name: str, others: int) -> int:
        """Emit a step for the first columns of `source`, and copy `others`. Returns the scratch memory `name`."""
        output = builder.scratch(name, self.columns + others)
        builder.emit(
            "short_convolution",
            input=source,
            output=output,
            recent=builder.state((self.width - 1) * self.columns),
            weights=builder.shared(self.weight),
            kernel=self.width,
            columns=self.columns,
            others=others,
        )
        return output


_ALIGNED = 8  # the number of elements in 16 bytes of bfloat16


class LayerState(NamedTuple):
    """The last inputs [B, width - 1, columns] of the short convolution, and the state of the mechanism."""

    recent: Tensor
    inner: Any


class HeadInputs(NamedTuple):
    """q, k, v and extra, each [..., H, its own width], and the output gate [..., H V]. Absent parts are None."""

    q: Tensor
    k: Tensor
    v: Tensor
    extra: Tensor | None
    gate: Tensor | None


class AttentionLayer(nn.Module):
    """Projects vectors to heads, mixes positions by the inner attention mechanism, and projects back.

    With all its parts, the layer computes

        q, k, v = short convolution of W x
        q, k    = q / |q|, k / |k|                            for each head
        y       = mechanism(q, k, v)
        y       = y / rms(y) * weight                         for each head
        output  = W_o (y * SiLU(W_g x))

    `short_convolution`, `normalise_keys`, `norm_heads` and `output_gate` of the configuration select the parts. They
    are the parts of Gated DeltaNet (Yang 2024, arXiv 2412.06464), but the convolution has no SiLU, as in Primer (So
    2021, arXiv 2109.08668). docs/reference/attention/layer.md has the other sources.
    Without a short convolution, the state of the layer is the state of the mechanism.
    """

    def __init__(self, config: NetworkConfig, inner: Attention) -> None:
        super().__init__()
        self.inner = inner
        shape = inner.shape
        self.heads = shape.heads
        query = 0 if inner.shared_query_key else shape.key_width
        gate = shape.value_width if config.output_gate else 0
        self.widths = (query, shape.key_width, shape.value_width, gate, inner.extra_per_head)
        self.input = Linear(config.width, shape.heads * sum(self.widths))
        self.output = Linear(shape.heads * shape.value_width, config.width)
        self.normalise_keys = config.normalise_keys
        self.convolution = build_convolution(config, inner)
        weight = torch.ones(shape.heads, shape.value_width) if config.norm_heads else None
        self.norm_weight = None if weight is None else nn.Parameter(weight)

    @property
    def input_rows(self) -> dict[str, slice]:
        """The rows of `input` for q, k (`qk` if they share a projection), v, gate and extra. Absent parts have none."""
        names = ("q", "qk" if self.inner.shared_query_key else "k", "v", "gate", "extra")
        ends = list(itertools.accumulate(self.heads * width for width in self.widths))
        rows = zip(names, [0, *ends], ends, strict=False)
        return {name: slice(start, end) for name, start, end in rows if end > start}

    @torch.no_grad()
    def start_extra_bias(self) -> None:
        if self.inner.extra_per_head:
            self.input.bias[self.input_rows["extra"]] = self.inner.extra_bias

    def project(self, x: Tensor | Unnormed, recent: Tensor | None = None) -> tuple[HeadInputs, Tensor | None]:
        """Project x [..., width], of positions or one, to the mechanism's inputs and the convolution's next state."""
        projected = self.input(x)
        widths = [self.heads * width for width in self.widths]
        parts = list(_Split.apply(projected, widths))
        if projected.is_cuda and projected.shape[-1] % _ALIGNED:
            # torch's fused softmax loads 16 bytes at once, without a check that every image starts at a multiple.
            parts = [part.contiguous() for part in parts]
        if self.convolution is not None:
            convolved, recent = self.convolution(projected[..., : self.convolution.columns], recent)
            parts[:3] = convolved.split(widths[:3], dim=-1)
        of_heads = (*parts[:3], parts[4])
        q, k, v, extra = (x.unflatten(-1, (self.heads, -1)) if x.shape[-1] else None for x in of_heads)
        assert k is not None and v is not None
        if self.normalise_keys:
            q, k = None if q is None else _normalise(q), _normalise(k)
        return HeadInputs(k if q is None else q, k, v, extra, parts[3] if widths[3] else None), recent

    def finish(self, y: Tensor, gate: Tensor | None, residual: Unnormed | None = None) -> Tensor:
        """Return the output [..., width] of the layer, plus `residual`, from the mechanism's output y [..., H, V]."""
        if self.norm_weight is not None:
            dtype = accumulator_dtype(y.dtype)
            scaled = functional.rms_norm(y.to(dtype), y.shape[-1:], eps=OUTPUT_FLOOR) * self.norm_weight.to(dtype)
            y = scaled.to(y.dtype)
        y = y.flatten(-2)
        return self.output(y if gate is None else y * functional.silu(gate), residual=residual)

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs [B, T, width] for x [B, T, width], from the start of a sequence."""
        return self.attend(x, None)[0]

    def attend(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        recent, inner = self._split_state(state)
        inputs, recent = self.project(x, recent)
        q, k, v, extra = (None if part is None else part.transpose(1, 2) for part in inputs[:4])
        assert q is not None and k is not None and v is not None
        y, inner = self.inner.attend(q, k, v, inner, extra)
        return self.finish(y.transpose(1, 2), inputs.gate), inner if recent is None else LayerState(recent, inner)

    def attend_all(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Map x [B, T, width] to as many outputs; see `Attention.attend_all`. The short convolution stays causal."""
        inputs, _ = self.project(fill_padding(x, lengths))
        q, k, v, extra = (None if part is None else part.transpose(1, 2) for part in inputs[:4])
        assert q is not None and k is not None and v is not None
        y = self.inner.attend_all(q, k, v, lengths, extra)
        return fill_padding(self.finish(y.transpose(1, 2), inputs.gate), lengths)

    def step(self, x_t: Tensor | Unnormed, state: Any, residual: Unnormed | None = None) -> tuple[Tensor, Any]:
        recent, inner = self._split_state(state)
        inputs, recent = self.project(x_t, recent)
        y_t, inner = self.inner.step(inputs.q, inputs.k, inputs.v, inner, inputs.extra)
        return self.finish(y_t, inputs.gate, residual), inner if recent is None else LayerState(recent, inner)

    def _split_state(self, state: Any) -> tuple[Tensor | None, Any]:
        return (None, state) if self.convolution is None or state is None else state

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> Any:
        inner = self.inner.init_state(batch, capacity, device, dtype)
        if self.convolution is None:
            return inner
        return LayerState(self.convolution.init_recent(batch, device, dtype), inner)

    @property
    def end(self) -> nn.Linear:
        return self.output

    def emit(self, builder: Builder, source: int, name: str) -> int:
        """Emit a step whose input is in buffer `source`. The projected input goes to the scratch memory `name`."""
        rows, heads, shape = self.input_rows, self.heads, self.inner.shape
        shared = rows.get("qk")
        parts = (shared or rows["q"], shared or rows["k"], rows["v"], rows.get("extra", slice(0, 0)))
        columns = tuple(part.start for part in parts)
        projected = inputs = builder.project(self.input, source, name)
        if self.convolution is not None:
            others = self.input.out_features - self.convolution.columns
            inputs = self.convolution.emit(builder, projected, f"convolved {name}", others)
        if self.normalise_keys:
            sizes = {"count": parts[1].stop // shape.key_width, "width": shape.key_width}
            builder.emit("normalise", y=inputs, weights=NO_BUFFER, **sizes, divisor=1.0, floor=KEY_FLOOR)
        mixed = builder.scratch("mixed", heads * shape.value_width)
        self.inner.emit(MixInputs(builder, inputs, mixed, columns, shape.heads_and_widths))
        if self.norm_weight is not None:
            weights, sizes = builder.shared(self.norm_weight), {"count": heads, "width": shape.value_width}
            builder.emit("normalise", y=mixed, weights=weights, **sizes, divisor=shape.value_width, floor=OUTPUT_FLOOR)
        if "gate" in rows:
            builder.gate(mixed, projected, heads * shape.value_width, rows["gate"].start, "silu")
        return builder.project(self.output, mixed, "branch")

    def list_states(self, state: Any) -> list[Tensor]:
        recent, inner = self._split_state(state)
        return [*([] if recent is None else [recent]), *self.inner.list_states(inner)]


class QueryLayer(nn.Module):
    """A layer that projects its input to queries; the input is the keys and values, and nothing follows."""

    def __init__(self, config: ModelConfig, inner: Attention) -> None:
        super().__init__()
        self.inner = inner
        self.input = Linear(config.width, config.width)

    def attend(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        memory = x.unsqueeze(1)
        y, state = self.inner.attend(self.input(x).unsqueeze(1), memory, memory, state)
        return y.squeeze(1), state

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        memory_t = x_t.unsqueeze(1)
        y_t, state = self.inner.step(self.input(x_t).unsqueeze(1), memory_t, memory_t, state)
        return y_t.squeeze(1), state

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> Any:
        return self.inner.init_state(batch, capacity, device, dtype)

    @property
    def end(self) -> nn.Linear:
        return self.inner.end

    def emit(self, builder: Builder, source: int, name: str) -> int:
        """Emit a step whose input is in buffer `source`. Queries and a copy of the input go to memory `name`."""
        width = self.input.in_features
        start = width + -width % TILE_ROWS  # a product fills whole tiles
        projected = builder.project(self.input, source, name)
        builder.scratch(name, start + width)
        builder.emit("copy", y=projected, x=source, width=width, first=start)
        output = builder.scratch("branch", width)
        self.inner.emit(MixInputs(builder, projected, output, (0, start, start, 0), self.inner.shape.heads_and_widths))
        return output

    def list_states(self, state: Any) -> list[Tensor]:
        return self.inner.list_states(state)


def build_convolution(config: NetworkConfig, inner: Attention) -> ShortConvolution | None:
    if not config.short_convolution:
        return None
    shape = inner.shape
    keys = shape.heads * shape.key_width * (1 if inner.shared_query_key else 2)
    return ShortConvolution(config.short_convolution, keys + shape.heads * shape.value_width)


class _Split(torch.autograd.Function):
    """`x.split(widths, dim=-1)`. Gradients that are adjacent in memory, like the parts, are joined without a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: list[int]) -> tuple[Tensor, ...]:
        ctx.widths = widths
        return x.split(widths, dim=-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        shape = (*gradients[0].shape[:-1], sum(ctx.widths))
        storage = gradients[0].untyped_storage()
        if storage.nbytes() == math.prod(shape) * gradients[0].itemsize:
            joined = gradients[0].new_empty(0).set_(storage, 0, shape, torch.empty(shape, device="meta").stride())
            pairs = [pair for pair in zip(gradients, joined.split(ctx.widths, dim=-1), strict=True) if pair[0].numel()]
            if all(x.data_ptr() == y.data_ptr() and x.stride() == y.stride() for x, y in pairs):
                return joined, None
        return torch.cat(gradients, dim=-1), None


def _normalise(x: Tensor) -> Tensor:
    """Return x [..., K], scaled to length 1 with sums in at least float32."""
    return directions(x.to(accumulator_dtype(x.dtype))).to(x.dtype)
