"""The causal depthwise convolution of an attention layer; its state is the last few inputs."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.native.program import Builder


class ShortConvolution(nn.Module):
    """y_t = sum over n < width of w_n * x_{t - width + 1 + n}, with weights w [width, columns] and width >= 2.

    Every column has its own weights. The last weight belongs to position t, and inputs before the first position are 0.
    Before training, y_t is x_t.
    """

    def __init__(self, width: int, columns: int) -> None:
        super().__init__()
        self.width, self.columns = width, columns
        weight = torch.zeros(width, columns)
        weight[-1] = 1
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor, recent: Tensor | None) -> tuple[Tensor, Tensor]:
        """y for x [B, T, columns] after the inputs `recent` [B, width - 1, columns] (None: 0), and the new `recent`.

        x and y may be a single position [B, columns].
        """
        if x.dim() == 2:
            y, recent = self(x.unsqueeze(1), recent)
            return y.squeeze(1), recent
        before = x.new_zeros(len(x), self.width - 1, self.columns) if recent is None else recent.to(x.dtype)
        inputs = torch.cat([before, x], dim=1)
        # A conv2d of pictures of height 1 keeps the memory layout [B, T, columns]. A conv1d would reorder its input; it
        # took 2.6 times as long in float32 training.
        pictures = inputs.transpose(1, 2).unsqueeze(2)
        weight = self.weight.T.reshape(self.columns, 1, 1, self.width)
        y = functional.conv2d(pictures, weight, groups=self.columns).squeeze(2).transpose(1, 2)
        # This is a copy, because a view would keep all inputs in memory as long as the state lives.
        return y, inputs[:, x.shape[1] :].clone()

    def init_recent(self, batch: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The state before the first position."""
        return torch.zeros(batch, self.width - 1, self.columns, device=device, dtype=dtype)

    def emit(self, builder: Builder, source: int, name: str, others: int) -> int:
        """Emit a step for the first columns of buffer `source`. The next `others` columns are copied.

        The result is scratch memory called `name`.
        """
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
