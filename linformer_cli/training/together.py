"""What several processes do otherwise in training than one alone."""

import numpy as np
import torch
from torch import Tensor, nn

from linformer_cli.errors import UsageError
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.system.distributed import Team


def share_batch(team: Team, batch: int) -> range:
    """The part of every batch that this process trains on; raises `UsageError` where a process would have none."""
    if team.count > batch:
        raise UsageError(
            f"a batch of {batch} images cannot be shared out among {team.count} processes; start fewer processes, or a "
            "run with a larger --batch"
        )
    return team.share(batch)


class Likelihood(nn.Module):
    """The model as a module that is called, which is what `Team.parallel` takes."""

    def __init__(self, model: PixelModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, values: Tensor, labels: Tensor | None) -> Tensor:
        """Nats [B, T] as `PixelModel.nats` has them."""
        return self.model.nats(values, labels)


def share_model(team: Team, model: PixelModel) -> nn.Module:
    """`model` as what is called for the nats of values, and leaves the mean of all processes' gradients."""
    likelihood = Likelihood(model)
    return likelihood if team.count == 1 else team.parallel(likelihood, has_idle_parameters(model))


def has_idle_parameters(model: PixelModel) -> bool:
    """Whether some parameter has no part in a likelihood: an image may be too short for what it is there for."""
    label = torch.zeros(1, dtype=torch.int64, device=model.device) if model.config.classes else None
    values = torch.zeros(1, model.config.image.positions, dtype=torch.int64, device=model.device)
    training = model.training
    model.eval()  # dropout would move the random generator on
    nats = model.nats(values, label).sum()
    model.train(training)
    return None in torch.autograd.grad(nats, list(model.parameters()), allow_unused=True)


def seed_own_dropout(team: Team, seed: int, step: int) -> None:
    """Of several processes each drops other numbers: what follows from the seed, the step and its rank alone.

    So nothing of it has to be saved. One process alone goes on with torch's generator as it stands.
    """
    if team.count > 1:
        key = np.array([seed, step], dtype=np.uint64)
        torch.manual_seed(int(np.random.Philox(key=key).random_raw(team.rank + 1)[-1]))
