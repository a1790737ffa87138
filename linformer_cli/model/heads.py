"""Output heads: the distribution of the next value, from `parameters` [..., P], for likelihood and sampling."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.config import ModelConfig


class Head(nn.Module, ABC):
    """A distribution over values 0 .. levels - 1 for every position."""

    def __init__(self, width: int, parameters: int, levels: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, parameters)
        self.levels = levels

    def start(self) -> None:
        """Scale down the initial weights, so that the predictions of an untrained model hardly depend on its input."""
        self.projection.weight.data.mul_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return parameters [..., P] from vectors [..., width]."""
        return self.projection(x)

    @abstractmethod
    def log_likelihood(self, parameters: Tensor, values: Tensor) -> Tensor:
        """Log probability in nats [...] of values int64 [...] under parameters [..., P], in float32 or wider."""

    @abstractmethod
    def log_probabilities(self, parameters: Tensor) -> Tensor:
        """Log probabilities in nats [..., levels] of all values, in float32 or wider."""

    @abstractmethod
    def draw(self, parameters: Tensor, uniforms: Tensor) -> Tensor:
        """Return values int64 [B] drawn from this distribution, given parameters [B, P] and uniforms [B] in [0, 1)."""


class CategoricalHead(Head):
    """One logit for every value."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.width, config.image.levels, config.image.levels)

    def log_likelihood(self, parameters: Tensor, values: Tensor) -> Tensor:
        nats = functional.cross_entropy(_wide(parameters).flatten(0, -2), values.flatten(), reduction="none")
        return -nats.view(values.shape)

    def log_probabilities(self, parameters: Tensor) -> Tensor:
        return _wide(parameters).log_softmax(dim=-1)

    def draw(self, parameters: Tensor, uniforms: Tensor) -> Tensor:
        return invert_cumulative(_wide(parameters).softmax(dim=-1), uniforms)[0]


class MixtureHead(Head):
    """A mixture of K logistic distributions, cut into `levels` bins (Salimans 2017, PixelCNN++, arXiv 1701.05517).

    Values are spaced evenly on [-1, 1]; the outer bins extend to infinity. P holds K mixture logits, K means and K log
    scales. The source approximates the mass of a narrow bin by the density. Here, it is sigmoid(b) - sigmoid(a), where
    a < b are the distances of its edges from the mean in units of the scale, computed as sigmoid(b) sigmoid(-a) (1 -
    exp(a - b)), without cancellation, so all probabilities add up to 1.
    """

    # At the lower bound, a logistic is much narrower than a bin; at the upper bound, it is practically flat.
    log_scale_bounds = (-7.0, 40.0)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.width, 3 * config.mixtures, config.image.levels)
        self.mixtures = config.mixtures
        # Trained scales are small, those of differences from a prediction most of all, and the head learns slowly.
        self.first_log_scale = -3.0 if config.context == "residual" else -2.0

    def start(self) -> None:
        super().start()
        self.projection.bias.data[2 * self.mixtures :] = self.first_log_scale

    def move_means(self, parameters: Tensor, by: Tensor) -> Tensor:
        """Return parameters [..., P] in float32 or wider, with `by` [...] added to all means."""
        logits, means, log_scales = _wide(parameters).split(self.mixtures, dim=-1)
        return torch.cat([logits, means + by.unsqueeze(-1), log_scales], dim=-1)

    def log_likelihood(self, parameters: Tensor, values: Tensor) -> Tensor:
        return self._log_mass(parameters, values)

    def log_probabilities(self, parameters: Tensor) -> Tensor:
        values = torch.arange(self.levels, device=parameters.device)
        return self._log_mass(parameters.unsqueeze(-2), values.expand(*parameters.shape[:-1], self.levels))

    def _log_mass(self, parameters: Tensor, values: Tensor) -> Tensor:
        # The mass is computed in float64, because float32 is too coarse for the edges of narrow bins far from the mean.
        logits, means, log_scales = precise(parameters).split(self.mixtures, dim=-1)
        inverse_scales = torch.exp(-log_scales.clamp(*self.log_scale_bounds))
        values = values.unsqueeze(-1)
        bin_width = 2 / (self.levels - 1)
        centre = values.to(means.dtype) * bin_width - 1
        lower = (centre - bin_width / 2 - means) * inverse_scales
        upper = (centre + bin_width / 2 - means) * inverse_scales
        first, last = values == 0, values == self.levels - 1
        below = functional.logsigmoid(upper).masked_fill(last, 0)
        above = functional.logsigmoid(-lower).masked_fill(first, 0)
        inner = torch.log(-torch.expm1(-bin_width * inverse_scales)).masked_fill(first | last, 0)
        mass = torch.logsumexp(logits.log_softmax(dim=-1) + below + above + inner, dim=-1)
        return mass.to(_wide(parameters).dtype)

    def draw(self, parameters: Tensor, uniforms: Tensor) -> Tensor:
        """Draw values int64 [B] of the mixture, each with one uniform number, which also draws the component."""
        logits, means, log_scales = precise(parameters).split(self.mixtures, dim=-1)
        component, place = invert_cumulative(logits.softmax(dim=-1), uniforms)
        mean, log_scale = (x.gather(-1, component.unsqueeze(-1)).squeeze(-1) for x in (means, log_scales))
        x = mean + log_scale.clamp(*self.log_scale_bounds).exp() * place.logit(eps=1e-12)
        values: Tensor = ((x + 1) * ((self.levels - 1) / 2)).round()
        return values.clamp(0, self.levels - 1).long()


def build_head(config: ModelConfig) -> Head:
    return CategoricalHead(config) if config.head == "categorical" else MixtureHead(config)


def invert_cumulative(probabilities: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from probabilities [B, levels] by inversion with uniforms [B] in [0, 1) on any device.

    Returns values int64 [B], never of probability 0, and the place in [0, 1) of each uniform within its value's share.
    """
    probabilities = precise(probabilities)
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[..., -1:]
    # The total is 1 up to rounding. Scaling the targets by the total keeps every value's share. Targets below the total
    # never select a value after the last value of non-zero probability. One call moves and converts the uniforms, since
    # MPS cannot hold them in float64.
    below = torch.nextafter(total, torch.zeros_like(total))
    targets = torch.minimum(uniforms.to(cumulative).unsqueeze(-1) * total, below)
    values = (cumulative <= targets).sum(dim=-1, keepdim=True)
    share = probabilities.gather(-1, values)
    place = (targets - (cumulative.gather(-1, values) - share)) / share
    return values.squeeze(-1), place.clamp(0, 1).squeeze(-1)


def precise(x: Tensor) -> Tensor:
    """Return x in float64, or in float32 if the device has no float64."""
    return x.float() if x.device.type == "mps" else x.double()


def _wide(parameters: Tensor) -> Tensor:
    """Return `parameters` in float32 or wider; bfloat16 is too coarse for likelihoods summed over a thousand values."""
    return parameters if parameters.dtype == torch.float64 else parameters.float()
