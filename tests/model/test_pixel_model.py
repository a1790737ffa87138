"""Tests of the whole model: attend equals step, probabilities of all images add up to 1, sizes match the paper."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import first_fast, loop_over
from tolerances import CAUSALITY, FLOAT32_DRIFT, FLOAT64, PROBABILITY_TOTAL, assert_agree, assert_all_agree
from torch import Tensor

from linformer_cli.attention.base import measure_state_bytes, state_tensors
from linformer_cli.config import ImageShape, ModelConfig
from linformer_cli.model.pixel_model import PixelModel, PixelState
from linformer_cli.presets import PRESETS

BuildModel = Callable[..., PixelModel]

VARIANTS: dict[str, dict[str, Any]] = {
    "-".join(map(str, [attention, size[2], context, embedding, norm, head])): {
        "size": size,
        "attention": attention,
        "context": context,
        "embedding": embedding,
        "norm": norm,
        "head": head,
    }
    for attention, size, context, embedding, norm, head in [
        *itertools.product(
            ("softmax", "linear"),
            ((5, 4, 1), (3, 3, 3)),
            ("previous", "neighbours"),
            ("grid", "paper"),
            ("pre", "post"),
            ("categorical", "mixture"),
        ),
        ("linear", (5, 4, 1), "wide", "grid", "pre", "categorical"),
        ("softmax", (3, 3, 3), "wide", "paper", "post", "mixture"),
        ("linear", (5, 4, 1), "hashed", "grid", "pre", "categorical"),
        ("softmax", (3, 3, 3), "hashed", "paper", "post", "mixture"),
        # These variants have gated or recurrent blocks. Embedding and head do not depend on the block, so fewer
        # combinations are enough.
        *itertools.product(
            ("gau", "flash", "lstm"),
            ((5, 4, 1), (3, 3, 3)),
            ("previous", "neighbours"),
            ("grid",),
            ("pre", "post"),
            ("categorical",),
        ),
    ]
}
for name, changes in {
    "linear-pixels-grid-pre-categorical": {},
    "softmax-pixels-paper-post-mixture": {
        **{"attention": "softmax", "embedding": "paper", "norm": "post", "head": "mixture"},
    },
    "lstm-pixels-grid-pre-categorical": {"attention": "lstm"},
}.items():
    VARIANTS[name] = {"size": (3, 3, 3), "context": "residual", **changes}


def covers_pairs(name: str) -> bool:
    """Whether a variant is one of those that together have each pair of settings; the others are slow."""
    attention, channels, context, embedding, norm, head = name.split("-")
    if context not in ("previous", "neighbours"):
        return True
    known, colour, near = attention == "softmax", channels == "3", context == "neighbours"
    if attention not in ("softmax", "linear"):
        return (norm == "post") == (colour != near)
    others = (embedding == "paper", norm == "post", head == "mixture")
    return others == (known != colour, known != near, colour != near)


every_variant = pytest.mark.parametrize(
    "variant",
    [
        pytest.param(value, id=name, marks=() if "pixels" in name or covers_pairs(name) else pytest.mark.slow)
        for name, value in VARIANTS.items()
    ],
)
# These variants include every mechanism, image and context, for tests that depend on nothing else.
some_variants = pytest.mark.parametrize(
    "variant", [value for name, value in VARIANTS.items() if name.endswith("grid-pre-categorical")]
)


def draw_values(model: PixelModel, batch: int = 2) -> Tensor:
    image = model.config.image
    return torch.randint(image.levels, (batch, image.positions), generator=torch.Generator().manual_seed(0))


def step_through(model: PixelModel, tokens: Tensor, state: PixelState | None = None) -> tuple[Tensor, PixelState]:
    state = model.init_state(len(tokens)) if state is None else state
    outputs = []
    for token in tokens.unbind(dim=1):
        parameters, state = model.step(token, state)
        outputs.append(parameters)
    return torch.stack(outputs, dim=1), state


@every_variant
def test_steps_and_blocks_match_a_single_pass(build_model: BuildModel, variant: dict[str, Any]) -> None:
    model = build_model(**variant)
    tokens = model.shift_values(draw_values(model))
    with torch.no_grad():
        whole, _ = model.attend(tokens)
        assert whole.abs().max() > 0.5, "outputs are too small to show errors"
        assert_agree(step_through(model, tokens)[0], whole, FLOAT64)
        for seed, empty in itertools.product(range(3), (True, False)):
            generator = torch.Generator().manual_seed(seed)
            outputs, state, start = [], model.init_state(2) if empty else None, 0
            while start < tokens.shape[1]:
                length = int(torch.randint(1, 12, (), generator=generator))
                y, state = model.attend(tokens[:, start : start + length], state)
                outputs.append(y)
                start += length
            assert_agree(torch.cat(outputs, dim=1), whole, FLOAT64)


@some_variants
def test_steps_and_parallel_passes_continue_each_other(build_model: BuildModel, variant: dict[str, Any]) -> None:
    model = build_model(**variant)
    tokens = model.shift_values(draw_values(model))
    with torch.no_grad():
        first, state = model.attend(tokens[:, :8], model.init_state(2))
        kept = [tensor.clone() for tensor in state_tensors(state)]
        third, _ = model.attend(tokens[:, 8:13], state)
        assert all(map(torch.equal, kept, state_tensors(state))), "attend modified its input state"
        second, state = step_through(model, tokens[:, 8:13], state)
        last, _ = model.attend(tokens[:, 13:], state)
        assert_agree(third, second, FLOAT64)
        assert_agree(torch.cat([first, second, last], dim=1), model.attend(tokens)[0], FLOAT64)


@some_variants
def test_gradients_are_split_invariant(build_model: BuildModel, variant: dict[str, Any]) -> None:
    model = build_model(**variant)
    tokens = model.shift_values(draw_values(model))

    def find_gradients(parameters: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(parameters.tanh().sum(), list(model.parameters()))

    expected = find_gradients(model.attend(tokens)[0])
    first, state = model.attend(tokens[:, :9])
    found = find_gradients(torch.cat([first, model.attend(tokens[:, 9:], state)[0]], dim=1))
    assert_all_agree(found, expected, FLOAT64)


@every_variant
def test_predictions_are_causal(build_model: BuildModel, variant: dict[str, Any]) -> None:
    model = build_model(**variant)
    values = draw_values(model, 1)
    positions = values.shape[1]
    # Image i of the batch differs from the first in every value from i on. Image i + positions differs only in value i.
    changed = values.repeat(2 * positions, 1)
    for place in range(positions):
        changed[place, place:] = 255 - changed[place, place:]
        changed[place + positions, place] = 255 - changed[place + positions, place]
    with torch.no_grad():
        before, _ = model.attend(model.shift_values(values))
        after, _ = model.attend(model.shift_values(changed))
    for place in range(positions):
        for row in (place, place + positions):
            assert_agree(after[row : row + 1, : place + 1], before[:, : place + 1], CAUSALITY)
            # With `previous`, a value is read at the next position. With neighbours, a value at the right border is
            # first read one row later.
            seen = place + 1 if variant["context"] == "previous" else place + model.config.image.values_per_row
            if seen < positions:
                assert (after[row] - before[0])[place + 1 : seen + 1].abs().max() > 1e-6


def test_images_of_a_batch_are_independent(build_model: BuildModel) -> None:
    for attention in ("softmax", "linear", "gau", "flash", "lstm"):
        model = build_model(attention=attention, size=(3, 3, 3))
        tokens = model.shift_values(draw_values(model, 3))
        others = tokens.clone()
        others[[0, 2]] = 255 - others[[0, 2]]
        with torch.no_grad():
            for run in (
                lambda tokens, model=model: model.attend(tokens)[0],
                lambda t, model=model: step_through(model, t)[0],
            ):
                assert_agree(run(others)[1], run(tokens)[1], CAUSALITY)
                assert_agree(run(tokens[1:2])[0], run(tokens)[1], FLOAT64)


@pytest.mark.slow
@loop_over(
    "attention, embedding",
    [("softmax", "grid"), ("linear", "paper"), ("gau", "grid"), ("flash", "grid"), ("lstm", "paper")],
)
def test_float32_does_not_drift_over_a_whole_image(build_model: BuildModel, attention: str, embedding: str) -> None:
    options = {"chunk": 64} if attention in ("linear", "flash") else {}
    changes = {"attention": attention, "attention_options": options, "embedding": embedding, "size": (14, 28, 1)}
    single, double = build_model(torch.float32, **changes), build_model(torch.float64, **changes)
    tokens = single.shift_values(draw_values(single, 1))
    with torch.no_grad():
        expected, _ = double.attend(tokens)
        assert expected.abs().max() > 1
        for found in (single.attend(tokens)[0], step_through(single, tokens)[0]):
            assert found.dtype == torch.float32
            assert_agree(found, expected, FLOAT32_DRIFT)


@loop_over(
    ("attention", "branches"), [("softmax", 2), ("linear", 2), ("gau", 1), ("flash", 1), ("lstm", 1), ("none", 1)]
)
@loop_over("layers", [1, 8])
def test_branches_add_up_to_the_scale_of_one_branch(build_config, attention: str, branches: int, layers: int) -> None:
    """Initial weights have variance 1 / inputs. Those at the end of a branch have 1 / (inputs * number of branches)."""
    torch.manual_seed(0)
    model = PixelModel(build_config(attention, layers=layers, width=64, feed_forward=96))
    for block in model.blocks:
        ends = block.branch_ends()
        assert len(ends) == branches
        for end in ends:
            assert end.out_features == 64
            expected = (end.in_features * branches * layers) ** -0.5
            assert end.weight.std().item() == pytest.approx(expected, rel=0.1)
            assert not end.bias.any()
        others = [
            linear
            for linear in block.modules()
            if isinstance(linear, torch.nn.Linear) and all(linear is not end for end in ends)
        ]
        for linear in others:
            assert linear.weight.std().item() == pytest.approx(linear.in_features**-0.5, rel=0.1)
            assert not linear.bias.any()


# The distribution.


@loop_over("attention", ["softmax", "linear"])
@loop_over("head", ["categorical", "mixture"])
@loop_over("embedding", ["grid", "paper"])
def test_the_probabilities_of_all_images_add_up_to_one(build_model, attention: str, head: str, embedding: str) -> None:
    for dtype in (torch.float32, torch.float64):
        model = build_model(dtype, attention=attention, head=head, embedding=embedding, size=(1, 3, 1), levels=4)
        images = torch.cartesian_prod(*[torch.arange(4)] * 3)
        with torch.no_grad():
            probabilities = (-model.nats(images).sum(dim=1)).double().exp()
        assert len(probabilities) == 64
        assert probabilities.std() > 0.002, "the distribution is almost uniform"
        assert probabilities.sum().item() == pytest.approx(1, abs=PROBABILITY_TOTAL)


@pytest.mark.parametrize("attention", first_fast(["linear", "gau"]))
def test_a_model_can_overfit_eight_images(attention: str) -> None:
    """Each image is a cross at a random place with random brightness."""
    generator = torch.Generator().manual_seed(0)
    images = torch.zeros(8, 8, 8, dtype=torch.int64)
    for image in images:
        top, left, brightness = torch.randint(0, 4, (3,), generator=generator).tolist()
        image[top : top + 4, left + 2] = 160 + 20 * brightness
        image[top + 2, left : left + 4] = 255 - 20 * brightness
    values = images.flatten(1)
    torch.manual_seed(0)
    network = PRESETS["tiny"].model_copy(update={"attention": attention})
    model = PixelModel(ModelConfig(**network.model_dump(), image=ImageShape(height=8, width=8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        bits_per_dim = model.nats(values).mean() / math.log(2)
        bits_per_dim.backward()
        optimizer.step()
    assert bits_per_dim.item() < 0.2


# Sizes.


@pytest.mark.parametrize(
    ("preset", "size", "parameters"),
    [("mnist-paper", (28, 28, 1), 6_359_198), ("cifar10-paper", (32, 32, 3), 12_677_278)],
)
def test_paper_presets_have_the_papers_size(preset: str, size: tuple[int, int, int], parameters: int) -> None:
    """The counts include a row for the start token, which the released code does not have."""
    image = ImageShape.model_validate(dict(zip(("height", "width", "channels"), size, strict=True)))
    model = PixelModel(ModelConfig(**PRESETS[preset].model_dump(), image=image))
    assert model.parameter_count() == parameters
    start_row = model.embedding.values.shape[1]
    assert start_row == 128
    width, blocks = 256, 8 if preset == "mnist-paper" else 16
    block = 4 * (width * width + width) + 2 * 4 * width * width + 4 * width + width + 2 * 2 * width
    published = 256 * start_row + blocks * block + 2 * width + (width + 1) * 30
    assert parameters == published + start_row


@some_variants
@loop_over(("dtype", "batch"), [(torch.float32, 1), (torch.float64, 3)])
def test_state_bytes_are_exact(build_model, variant: dict[str, Any], dtype: torch.dtype, batch: int) -> None:
    model = build_model(dtype, **variant)
    tokens = model.shift_values(draw_values(model, batch))
    with torch.no_grad():
        _, stepped = step_through(model, tokens)
        _, attended = model.attend(tokens)
    for state in (model.init_state(batch), stepped, attended):
        assert measure_state_bytes(state) == model.state_bytes(batch)
    _, state = step_through(model, tokens[:, :7], model.init_state(batch, capacity=7))
    assert measure_state_bytes(state) == model.state_bytes(batch, 7)
