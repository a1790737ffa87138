"""Tests of models whose class is optional: one model has p(image) and p(image | class)."""

from collections.abc import Callable

import pytest
import torch
from machine import HAS_LIBRARY
from tolerances import FLOAT64, assert_agree
from torch import Tensor

from linformer_cli.config import ModelConfig
from linformer_cli.evaluation.agreement import measure_agreement
from linformer_cli.evaluation.bits import stepped_nats
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.sampling.engines import EngineCache

CLASSES, LEVELS, POSITIONS = 3, 3, 4
ENGINES = ("reference", "native") if HAS_LIBRARY else ("reference",)
# Every image of four values.
IMAGES = torch.cartesian_prod(*[torch.arange(LEVELS)] * POSITIONS)
# In class c, a value is c with probability 0.8, and each of the others with probability 0.1.
TRUTH = torch.stack([(0.1 + 0.7 * torch.eq(IMAGES, label).double()).log().sum(dim=1).exp() for label in range(CLASSES)])


def label_all(label: int | None) -> Tensor | None:
    return None if label is None else torch.full((len(IMAGES),), label)


@pytest.fixture(scope="module")
def trained(build_model: Callable[..., PixelModel]) -> PixelModel:
    """A model trained on all images of all classes, with the class and without it."""
    model = build_model(classes=CLASSES, optional_class=True, size=(1, POSITIONS, 1), levels=LEVELS)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    images, labels = IMAGES.repeat(CLASSES + 1, 1), torch.arange(CLASSES + 1).repeat_interleave(len(IMAGES))
    weights = torch.cat([TRUTH.flatten() / CLASSES, TRUTH.mean(dim=0)])
    for _ in range(120):
        optimizer.zero_grad()
        (weights * model.nats(images, labels).sum(dim=1)).sum().backward()
        optimizer.step()
    return model


@torch.no_grad()
def test_a_model_learns_both_distributions(trained: PixelModel) -> None:
    for label, truth in ((None, TRUTH.mean(dim=0)), *enumerate(TRUTH)):
        found = torch.exp(-trained.nats(IMAGES, label_all(label)).sum(dim=1))
        assert float((found - truth).abs().sum() / 2) < 0.03  # the total variation
    apart = torch.exp(-trained.nats(IMAGES, label_all(0)).sum(dim=1)) - TRUTH.mean(dim=0)
    assert float(apart.abs().sum() / 2) > 0.5


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_measures_both_likelihoods(trained: PixelModel, engine: str) -> None:
    model = PixelModel(trained.config)
    model.load_state_dict(trained.state_dict())
    for label in (None, *range(CLASSES)):
        with torch.no_grad():
            expected = trained.nats(IMAGES, label_all(label)).float()
        found = stepped_nats(EngineCache(engine, model.eval()), IMAGES, label_all(label))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_parallel_passes_and_steps_agree_in_a_batch_with_and_without_classes(trained: PixelModel) -> None:
    labels = torch.arange(len(IMAGES)) % (CLASSES + 1)
    whole, _ = trained.attend(trained.shift_values(IMAGES, labels))
    without, _ = trained.attend(trained.shift_values(IMAGES))
    assert_agree(whole[labels == CLASSES], without[labels == CLASSES], FLOAT64)
    assert bool((whole[labels != CLASSES] != without[labels != CLASSES]).any(dim=(1, 2)).all())
    state, outputs = trained.init_state(len(IMAGES)), []
    for token in trained.shift_values(IMAGES, labels).unbind(dim=1):
        parameters, state = trained.step(token, state)
        outputs.append(parameters)
    assert_agree(torch.stack(outputs, dim=1), whole, FLOAT64)
    assert measure_agreement(trained).passed


def test_images_have_no_class_by_default(trained: PixelModel) -> None:
    assert trained.start_tokens(2).tolist() == trained.take_turns(range(2)).tolist() == [CLASSES] * 2
    assert trained.start_tokens(2, torch.tensor([0, CLASSES])).tolist() == [0, CLASSES]
    with pytest.raises(ValueError, match="from 0 to 3"):
        trained.start_tokens(1, torch.tensor([CLASSES + 1]))
    assert trained.embedding.classes is not None and trained.embedding.classes.num_embeddings == CLASSES + 1


def test_old_configurations_have_no_optional_class(trained: PixelModel) -> None:
    config = trained.config
    assert (config.required_classes, config.label_count, config.default_label) == (0, 4, 3)
    old = ModelConfig.model_validate(config.model_dump(exclude={"optional_class"}))
    assert (old.required_classes, old.label_count, old.default_label) == (3, 3, 0)
