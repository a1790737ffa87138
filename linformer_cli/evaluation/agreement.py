"""How closely a model's two forms agree, with errors relative to max(1, largest output), and the tolerances."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from linformer_cli.attention.base import measure_state_bytes
from linformer_cli.errors import DisagreementError
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.report.tables import Shown

FLOAT64_TOLERANCE = 1e-9  # in float64, only rounding may make the two forms differ
FLOAT32_TOLERANCE = 1e-3  # in float32, rounding errors add up over all positions and layers
# A later value must not change an earlier output, except by rounding, if sums are then computed in different blocks.
CAUSALITY_TOLERANCE = 1e-12
CHECKED_POSITIONS = 96  # before a model is timed, this many positions are compared


@dataclass(frozen=True)
class AgreementRow:
    """A comparison: its largest error (None: NaN or infinity), the allowed one, and `where` too large ones are."""

    name: Annotated[str, Shown("comparison")]
    error: Annotated[float | None, Shown("largest error", ".2e")]
    tolerance: Annotated[float, Shown("allowed", ".0e")]
    passed: Annotated[bool, Shown("passed")]
    where: str = ""

    def __str__(self) -> str:
        found = "NaN or infinity" if self.error is None else f"{self.error:.2g}"
        return f"{self.name} differs by {found}, allowed {self.tolerance:.0e}"


def build_row(name: str, error: float, tolerance: float, where: str = "") -> AgreementRow:
    """Return the row of an error. NaN and infinite errors do not pass."""
    return AgreementRow(name, error if math.isfinite(error) else None, tolerance, error <= tolerance, where)


@dataclass(frozen=True)
class Agreement:
    rows: tuple[AgreementRow, ...]
    positions: int
    images: int
    state_bytes: int
    predicted_state_bytes: int

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows) and self.state_bytes == self.predicted_state_bytes

    def describe_failure(self) -> str:
        failed = [str(row) for row in self.rows if not row.passed]
        if self.state_bytes != self.predicted_state_bytes:
            failed.append(f"the state holds {self.state_bytes} bytes, predicted {self.predicted_state_bytes}")
        return "; ".join(failed)


@torch.no_grad()
def measure_agreement(model: PixelModel, images: int = 2, positions: int | None = None, seed: int = 0) -> Agreement:
    """Compare `attend` with `step`, with `attend` in blocks, and with `attend` after later values were changed.

    This is in float64, and the first also in float32, on the CPU, with values that `step` samples from the model.
    """
    positions = min(positions or model.config.image.positions, model.config.image.positions)
    double = PixelModel(model.config).double().eval()
    double.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    tokens, stepped, state = _step_through(double, images, positions, generator)
    parallel, _ = double.attend(tokens)
    rows = [build_row("parallel against step, float64", relative_error(stepped, parallel), FLOAT64_TOLERANCE)]
    split = _split_error(double, tokens, parallel, generator)
    rows.append(build_row("split invariance, float64", split, FLOAT64_TOLERANCE))
    rows.append(build_row("causality, float64", _causality_error(double, tokens, parallel), CAUSALITY_TOLERANCE))
    measured, predicted = measure_state_bytes(state), double.state_bytes(images)
    single = double.float()
    stepped = follow(single, tokens)
    parallel, _ = single.attend(tokens)
    rows.append(build_row("parallel against step, float32", relative_error(stepped, parallel), FLOAT32_TOLERANCE))
    return Agreement(tuple(rows), positions, images, measured, predicted)


def require_agreement(model: PixelModel, images: int = 2, positions: int | None = CHECKED_POSITIONS) -> None:
    """Raise `DisagreementError` if the parallel and the step form of a model that is to be timed disagree."""
    agreement = measure_agreement(model, images, positions)
    if not agreement.passed:
        why = f"{agreement.describe_failure()}; see lintx check"
        raise DisagreementError(f"'{model.config.attention}' is not timed: {why}")


def _step_through(
    model: PixelModel, images: int, positions: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, object]:
    """Sample images. Return their tokens [B, T], the parameters [B, T, P] of every step, and the last state."""
    tokens = [model.start_tokens(images, model.take_turns(range(images)))]
    state, outputs = model.init_state(images), []
    while True:
        parameters, state = model.step(tokens[-1], state)
        outputs.append(parameters)
        if len(outputs) == positions:
            return torch.stack(tokens, dim=1), torch.stack(outputs, dim=1), state
        uniforms = torch.rand(images, generator=generator, dtype=torch.float64)
        # A damaged step can give NaN. The draw must not fail here, because the comparison reports the NaN.
        tokens.append(model.head.draw(parameters.nan_to_num(), uniforms))


def follow(model: PixelModel, tokens: Tensor) -> Tensor:
    """Return the parameters [B, T, P] from stepping through tokens [B, T]."""
    state, outputs = model.init_state(len(tokens)), []
    for token in tokens.unbind(dim=1):
        parameters, state = model.step(token, state)
        outputs.append(parameters)
    return torch.stack(outputs, dim=1)


def _split_error(model: PixelModel, tokens: Tensor, whole: Tensor, generator: torch.Generator) -> float:
    """Compare `attend` over blocks of random lengths, carrying the state, with `attend` over all positions."""
    state, outputs, start = None, [], 0
    longest = max(1, min(129, tokens.shape[1] // 2))  # gives at least two blocks
    while start < tokens.shape[1]:
        length = int(torch.randint(1, longest + 1, (), generator=generator))
        part, state = model.attend(tokens[:, start : start + length], state)
        outputs.append(part)
        start += length
    return relative_error(torch.cat(outputs, dim=1), whole)


def _causality_error(model: PixelModel, tokens: Tensor, whole: Tensor) -> float:
    """Change every token from one of three positions onwards. Return the largest change in earlier outputs."""
    worst = 0.0
    for place in {max(1, int(tokens.shape[1] * share)) for share in (0.1, 0.5, 0.95)}:
        if place >= tokens.shape[1]:
            continue
        changed = tokens.clone()
        changed[:, place:] = model.config.image.levels - 1 - changed[:, place:]
        worst = max(worst, relative_error(model.attend(changed)[0][:, :place], whole[:, :place]))
    return worst


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to max(1, largest expected value); infinite for NaN and other sizes."""
    found, expected = found.detach().double(), expected.detach().double()
    if found.shape != expected.shape or not bool(torch.isfinite(found).all() and torch.isfinite(expected).all()):
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))
