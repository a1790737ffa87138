"""Fixtures for several test files: tiny models, a checkpoint folder, and a check for one-line errors."""

import contextlib
import functools
import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from machine import HAS_LIBRARY, pin_threads, prepare_triton
from torch.optim.optimizer import register_optimizer_step_pre_hook

from linformer_cli.attention.base import Attention
from linformer_cli.checkpoint import TrainingState, save_checkpoint
from linformer_cli.checkpoint_files import CheckpointInfo, DataSummary, TrainingSummary
from linformer_cli.config import ImageShape, ModelConfig, TrainConfig
from linformer_cli.data import glyphs, images
from linformer_cli.errors import LintxError
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.native.build import this_machine
from linformer_cli.native.library import VARIABLE, supported_sets

BuildModel = Callable[..., PixelModel]

prepare_triton()
os.environ.pop("PYTHONUNBUFFERED", None)  # most shells do not set it, and it affects errors at exit
pin_threads()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job, where tests of Ctrl-C would hang
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Leave out the slow cases of smoke tests."""
    if config.option.markexpr == "smoke":
        config.option.markexpr = "smoke and not slow"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collections, which find nothing and take a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(params=[one.name for one in this_machine().instruction_sets])
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Uses the library for each instruction set in turn, and provides its name."""
    name: str = request.param
    if not HAS_LIBRARY or name not in [one.name for one in supported_sets()]:
        pytest.skip(f"there is no library for {name}, or this processor does not support it")
    monkeypatch.setenv(VARIABLE, name)
    return name


@pytest.fixture
def record_rates() -> Callable[[Callable[[], object]], list[float]]:
    """Provides `record_rates(work)`, which does the work and returns the learning rates of all optimizer steps."""

    def record(work: Callable[[], object]) -> list[float]:
        rates: list[float] = []
        hook = register_optimizer_step_pre_hook(lambda optimizer, *rest: rates.append(optimizer.param_groups[0]["lr"]))
        try:
            work()
        finally:
            hook.remove()
        return rates

    return record


@pytest.fixture
def damage_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Attention]], None]:
    """Provides `damage_step(mechanism)`, after which its steps see values that are 1 % too large."""

    def damage(mechanism: type[Attention]) -> None:
        right = mechanism.step
        monkeypatch.setattr(
            mechanism, "step", lambda self, q_t, k_t, v_t, *rest: right(self, q_t, k_t, v_t * 1.01, *rest)
        )

    return damage


@pytest.fixture(scope="session")
def tiny_model_config() -> ModelConfig:
    """A model that trains in seconds. Its 64 positions fill four chunks of 16."""
    sizes = {"layers": 2, "heads": 2, "width": 16, "head_width": 8, "feed_forward": 32, "mixtures": 3}
    return ModelConfig(attention_options={"chunk": 16}, image=ImageShape(height=8, width=8, levels=16), **sizes)


@pytest.fixture(scope="session")
def build_tiny_model(tiny_model_config: ModelConfig) -> BuildModel:
    """Provides `build_tiny_model(seed, dtype, **changes to the config)`, whose predictions are far from uniform."""

    def build(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PixelModel:
        if changes.get("attention", "linear") != "linear":
            changes.setdefault("attention_options", {})
        config = ModelConfig.model_validate({**tiny_model_config.model_dump(), **changes})
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = PixelModel(config)
            # An untrained head predicts a nearly uniform distribution, which would hide most mistakes.
            model.head.projection.weight.data.mul_(10)
            torch.nn.init.normal_(model.head.projection.bias, std=0.5)
            if model.embedding.tables is not None:  # initially zero
                torch.nn.init.normal_(model.embedding.tables.rows)
            if model.channels is not None:  # initially zero
                torch.nn.init.normal_(model.channels.values)
        return model.to(dtype).eval()

    return build


@pytest.fixture(scope="session")
def tiny_info(tiny_model_config: ModelConfig) -> CheckpointInfo:
    """Describes a tiny model's checkpoint after 3 of 7 steps."""
    return CheckpointInfo(
        model=tiny_model_config,
        data=DataSummary(name="glyphs", train_images=90, border_mean=0.5),
        training=TrainingSummary(step=3, images_seen=48, elapsed_seconds=1.5, settings=TrainConfig(steps=7)),
    )


@pytest.fixture(scope="session")
def tiny_training_state() -> TrainingState:
    """A training state with tensors of every type in use, and a number without a short decimal form."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "optimizer.0.exp_avg": torch.randn(5, 3, generator=generator),
        "optimizer.0.step": torch.tensor(3.0),
        "random.cpu": torch.randint(0, 256, (64,), generator=generator, dtype=torch.uint8),
    }
    return TrainingState(tensors, {"step": 3, "interval_nats": 0.1 + 0.2, "best_bits_per_dim": None})


@pytest.fixture(scope="session")
def tiny_checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
    build_tiny_model: BuildModel,
    tiny_info: CheckpointInfo,
    tiny_training_state: TrainingState,
) -> Path:
    """A checkpoint folder of `build_tiny_model()` with training state.

    Tests share the folder and must not change it.
    """
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    save_checkpoint(folder, build_tiny_model(), tiny_info, tiny_training_state)
    return folder


@pytest.fixture(scope="session")
def share() -> float:
    """The share of the full number of random cases to run ($LINTX_FULL); 0 for few cases."""
    return float(os.environ.get("LINTX_FULL") or 0)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each process of the tests remembers its own measured speeds, so the choice of a precision cannot change."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LINTX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def few_glyphs() -> Iterator[None]:
    """`--data glyphs` has a tenth of its images, and each process of the tests draws them once: a run takes 0.2 s."""
    draw = functools.cache(images.draw_glyphs)
    with pytest.MonkeyPatch.context() as patch:
        for split, count in (("train", 800), ("test", 200)):
            patch.setitem(glyphs.COUNTS, split, count)
        patch.setattr(images, "draw_glyphs", lambda *place: tuple(array.copy() for array in draw(*place)))
        yield


@pytest.fixture(scope="session")
def raises_one_line() -> Callable[..., AbstractContextManager[pytest.ExceptionInfo[Any]]]:
    """Like `pytest.raises`, but checks that the message is one line of limited length that contains all `parts`."""

    @contextlib.contextmanager
    def raises(kind: type[LintxError], *parts: str) -> Iterator[pytest.ExceptionInfo[Any]]:
        with pytest.raises(kind) as caught:
            yield caught
        message = str(caught.value)
        assert "\n" not in message
        assert 0 < len(message) < 500
        for part in parts:
            assert part in message

    return raises
