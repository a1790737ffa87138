"""Tests of models with classes: the class adds its vector at every position, in parallel passes and in steps."""

import math
from collections.abc import Callable

import pytest
import torch
from tolerances import FLOAT64, assert_agree
from torch import Tensor

from linformer_cli.attention.base import fork_state, measure_state_bytes
from linformer_cli.model.pixel_model import PixelModel

CLASSES = 3
LABELS = torch.tensor([2, 0, 1, 2])
BuildModel = Callable[..., PixelModel]
kinds = pytest.mark.parametrize(
    "changes",
    [{}, {"embedding": "paper", "context": "previous"}, {"attention": "lstm"}, {"attention": "gau"}],
    ids=["grid", "paper", "lstm", "gated"],
)


def draw_values(model: PixelModel) -> Tensor:
    positions = model.config.image.positions
    return torch.randint(256, (len(LABELS), positions), generator=torch.Generator().manual_seed(1))


@kinds
@torch.no_grad()
def test_a_class_adds_its_vector_at_every_position(build_model: BuildModel, changes: dict[str, str]) -> None:
    # The second model has no classes. Adding the vector of a class to another of its tables has the same effect.
    model = build_model(classes=CLASSES, **changes)
    plain = build_model(**changes)
    values = draw_values(model)
    for label in range(CLASSES):
        weights = model.state_dict()
        vector = weights.pop("embedding.classes.weight")[label]
        plain.load_state_dict(weights)
        if "embedding" in changes:
            half = len(vector) // 2
            plain.embedding.values += vector[:half]  # each position reads one row of this table
            plain.embedding.sinusoids = model.embedding.sinusoids + vector[half:]
        else:
            plain.embedding.row.weight += vector
        expected = plain.nats(values)
        assert_agree(model.nats(values, torch.full((len(values),), label)), expected, FLOAT64)
        other = model.nats(values, torch.full((len(values),), (label + 1) % CLASSES))
        assert bool((other != expected).all())


@kinds
@torch.no_grad()
def test_parallel_passes_and_steps_agree_and_images_keep_their_class(build_model, changes: dict[str, str]) -> None:
    model = build_model(classes=CLASSES, **changes)
    values = draw_values(model)
    tokens = model.shift_values(values, LABELS)
    assert tokens[:, 0].tolist() == LABELS.tolist()
    whole, _ = model.attend(tokens)
    for image, label in enumerate(LABELS.tolist()):
        alone, _ = model.attend(model.shift_values(values[image : image + 1], torch.tensor([label])))
        assert_agree(alone[0], whole[image], FLOAT64)
    state, outputs = model.init_state(len(tokens)), []
    for token in tokens.unbind(dim=1):
        token = token.clone()
        parameters, state = model.step(token, state)
        token.fill_(0)  # no state may share the caller's memory
        outputs.append(parameters)
    assert_agree(torch.stack(outputs, dim=1), whole, FLOAT64)
    assert measure_state_bytes(state) == model.state_bytes(len(tokens))
    # The values are read in two parts, with a fork in between. Each copy continues with the class of its image.
    _, state = model.attend(tokens[:, :7])
    rest, _ = model.attend(tokens[:, 7:].repeat_interleave(2, dim=0), fork_state(state, 2))
    assert_agree(rest, whole[:, 7:].repeat_interleave(2, dim=0), FLOAT64)


def test_an_unknown_class_is_refused(build_model: BuildModel) -> None:
    model = build_model(classes=CLASSES)
    for wrong in ([0, 3], [-1, 0], [0], [0, 1, 2]):
        with pytest.raises(ValueError, match="2 classes from 0 to 2"):
            model.start_tokens(2, torch.tensor(wrong))
    assert model.start_tokens(2, torch.tensor([2, 1])).tolist() == [2, 1]
    with pytest.raises(ValueError, match="from 0 to 0"):
        build_model().start_tokens(1, torch.tensor([1]))
    with pytest.raises(ValueError, match="needs labels"):
        model.nats(draw_values(model))


def test_default_classes_rotate(build_model: BuildModel) -> None:
    assert build_model(classes=CLASSES).take_turns(range(2, 9)).tolist() == [2, 0, 1, 2, 0, 1, 2]
    assert build_model().take_turns(range(2, 5)).tolist() == [0, 0, 0]


def test_the_likelihood_without_a_class_is_the_mean_over_the_classes(build_model: BuildModel) -> None:
    # For images of two values, p(image) is the mean of p(image | class), so it is at least p(image | class) / classes.
    model = build_model(classes=CLASSES, size=(1, 2, 1), levels=4)
    values = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    with torch.no_grad():
        nats = torch.stack([model.nats(values, torch.full((16,), label)).sum(dim=1) for label in range(CLASSES)])
    assert_agree(torch.exp(-nats).sum(dim=1), torch.ones(CLASSES, dtype=torch.float64), FLOAT64)
    whole = -torch.exp(-nats).mean(dim=0).log() / math.log(2) / 2
    bounds = nats / math.log(2) / 2 + model.config.class_bits_per_dim
    assert bool((bounds >= whole).all())
    assert model.config.class_bits_per_dim == pytest.approx(math.log2(3) / 2)
