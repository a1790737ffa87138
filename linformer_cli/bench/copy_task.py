"""The copy task of Katharopoulos 2020, section 4.1: how fast models with different mechanisms learn to repeat symbols.

A sequence is w 0 w 0 0 ..: random symbols w, a separator, the same symbols again, and separators up to the end. Whoever
finds where the copy begins can predict all of it; the mean loss of its symbols, over updates, is what is compared.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.attention.base import Attention
from linformer_cli.config import ImageShape, ModelConfig
from linformer_cli.errors import UsageError
from linformer_cli.model.blocks import Block, initialise_weights
from linformer_cli.model.mixers import build_blocks
from linformer_cli.system.device import synchronize
from linformer_cli.system.environment import describe_environment
from linformer_cli.system.signals import StopRequest

from .ceilings import Ceilings
from .groups import require_agreement
from .operations import TRAINING_FACTOR, count_product_flops, list_products
from .passes import PassSetup, build_checked_model
from .variants import Variant

SYMBOLS = 10
SEPARATOR = 0
LAYERS = 4
HEADS = 8
BATCH = 64
LEARNING_RATE = 1e-3
LOWER_LEARNING_RATE = 1e-4
LOWER_AFTER_UPDATES = 3_000
# The paper's length; width and updates are those of the authors' released code, the paper does not say.
PAPER_LENGTH, PAPER_WIDTH, PAPER_UPDATES = 128, 256, 10_000
REDUCED_LENGTH, REDUCED_WIDTH = 32, 128
# Whoever has less time is given the smaller task.
FULL_SIZE_BUDGET_SECONDS = 3_600.0
SHORTEST_LENGTH = 8

Ending = Literal["finished", "budget", "interrupted", "failed"]


@dataclass(frozen=True)
class CopySettings:
    """The size of the task; all else about it is fixed. There is a point every so many updates, and one at the end."""

    length: int
    width: int
    updates: int = PAPER_UPDATES
    points_every: int = 25
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.length < SHORTEST_LENGTH:
            raise UsageError(f"the copy task needs a length of at least {SHORTEST_LENGTH}, found {self.length}")
        if self.width % HEADS or self.width < 2 * HEADS:
            raise UsageError(f"the copy task has {HEADS} heads: the width must be a multiple, found {self.width}")

    @property
    def title(self) -> str:
        """What it is, and in what it is less than the paper's."""
        size = f"copy task, length {self.length}, width {self.width}"
        paper = f"length {PAPER_LENGTH}, width {PAPER_WIDTH}"
        return f"{size} (reduced from {paper})" if self.reduced else size

    @property
    def reduced(self) -> bool:
        return self.length < PAPER_LENGTH or self.width < PAPER_WIDTH


def choose_size(budget_seconds: float | None, length: int | None, width: int | None) -> tuple[int, int]:
    """Length and width: what is given, else the paper's, or with less than an hour the reduced ones."""
    small = budget_seconds is not None and budget_seconds < FULL_SIZE_BUDGET_SECONDS
    default_length, default_width = (REDUCED_LENGTH, REDUCED_WIDTH) if small else (PAPER_LENGTH, PAPER_WIDTH)
    return length or default_length, width or default_width


@dataclass(frozen=True)
class CopyPoint:
    """Means over the last `points_every` updates: nats and share of right guesses of a copied symbol."""

    update: int
    loss: float
    accuracy: float
    learning_rate: float


@dataclass(frozen=True)
class CopyReport:
    """`rows`, one for each mechanism with all its points, how it ended, and what they depend on."""

    rows: list[dict[str, Any]]
    ended: Ending
    settings: dict[str, Any]
    environment: dict[str, Any]
    ceilings: dict[str, Any] | None = None


