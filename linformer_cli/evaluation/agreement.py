"""Do the two executions of a model agree? Measured on real weights, over the whole length.

Errors are relative to max(1, largest output). The tolerances stand here and nowhere else.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from linformer_cli.attention.base import measure_state_bytes
from linformer_cli.model.pixel_model import PixelModel

# Identity: in float64 the two forms may differ by rounding alone.
FLOAT64_TOLERANCE = 1e-9
# Drift: in float32, over the whole length and through all layers.
FLOAT32_TOLERANCE = 1e-3
# An output may not change at all with a later value; a different blocking of the same sums is all that is allowed.
CAUSALITY_TOLERANCE = 1e-12


@dataclass(frozen=True)
class AgreementRow:
    """One comparison: the largest error found, and what is allowed."""

    name: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # NaN is not


@dataclass(frozen=True)
class Agreement:
    """All comparisons of one model over `positions` positions of `images` images."""

    rows: tuple[AgreementRow, ...]
    positions: int
    images: int
    state_bytes: int
    predicted_state_bytes: int

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows) and self.state_bytes == self.predicted_state_bytes

    def describe_failure(self) -> str:
        """What did not pass, in one line."""
        failed = [
            f"{row.name} differs by {row.error:.2g}, allowed {row.tolerance:.0e}" for row in self.rows if not row.passed
        ]
        if self.state_bytes != self.predicted_state_bytes:
            failed.append(f"the state holds {self.state_bytes} bytes, predicted {self.predicted_state_bytes}")
        return "; ".join(failed)


@torch.no_grad()
def measure_agreement(model: PixelModel, images: int = 2, positions: int | None = None, seed: int = 0) -> Agreement:
    """Compare `attend` with `step`, with itself in blocks, and with changed later values; in float64 and float32.

    The values are drawn from the model by its own steps, so that it sees what it will see in use. `model` is left
    as it was; the work is done on a copy, on the CPU, since float64 is not to be had everywhere.
    """
    positions = min(positions or model.config.image.positions, model.config.image.positions)
    double = PixelModel(model.config).double().eval()
    double.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    tokens, stepped, state = _step_through(double, images, positions, generator)
    parallel, _ = double.attend(tokens)
    rows = [AgreementRow("parallel against step, float64", _error(stepped, parallel), FLOAT64_TOLERANCE)]
    rows.append(
        AgreementRow("split invariance, float64", _split_error(double, tokens, parallel, generator), FLOAT64_TOLERANCE)
    )
    rows.append(AgreementRow("causality, float64", _causality_error(double, tokens, parallel), CAUSALITY_TOLERANCE))
    measured, predicted = measure_state_bytes(state), double.state_bytes(images)
    single = double.float()
    stepped = _follow(single, tokens)
    parallel, _ = single.attend(tokens)
    rows.append(AgreementRow("parallel against step, float32", _error(stepped, parallel), FLOAT32_TOLERANCE))
    return Agreement(tuple(rows), positions, images, measured, predicted)


def _step_through(
    model: PixelModel, images: int, positions: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, object]:
    """Sample `images`: their tokens [B, T], the parameters [B, T, P] of every step, and the last state."""
    tokens = [model.start_tokens(images, model.take_turns(range(images)))]
    state, outputs = model.init_state(images), []
    while True:
        parameters, state = model.step(tokens[-1], state)
        outputs.append(parameters)
        if len(outputs) == positions:
            return torch.stack(tokens, dim=1), torch.stack(outputs, dim=1), state
        uniforms = torch.rand(images, generator=generator, dtype=torch.float64)
        # A damaged step can give NaN; the comparison reports it, so the draw must only survive it.
        tokens.append(model.head.draw(parameters.nan_to_num(), uniforms))


def _follow(model: PixelModel, tokens: Tensor) -> Tensor:
    """The parameters [B, T, P] of stepping through given tokens."""
    state, outputs = model.init_state(len(tokens)), []
    for token in tokens.unbind(dim=1):
        parameters, state = model.step(token, state)
        outputs.append(parameters)
    return torch.stack(outputs, dim=1)


def _split_error(model: PixelModel, tokens: Tensor, whole: Tensor, generator: torch.Generator) -> float:
    """`attend` over blocks of random lengths, the state carried, against `attend` over all at once."""
    state, outputs, start = None, [], 0
    longest = max(1, min(129, tokens.shape[1] // 2))  # so that there are at least two blocks
    while start < tokens.shape[1]:
        length = int(torch.randint(1, longest + 1, (), generator=generator))
        part, state = model.attend(tokens[:, start : start + length], state)
        outputs.append(part)
        start += length
    return _error(torch.cat(outputs, dim=1), whole)


def _causality_error(model: PixelModel, tokens: Tensor, whole: Tensor) -> float:
    """The largest change before a token that was changed, for a token early, in the middle and late."""
    worst = 0.0
    for place in {max(1, int(tokens.shape[1] * share)) for share in (0.1, 0.5, 0.95)}:
        if place >= tokens.shape[1]:
            continue
        changed = tokens.clone()
        changed[:, place:] = model.config.image.levels - 1 - changed[:, place:]
        worst = max(worst, _error(model.attend(changed)[0][:, :place], whole[:, :place]))
    return worst


def _error(found: Tensor, expected: Tensor) -> float:
    """Largest difference relative to max(1, largest output); infinite where anything is not finite."""
    if not bool(torch.isfinite(found).all() and torch.isfinite(expected).all()):
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))
