"""Peak memory of sampling: the state of a batch at the end of its images, and the memory of a step.

On a CPU, the peak is the growth of a fresh process. On a GPU, torch counts the memory.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from linformer_cli.config import ModelConfig
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.sampling.engines import build_engine
from linformer_cli.system.device import product_dtype, seeded, torch_dtype

from .costs import count_state_bytes
from .fresh_process import run_fresh
from .pass_memory import measure_device_growth, measure_process_growth, refuse_misfits
from .sampling_work import RERUN, place_state

STEPS = 4
METHOD = (
    f"growth of the peak resident memory of a fresh process that builds the state of the batch and takes its last "
    f"{STEPS} steps (in a re-run, it reads whole images once), but at least the size of the state. Weights are not "
    "counted. On a GPU, torch counts this memory"
)


@dataclass(frozen=True)
class SamplingSetup:
    """A model's configuration as plain values, and its sampling engine: one of `ENGINES`, or `RERUN`."""

    model: dict[str, Any]
    batch: int
    engine: str
    precision: str
    device: str = "cpu"
    look_ahead: bool = False


def measure_sampling_memory(setup: SamplingSetup, limit_seconds: float) -> int | None:
    """Return peak bytes without weights, or None if they cannot be counted. Raises `PassFailed` if sampling fails."""
    if setup.device == "cpu":
        found = run_fresh(__name__, asdict(setup), limit_seconds)
        return max(int(found["peak_bytes"]), int(found["state_bytes"]))
    if not setup.device.startswith("cuda"):
        return None
    with refuse_misfits():
        work, _ = build_last_steps(setup)
        return measure_device_growth(work, setup.device)[1]


def build_last_steps(setup: SamplingSetup) -> tuple[Callable[[], None], int]:
    """Return a function that builds a batch's state and takes the last steps of its images, and the bytes of the state.

    The function has been warmed up with one image.
    """
    with seeded(0):
        model = PixelModel(ModelConfig.model_validate(setup.model))
    model = model.to(device=setup.device, dtype=torch_dtype(setup.precision)).eval()
    positions = model.config.image.positions

    @torch.no_grad()
    def read(batch: int) -> None:
        tokens = torch.zeros(batch, positions, dtype=torch.int64, device=setup.device)
        parameters, _ = model.attend(tokens)
        model.head.draw(parameters[:, -1], UniformStreams(0, range(batch)).take().to(setup.device))

    if setup.engine == RERUN:
        read(1)
        return lambda: read(setup.batch), 0
    products = product_dtype(setup.precision)
    placed = place_state(model, max(1, positions - STEPS - 1))

    @torch.no_grad()
    def step(batch: int) -> None:
        stepper = build_engine(setup.engine, model, batch, placed, setup.look_ahead, products)
        first = stepper.step(torch.zeros(batch, dtype=torch.int64, device=setup.device))
        stepper.draw_values(first, UniformStreams(0, range(batch)), Filters(), min(STEPS, positions - 1))

    step(1)
    return lambda: step(setup.batch), count_state_bytes(model, setup.batch, products)


def measure(given: dict[str, Any]) -> dict[str, int]:
    """Return `peak_bytes` and `state_bytes`, measured in this process, which should be fresh.

    `given` has the fields of a `SamplingSetup`.
    """
    work, state_bytes = build_last_steps(SamplingSetup(**given))
    _, growth = measure_process_growth(work)
    return {"peak_bytes": growth, "state_bytes": state_bytes}