def draw_batch(length: int, seed: int, update: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Sequences int64 [B, length], and where a copied symbol stands, bool [B, length].

    As in the authors' released code, the string has a random number of symbols, from a quarter of the sequence to
    nearly half of it, so that the copy cannot be found by its position alone. Every update has its own random numbers.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + update) % 2**63)
    counts = torch.randint(length // 4, (length - 1) // 2, (batch, 1), generator=generator)
    symbols = torch.randint(1, SYMBOLS + 1, (batch, length), generator=generator)
    places = torch.arange(length)
    copied = (places > counts) & (places <= 2 * counts)
    sources = torch.where(copied, places - counts - 1, places)
    sequences = symbols.gather(1, sources.expand(batch, length))
    sequences[(places == counts) | (places > 2 * counts)] = SEPARATOR
    return sequences, copied


class CopyModel(nn.Module):
    """Embeddings of symbol and position, the blocks of a pixel model, a norm and a linear layer to the symbols.

    The blocks are those of every model here: normed before each branch, without dropout, the feed-forward four times as
    wide as the model. The authors' code embeds positions as sinusoids, norms behind the sum and has dropout of 0.1.
    """

    def __init__(self, variant: Variant, settings: CopySettings) -> None:
        super().__init__()
        config = build_config(variant, settings)
        self.symbols = nn.Embedding(SYMBOLS + 1, settings.width)
        self.positions = nn.Embedding(settings.length, settings.width)
        for table in (self.symbols, self.positions):
            nn.init.normal_(table.weight, std=0.5)
        blocks = build_blocks(config)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, SYMBOLS + 1)
        initialise_weights(self, blocks)
        self.head.weight.data.mul_(0.1)

    def forward(self, sequences: Tensor) -> Tensor:
        """Logits [B, T, symbols] of what comes next, for sequences int64 [B, T]."""
        x = self.symbols(sequences) + self.positions.weight[: sequences.shape[1]]
        for block in self.blocks:
            assert isinstance(block, Block)
            x, _ = block.attend(x, None)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build_config(variant: Variant, settings: CopySettings) -> ModelConfig:
    """A model's configuration whose positions are those of the task, in rows about as long as there are rows."""
    row = max(1, round(settings.length**0.5))
    return ModelConfig(
        attention=variant.attention,
        attention_options=variant.options,
        layers=LAYERS,
        heads=HEADS,
        width=settings.width,
        head_width=settings.width // HEADS,
        feed_forward=4 * settings.width,
        image=ImageShape(height=math.ceil(settings.length / row), width=row),
    )


@dataclass
class _Learner:
    """A model under way. `recent` is what a point averages; `failed` says why there are no more."""

    variant: Variant
    model: CopyModel
    optimizer: torch.optim.Optimizer
    recent: deque[tuple[float, float]]
    points: list[CopyPoint] = field(default_factory=list)
    seconds: float = 0.0
    failed: str | None = None


