"""Training with several processes: shares of batches, averaged gradients, and different dropout in each process."""

import numpy as np
import torch
from torch import Tensor, nn

from linformer_cli.errors import UsageError
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.system.distributed import Team


def share_batch(team: Team, batch: int) -> range:
    """Return this process's share of every batch. Raises `UsageError` if a process would have no images."""
    if team.count > batch:
        raise UsageError(
            f"a batch of {batch} images cannot be divided among {team.count} processes; start fewer processes, or a "
            "run with a larger --batch"
        )
    return team.share(batch)


class Likelihood(nn.Module):
    """The likelihood of a model as a module's forward pass, which `Team.parallel` needs."""

    def __init__(self, model: PixelModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, values: Tensor, labels: Tensor | None) -> Tensor:
        """Return nats [B, T], as `PixelModel.nats` does."""
        return self.model.nats(values, labels)


def share_model(team: Team, model: PixelModel) -> nn.Module:
    """Return the likelihood of `model` as a module. Its backward pass averages the gradients of all processes."""
    likelihood = Likelihood(model)
    return likelihood if team.count == 1 else team.parallel(likelihood, has_idle_parameters(model))


def has_idle_parameters(model: PixelModel) -> bool:
    """Whether some parameter does not affect the likelihood. An image may be too short to use every parameter."""
    label = torch.zeros(1, dtype=torch.int64, device=model.device) if model.config.classes else None
    values = torch.zeros(1, model.config.image.positions, dtype=torch.int64, device=model.device)
    training = model.training
    model.eval()  # dropout would advance the random generator
    nats = model.nats(values, label).sum()
    model.train(training)
    return None in torch.autograd.grad(nats, list(model.parameters()), allow_unused=True)


def seed_own_dropout(team: Team, seed: int, step: int) -> None:
    """Give each of several processes its own dropout. It depends only on seed, step and rank, so it need not be saved.

    A single process keeps torch's generator unchanged.
    """
    if team.count > 1:
        key = np.array([seed, step], dtype=np.uint64)
        torch.manual_seed(int(np.random.Philox(key=key).random_raw(team.rank + 1)[-1]))
