"""Optimizers with weight decay on matrices only, their state as named tensors, and the average of the weights."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from linformer_cli.config import TrainConfig
from linformer_cli.model.heads import Head, MixtureHead

MIXTURE_SHARE = 0.1


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW or RAdam with decoupled weight decay, or Muon with AdamW.

    Only the matrices of linear layers decay, not biases, norms or embedding tables. Muon trains these matrices, except
    the head's, whose rows belong to values rather than hidden units. The joint projection to queries, keys and values
    is one matrix. Muon's steps are scaled to the size of AdamW's (Liu 2025, arXiv 2502.16982), so both use one learning
    rate and one weight decay. Muon's momentum is 0.95; `beta1` and `beta2` are for AdamW. With Muon, a mixture head
    learns at `MIXTURE_SHARE` of the rate: a mean is in units of half the range of values, unlike logits.

    Muon orthogonalises in the precision of training. bfloat16, the only format of `torch.optim.Muon`, amplifies
    rounding differences, as between one process and two, and takes 20 times as long as float32 on CPUs without it.
    """
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    heads = [module for module in model.modules() if isinstance(module, Head)]
    head = {id(parameter) for module in heads for parameter in module.parameters()}
    muons = linear - head if config.optimizer == "muon" else set()
    parameters = list(model.parameters())
    rest = [p for p in parameters if id(p) not in muons]
    has_mixture = any(isinstance(module, MixtureHead) for module in model.modules())
    slow = head if muons and has_mixture else set()
    groups = []
    for decays, is_slow in itertools.product((True, False), repeat=2):
        members = [p for p in rest if (id(p) in linear, id(p) in slow) == (decays, is_slow)]
        decay, share = config.weight_decay if decays else 0.0, MIXTURE_SHARE if is_slow else 1.0
        if members:
            groups.append({"params": members, "weight_decay": decay, "lr_share": share})
    betas = (config.beta1, config.beta2)
    if config.optimizer == "radam":
        return torch.optim.RAdam(groups, lr=config.learning_rate, betas=betas, decoupled_weight_decay=True)
    adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)
    if config.optimizer == "adamw":
        return adamw
    hidden = [p for p in parameters if id(p) in muons]
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    return JoinedOptimizer(Muon(hidden, dtype, config.learning_rate, config.weight_decay), adamw)


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` (`adjust_lr_fn="match_rms_adamw"`) that orthogonalises in `dtype`."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, rate: float, weight_decay: float) -> None:
        super().__init__(parameters, lr=rate, weight_decay=weight_decay)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
                update = orthogonalise(parameter.grad.lerp(buffer, momentum).to(self.dtype))
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(update, alpha=-0.2 * rate * max(parameter.shape) ** 0.5)


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return [rows, columns] with singular values of about 0.7 to 1.2: five steps of Newton-Schulz (Jordan 2024)."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalise(matrix.T).T
    matrix = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = matrix @ matrix.T
        matrix = torch.addmm(matrix, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), matrix, beta=3.4445)
    return matrix


class JoinedOptimizer(torch.optim.Optimizer):
    """Several optimizers of different parameters, combined into one with all groups and states."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        start = 0
        for part in self.parts:
            end = start + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[start:end], self.state
            start = end

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()  # loading replaces groups and state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the moments of an optimizer, named `optimizer.<parameter>.<name>`."""
    return {
        f"optimizer.{index}.{name}": value.detach().cpu()
        for index, moments in optimizer.state_dict()["state"].items()
        for name, value in moments.items()
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> bool:
    """Load moments, and return whether every parameter has some. Raises `ValueError` for those that do not fit."""
    wanted = dict(enumerate(_list_moments(optimizer)))
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in strip_prefix(tensors, "optimizer.").items():
        index, _, name = key.partition(".")
        place = int(index) if index.isascii() and index.isdigit() and len(index) < 10 else -1
        shape = wanted.get(place, {}).get(name)
        if shape != value.shape or value.dtype != torch.float32:
            kind = str(value.dtype).removeprefix("torch.")
            raise ValueError(f"optimizer.{key}, {kind} of shape {list(value.shape)}, belongs to no parameter")
        state.setdefault(place, {})[name] = value
    for place, moments in state.items():
        if missing := wanted[place].keys() - moments.keys():
            raise ValueError(f"optimizer.{place}.{min(missing)} is missing")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return state.keys() == wanted.keys()


def _list_moments(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, torch.Size]]:
    """Yield the moments of each parameter by name, in the order in which `state_dict` numbers the parameters."""
    for part in optimizer.parts if isinstance(optimizer, JoinedOptimizer) else (optimizer,):
        for group in part.param_groups:
            for parameter in group["params"]:
                if isinstance(part, torch.optim.Muon):
                    yield {"momentum_buffer": parameter.shape}
                else:
                    yield {"exp_avg": parameter.shape, "exp_avg_sq": parameter.shape, "step": torch.Size()}


def build_average(model: nn.Module, config: TrainConfig) -> AveragedModel | None:
    """Return the average of the weights with decay `config.ema` (0: None), at step n at most (1 + n) / (10 + n)."""

    def follow(averaged: Any, current: Any, steps: Tensor | int) -> None:
        get_ema_multi_avg_fn(min(config.ema, float((1 + steps) / (10 + steps))))(averaged, current, steps)

    return AveragedModel(model, multi_avg_fn=follow) if config.ema else None


def strip_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
