"""The checks of `lintx bench gpu`, with errors relative to max(1, largest expected value); infinite for NaN."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from linformer_cli.attention.base import AttentionShape
from linformer_cli.attention.linear import LinearAttention, LinearOptions
from linformer_cli.config import ImageShape, ModelConfig
from linformer_cli.evaluation.agreement import AgreementRow, build_row, follow, relative_error
from linformer_cli.model.mixers import list_mixers, parse_variant, parse_variants
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.native.library import reference_only
from linformer_cli.sampling.decode import Sampler
from linformer_cli.sampling.engines import AUTO, REFERENCE, ReferenceEngine, build_engine, choose_engine
from linformer_cli.sampling.engines.ahead import AheadEngine
from linformer_cli.sampling.engines.cuda import CudaEngine, FusedCudaEngine, HalfSumsEngine
from linformer_cli.system.device import torch_dtype
from .measure.attention_pass import PassSetup, build_checked_model
from .models import build_models
from .train import build_trainer

COMPARED = ("linear", "softmax")  # the mechanisms whose engines are checked, and whose sampling and training are timed
# The errors allowed for kernels relative to plain torch in float64, by the type of the kernels' inputs.
KERNEL_TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}
# The error allowed between the predictions of two forms or two engines of a whole model in float32.
MODEL_TOLERANCE = 1e-3
# The same with sums in bfloat16. On a CPU, their rounding changes predictions by up to 0.008, and lost sums by 0.09.
HALF_SUMS_TOLERANCE = 2e-2
# Rounding may change a drawn value. The rest of that image then differs, so a tenth of the images may differ.
COMPARED_IMAGES, OTHER_IMAGES = 32, 0.1
_CHECKED_VALUES = 1024  # images are checked up to this number of values, since plain torch takes milliseconds a step
# Steps that differ in more than the mechanism.
_IMAGE = ImageShape(height=6, width=8, channels=3, levels=16)
_COLOUR = ModelConfig(layers=1, heads=2, width=32, feed_forward=32, image=_IMAGE)
_OTHER_STEPS: dict[str, dict[str, object]] = {
    "residual": {"context": "residual", "head": "mixture"},
    "all parts of a layer": {"short_convolution": 4, "normalise_keys": True, "norm_heads": True, "output_gate": True},
    "bytes without positions": {"embedding": "none", "context": "recent"},
}


def check_attention(device: str, lengths: Sequence[int]) -> Iterator[AgreementRow]:
    """Compare outputs, sums and gradients of `linear` on this device with plain torch in float64."""
    for feature_map in ("elu", "relu"):
        for width in (16, 32, 64):
            attention = build_linear(feature_map, width)
            for length in lengths:
                for precision, tolerance in KERNEL_TOLERANCES.items():
                    inputs = draw_inputs(2, 2, length, width, device, torch_dtype(precision))
                    found = differentiate(attention.attend, inputs)
                    with reference_only():
                        expected = differentiate(attention.attend, [part.double() for part in inputs])
                    kind = "compiled" if attention.is_compiled(inputs[0].device, inputs[0].dtype) else "torch"
                    name = f"linear, {feature_map}, {kind}, {precision}, heads of {width}, T = {length}"
                    yield build_row(name, max(map(relative_error, found, expected)), tolerance)


def check_engines(device: str, networks: Sequence[tuple[str | None, ModelConfig]]) -> Iterator[AgreementRow]:
    """Compare the measured and the reference engine, images and all predictions, by the first rows of large images."""
    short = [(name, _keep_first_rows(config)) for name, config in networks]
    for subject in build_models(parse_variants(COMPARED), short, device, "fp32"):
        model, images = subject.model, range(COMPARED_IMAGES)
        name = choose_engine(AUTO, model).value
        where = f"engine {name}, {subject.preset or 'tiny'}, {subject.name}"
        drawn, expected = (Sampler(model, engine=engine).sample(images).values for engine in (name, REFERENCE))
        others = 1 - float((drawn == expected).all(dim=1).float().mean())
        yield build_row(f"{where}: share of images that differ from the reference engine's", others, OTHER_IMAGES)
        engines = build_engine(name, model, len(images)), ReferenceEngine(model, len(images))
        tokens = model.shift_values(expected.long().to(device))
        steps = ((engine.step(token) for engine in engines) for token in tokens.unbind(dim=1))
        yield build_row(f"{where}: predictions", max(relative_error(*step) for step in steps), MODEL_TOLERANCE)


def check_look_ahead(model: PixelModel) -> Iterator[AgreementRow]:
    """Compare images that look-ahead on this device draws one by one with those of the reference engine."""
    images, ahead = range(COMPARED_IMAGES), Sampler(model, engine=AheadEngine.name)
    expected = Sampler(model, engine=REFERENCE).sample(images).values
    drawn = torch.cat([ahead.sample([index]).values for index in images])
    others = 1 - float((drawn == expected).all(dim=1).float().mean())
    yield build_row(f"engine {AheadEngine.name}: share of images that differ from reference", others, OTHER_IMAGES)


def _keep_first_rows(config: ModelConfig) -> ModelConfig:
    rows = max(1, _CHECKED_VALUES // (config.image.width * config.image.channels))
    image = config.image.model_copy(update={"height": min(rows, config.image.height)})
    return config.model_copy(update={"image": image})


@torch.no_grad()
def check_mechanisms(device: str) -> Iterator[AgreementRow]:
    """Compare the parallel and the step form of every mechanism in float32, and both with replayed graphs."""
    for name in list_mixers():
        model = _build_small(name).to(device)
        values = torch.arange(2 * model.config.image.positions, device=device).view(2, -1) * 7 % 16
        tokens = model.shift_values(values)
        stepped = follow(model, tokens)
        error = relative_error(stepped, model.attend(tokens)[0])
        yield build_row(f"{name}: parallel against step", error, MODEL_TOLERANCE)
        for kind in (FusedCudaEngine, CudaEngine):
            error = _replay_error(kind, model, tokens, stepped)
            yield build_row(f"{name}: {kind.name}, replayed against step", error, MODEL_TOLERANCE)
        if HalfSumsEngine.refusal(model) is None:  # plain torch does not update sums in bfloat16
            error = _replay_error(HalfSumsEngine, model, tokens, stepped)
            yield build_row(f"{name}: {HalfSumsEngine.name}, replayed against step", error, HALF_SUMS_TOLERANCE)
    for name, changes in _OTHER_STEPS.items():
        model = PixelModel(_COLOUR.model_copy(update=changes)).to(device).eval()
        tokens = model.shift_values(torch.arange(2 * _COLOUR.image.positions, device=device).view(2, -1) * 7 % 16)
        error = _replay_error(CudaEngine, model, tokens, follow(model, tokens))
        yield build_row(f"linear, {name}: cuda, replayed against step", error, MODEL_TOLERANCE)


def check_training(device: str) -> Iterator[AgreementRow]:
    """Compare four training steps, plain and by a graph that records the second, of every mechanism in float32."""
    for name in list_mixers():
        config = _build_small(name).config
        trainers = [build_trainer(config, None, 4, device, "fp32", graph) for graph in (False, True)]
        expected, found = (
            torch.tensor([(step.nats, step.gradient_norm) for step in (trainer.train_step() for _ in range(4))])
            for trainer in trainers
        )
        yield build_row(f"{name}: training with --graph", relative_error(found, expected), MODEL_TOLERANCE)


def _build_small(name: str) -> PixelModel:
    return build_checked_model(PassSetup(parse_variant(name, True), heads=2, head_width=16, positions=144))


def _replay_error(kind: type[CudaEngine], model: PixelModel, tokens: Tensor, expected: Tensor) -> float:
    """Return the error of the third image of an engine: the first runs, the second records, the third replays."""
    engine = kind(model, len(tokens))
    for _ in range(3):
        engine.start()
        found = torch.stack([engine.step(token).clone() for token in tokens.unbind(dim=1)], dim=1)
    return relative_error(found, expected)


def build_linear(feature_map: str, width: int, heads: int = 2) -> LinearAttention:
    shape = AttentionShape(heads=heads, key_width=width, value_width=width, positions=784, row=28)
    return LinearAttention(LinearOptions.model_validate({"feature_map": feature_map}), shape)


def draw_inputs(batch: int, heads: int, length: int, width: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Draw q, k and v [batch, heads, length, width]. The values are the same on every device."""
    drawn = torch.randn(3, batch, heads, length, width, generator=torch.Generator().manual_seed(length))
    return [part.to(device, dtype) for part in drawn]


def differentiate(attend: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the output, the state if `attend` returns one, and the gradients of the inputs (q, k and v).

    v serves as the gradient of the output.
    """
    leaves = [part.detach().requires_grad_() for part in inputs]
    found = attend(*leaves)
    y, state = found if isinstance(found, tuple) else (found, ())
    return [y, *(state or ()), *torch.autograd.grad(y, leaves, leaves[2].detach())]
