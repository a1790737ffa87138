"""Tests of optimizers: weight decay, the steps of Muon, and saving and loading the state."""

import copy

import pytest
import torch
from loops import loop_over
from torch import nn

from linformer_cli.config import TrainConfig
from linformer_cli.training.optimizer import Muon, build_optimizer


def configure(name: str, **changes: object) -> TrainConfig:
    return TrainConfig.model_validate({"steps": 1, "optimizer": name, **changes})


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@loop_over("name", ["adamw", "radam", "muon"])
@loop_over(
    "changes", [{}, {"attention_options": {"feature_map": "learned"}}, {"embedding": "paper", "head": "mixture"}]
)
def test_only_the_matrices_of_linear_layers_decay(build_tiny_model, name, changes) -> None:
    model = build_tiny_model(**changes)
    optimizer = build_optimizer(model, configure(name, weight_decay=0.3))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decays) == len(list(model.parameters()))
    linear = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {path for path, p in model.named_parameters() if decays[id(p)] == 0.3} == linear
    assert {decays[id(p)] for path, p in model.named_parameters() if path not in linear} == {0.0}
    assert "head.projection.weight" in linear
    assert not any("embedding" in path or "norm" in path for path in linear)


@pytest.mark.parametrize("name", ["adamw", "radam", "muon"])
def test_the_decay_is_decoupled_from_the_gradient(build_tiny_model, name) -> None:
    # Without gradients, a step only shrinks the matrices, by learning rate * decay. The test takes more than five
    # steps: the first five steps of RAdam are proportional to the gradient and would hide a coupled decay.
    model = build_tiny_model()
    before = copy.deepcopy(model.state_dict())
    optimizer = build_optimizer(model, configure(name, weight_decay=0.5, learning_rate=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(9):
        optimizer.step()
    for path, parameter in model.named_parameters():
        shrinks = path.endswith(("input.weight", "output.weight", "projection.weight"))
        torch.testing.assert_close(parameter.data, before[path] * (0.95**9 if shrinks else 1.0), rtol=1e-5, atol=0)


def test_the_settings_reach_the_optimizer(build_tiny_model) -> None:
    for name, kind in (("adamw", torch.optim.AdamW), ("radam", torch.optim.RAdam)):
        optimizer = build_optimizer(build_tiny_model(), configure(name, learning_rate=0.25, beta1=0.5, beta2=0.75))
        assert type(optimizer) is kind
        for group in optimizer.param_groups:
            assert (group["lr"], group["betas"]) == (0.25, (0.5, 0.75))


def test_muon_trains_a_mixture_head_slowly(build_tiny_model) -> None:
    for head, name, share in (("mixture", "muon", 0.1), ("mixture", "adamw", 1), ("categorical", "muon", 1)):
        model = build_tiny_model(head=head)
        groups = build_optimizer(model, configure(name)).param_groups
        shares = {id(p): group.get("lr_share", 1) for group in groups for p in group["params"]}
        for path, parameter in model.named_parameters():
            assert shares[id(parameter)] == (share if path.startswith("head.") else 1), path


def test_muon_equals_the_muon_of_torch_in_bf16_and_takes_the_precision_of_training(build_tiny_model) -> None:
    layers = [nn.Linear(24, 8, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    reference = torch.optim.Muon(layers[1].parameters(), lr=0.02, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    for layer, optimizer in zip(layers, (Muon([layers[0].weight], torch.bfloat16, 0.02, 0.3), reference), strict=True):
        take_steps(layer, optimizer, 4, seed=0)
    assert torch.equal(layers[0].weight, layers[1].weight)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        joined = build_optimizer(build_tiny_model(), configure("muon", precision=precision))
        assert joined.parts[0].dtype == dtype


def test_a_step_of_muon_makes_the_singular_values_nearly_equal(build_tiny_model) -> None:
    # The first step depends only on the gradient U S V'. The step is nearly U V', scaled to a root mean square of 0.2
    # times the learning rate, as in a typical step of AdamW.
    model = build_tiny_model()
    before = copy.deepcopy(model.state_dict())
    optimizer = build_optimizer(model, configure("muon", learning_rate=0.25, weight_decay=0.0))
    take_steps(model, optimizer, 1, seed=0)
    for path, module in model.blocks.named_modules():
        if isinstance(module, nn.Linear):
            change = (module.weight.detach() - before[f"blocks.{path}.weight"]).double()
            u, _, vh = torch.linalg.svd(module.weight.grad.double(), full_matrices=False)
            scale = 0.2 * 0.25 * max(change.shape) ** 0.5
            assert float(change.square().mean().sqrt()) == pytest.approx(0.2 * 0.25, rel=0.25)
            values = (u.T @ change @ vh.T / -scale).diagonal()
            assert float(values.min()) > 0.6 and float(values.max()) < 1.3


def test_parameters_that_muon_leaves_out_are_trained_as_with_adamw(build_tiny_model) -> None:
    models = {name: build_tiny_model() for name in ("muon", "adamw")}
    for name, model in models.items():
        config = configure(name, learning_rate=0.1, weight_decay=0.3, beta1=0.5, beta2=0.75)
        optimizer = build_optimizer(model, config)
        take_steps(model, optimizer, 2, seed=0)
        for group in optimizer.param_groups:  # as the training loop does
            group["lr"] = 0.05
        take_steps(model, optimizer, 1, seed=1)
    linear = {f"{path}.weight" for path, module in models["muon"].named_modules() if isinstance(module, nn.Linear)}
    others = dict(models["adamw"].named_parameters())
    for path, parameter in models["muon"].named_parameters():
        assert torch.equal(parameter, others[path]) == (path not in linear or path == "head.projection.weight"), path
