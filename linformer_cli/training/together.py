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
    """The likelihood of a model and its training loss as a module's forward pass, which `Team.parallel` needs.

    Without teachers, the loss is the negative log-likelihood in nats. With them, it is `share` times the cross-entropy
    with their predictions, plus 1 - `share` times the negative log-likelihood.
    """

    def __init__(self, model: PixelModel, share: float) -> None:
        super().__init__()
        self.model, self.share = model, share

    def forward(self, values: Tensor, labels: Tensor | None, predicted: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the loss and nats [B, T], as in `PixelModel.nats`, given teachers' probabilities [B, T, levels]."""
        if predicted is None:
            nats = self.model.nats(values, labels)
            return nats, nats
        parameters, _ = self.model.attend(self.model.shift_values(values, labels))
        logs = self.model.head.log_probabilities(parameters)
        nats = -logs.gather(-1, values.unsqueeze(-1)).squeeze(-1)
        return self.share * -(predicted * logs).sum(dim=-1) + (1 - self.share) * nats, nats


def share_model(team: Team, model: PixelModel, distill_share: float) -> nn.Module:
    """Return the `Likelihood` of `model`. Its backward pass averages the gradients of all processes."""
    likelihood = Likelihood(model, distill_share)
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