def run_copy_task(
    variants: Sequence[Variant],
    settings: CopySettings,
    budget_seconds: float | None = None,
    stop: StopRequest | None = None,
    report: Callable[[int, dict[str, CopyPoint]], None] = lambda update, points: None,
    ceilings: Ceilings | None = None,
) -> CopyReport:
    """Train a model with each of `variants`, in turns of one update on the same sequences.

    So the curves are comparable wherever it ends: after all updates, after `budget_seconds`, or when `stop` is set;
    what a last turn has begun is not counted. `report` is told the points of every mechanism as they are made. A model
    whose loss is no longer a finite number keeps its points and takes no more turns. With `ceilings`, every row says
    what share of the machine's products its updates reach.

    Raises `UsageError` for sizes that a mechanism cannot have, and `DisagreementError` before any training where the
    two executions of one disagree.
    """
    began = time.monotonic()
    stop = stop or StopRequest()
    for variant in variants:
        setup = PassSetup(variant.attention, variant.options, HEADS, settings.width // HEADS, settings.length)
        require_agreement(build_checked_model(setup))
    learners = [_build_learner(variant, settings) for variant in variants]

    def is_over() -> bool:
        late = budget_seconds is not None and time.monotonic() - began >= budget_seconds
        return late or stop.signal_number is not None

    done = 0
    while done < settings.updates and not is_over():
        if not _take_turn(learners, settings, done, is_over):
            break
        done += 1
        if done % settings.points_every == 0:
            report(done, _add_points(learners, done))
    if done % settings.points_every:
        report(done, _add_points(learners, done))
    ended: Ending = "finished"
    if done < settings.updates:
        failed = all(learner.failed is not None for learner in learners)
        ended = "interrupted" if stop.signal_number is not None else "failed" if failed else "budget"
    rows = [_describe(learner, settings, done, ceilings) for learner in learners]
    described = None if ceilings is None else ceilings.describe()
    return CopyReport(
        rows, ended, _describe_settings(settings, budget_seconds, done), describe_environment(), described
    )


def _build_learner(variant: Variant, settings: CopySettings) -> _Learner:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = CopyModel(variant, settings).to(settings.device).train()
    return _Learner(
        variant, model, torch.optim.RAdam(model.parameters(), lr=LEARNING_RATE), deque(maxlen=settings.points_every)
    )


def _take_turn(learners: Sequence[_Learner], settings: CopySettings, update: int, is_over: Callable[[], bool]) -> bool:
    """One update of every model that still learns; False where there is none, or no time for all of them."""
    sequences, copied = (part.to(settings.device) for part in draw_batch(settings.length, settings.seed, update))
    found: list[tuple[_Learner, tuple[float, float], float]] = []
    for learner in learners:
        if learner.failed is None:
            if found and is_over():
                return False
            synchronize(settings.device)
            began = time.perf_counter()
            measured = _update(learner, sequences, copied, update, settings.seed)
            synchronize(settings.device)
            found.append((learner, measured, time.perf_counter() - began))
    for learner, measured, seconds in found:
        learner.seconds += seconds
        if math.isfinite(measured[0]):
            learner.recent.append(measured)
        else:
            learner.failed = f"the loss was no finite number at update {update + 1}"
    return any(learner.failed is None for learner in learners)


def _update(learner: _Learner, sequences: Tensor, copied: Tensor, update: int, seed: int) -> tuple[float, float]:
    """The loss and the accuracy before the update, which is the sequences' first: nothing is ever seen twice."""
    for group in learner.optimizer.param_groups:
        group["lr"] = learning_rate_at(update)
    for module in learner.model.modules():
        if isinstance(module, Attention):
            module.on_training_step(update, seed)
    targets = copied[:, 1:]
    logits = learner.model(sequences)[:, :-1][targets]
    wanted = sequences[:, 1:][targets]
    loss = functional.cross_entropy(logits, wanted)
    learner.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    learner.optimizer.step()
    return float(loss.detach()), float((logits.argmax(dim=-1) == wanted).float().mean())


def learning_rate_at(update: int) -> float:
    """The rate of the update after `update` of them."""
    return LEARNING_RATE if update < LOWER_AFTER_UPDATES else LOWER_LEARNING_RATE


def _add_points(learners: Sequence[_Learner], update: int) -> dict[str, CopyPoint]:
    """A point for every model that still learns, by name."""
    made = {}
    for learner in learners:
        if learner.failed is None:
            loss, accuracy = (sum(values) / len(learner.recent) for values in zip(*learner.recent, strict=True))
            made[learner.variant.label] = CopyPoint(update, loss, accuracy, learning_rate_at(update - 1))
            learner.points.append(made[learner.variant.label])
    return made


def _describe(learner: _Learner, settings: CopySettings, done: int, ceilings: Ceilings | None) -> dict[str, Any]:
    last = learner.points[-1] if learner.points else None
    seconds = learner.seconds / done if done and learner.failed is None else None
    rate = share = None
    if seconds is not None and ceilings is not None:
        rows, products = BATCH * settings.length, list_products(learner.model)
        rate = rows * TRAINING_FACTOR * count_product_flops(learner.model) / seconds / 1e9
        share = rate / ceilings.product(products, rows, "fp32").gigaflops
    return {
        "task": settings.title,
        "reduced": settings.reduced,
        "name": learner.variant.label,
        "attention": learner.variant.attention,
        "attention_options": learner.variant.options,
        "device": settings.device,
        "parameters": sum(parameter.numel() for parameter in learner.model.parameters()),
        "updates": 0 if last is None else last.update,
        "loss": None if last is None else last.loss,
        "accuracy": None if last is None else last.accuracy,
        "seconds_per_update": seconds,
        "product_gigaflops": rate,
        "product_share": share,
        "failed": learner.failed,
        "points": learner.points,
    }


def _describe_settings(settings: CopySettings, budget_seconds: float | None, done: int) -> dict[str, Any]:
    return {
        "task": settings.title,
        "reduced": settings.reduced,
        "length": settings.length,
        "symbols": SYMBOLS,
        "layers": LAYERS,
        "heads": HEADS,
        "width": settings.width,
        "feed_forward": 4 * settings.width,
        "batch": BATCH,
        "optimizer": "radam",
        "learning_rate": LEARNING_RATE,
        "learning_rate_later": LOWER_LEARNING_RATE,
        "learning_rate_later_from_update": LOWER_AFTER_UPDATES,
        "updates_wanted": settings.updates,
        "updates": done,
        "points_every": settings.points_every,
        "budget_seconds": budget_seconds,
        "interleaved": True,
        "precision": "fp32",
        "seed": settings.seed,
    }
