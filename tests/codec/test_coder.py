"""Tests that sequences come back from the entropy coder, and that the frequencies are exact."""

import math

import numpy as np
import pytest
import torch
from interruptions import stop_after
from loops import loop_over
from machine import needs_library

from linformer_cli.codec.coder import Coder, Lanes, Predictor, identify_program
from linformer_cli.config import ImageShape
from linformer_cli.errors import Interrupted, LintxError, UsageError
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.sampling.engines.native import NativeEngine

pytest.importorskip("constriction")
pytestmark = needs_library
WHOLE = 2**24
# Heads, colours, classes and a model that needs no positions.
CHANGES = {
    "categorical": {},
    "mixture": {"head": "mixture"},
    "colour": {"image": ImageShape(height=4, width=5, channels=3, levels=256), "head": "mixture"},
    "classes": {"classes": 3},
    "optional class": {"classes": 3, "optional_class": True},
    "bytes": {"image": ImageShape(height=1, width=40), "embedding": "none", "context": "recent"},
}
every_model = pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)


def draw_values(model: PixelModel, count: int, seed: int = 0) -> np.ndarray:
    shape = model.config.image
    return np.random.default_rng(seed).integers(0, shape.levels, (count, shape.positions))


def draw_labels(model: PixelModel, count: int) -> np.ndarray | None:
    classes = model.config.required_classes
    return np.arange(count) % classes if classes else None


@every_model
def test_values_come_back(build_tiny_model, changes) -> None:
    model = build_tiny_model(**changes)
    values = draw_values(model, 7)
    lanes = Lanes(np.full(7, values.shape[1]), [3, 3, 1])
    coder = Coder(model)
    data, nats = coder.encode(lanes, values, draw_labels(model, 7))
    np.testing.assert_array_equal(coder.decode(lanes, data), values)
    own = float(nats.sum()) / math.log(2) + 7 * math.log2(max(1, model.config.required_classes))
    used = 8 * sum(map(len, data))
    # Each block ends with up to two incomplete words of 32 bits.
    assert own - 0.01 * own < used < own * 1.01 + 3 * 64


@every_model
def test_a_block_decodes_alone_and_in_other_batches(build_tiny_model, changes) -> None:
    model = build_tiny_model(**changes)
    values, labels = draw_values(model, 7), draw_labels(model, 7)
    lengths = np.full(7, values.shape[1])
    data, _ = Coder(model).encode(Lanes(lengths, [3, 3, 1]), values, labels)
    for blocks in ([0], [1, 2], [2]):
        rows = np.concatenate([np.arange(7)[3 * block : 3 * block + 3] for block in blocks])
        lanes = Lanes(lengths[rows], [len(range(7)[3 * block : 3 * block + 3]) for block in blocks])
        found = Coder(model).decode(lanes, [data[block] for block in blocks])
        np.testing.assert_array_equal(found, values[rows])


def test_an_optional_class_is_not_coded(build_tiny_model) -> None:
    model = build_tiny_model(**CHANGES["optional class"])
    coder, lanes = Coder(model), Lanes(np.full(4, 64), [4])
    values = draw_values(model, 4)
    data, nats = coder.encode(lanes, values, np.arange(4) % 3)
    np.testing.assert_array_equal(coder.decode(lanes, data), values)
    expected, expected_nats = coder.encode(lanes, values)
    assert data == expected and torch.equal(nats, expected_nats)


def test_sequences_may_end_early(build_tiny_model) -> None:
    model = build_tiny_model(**CHANGES["bytes"])
    lengths = np.array([40, 3, 40, 0, 17])
    values = draw_values(model, 5) * (np.arange(40) < lengths[:, None])
    coder, lanes = Coder(model), Lanes(lengths, [2, 3])
    data, nats = coder.encode(lanes, values)
    np.testing.assert_array_equal(coder.decode(lanes, data), values)
    assert nats[3] == 0 and nats[1] < nats[4] < nats[0]


def test_nothing_is_stored_after_the_end_of_a_sequence(build_tiny_model) -> None:
    model = build_tiny_model(**CHANGES["bytes"])
    coder, values = Coder(model), draw_values(model, 3)
    values[1:] = 0
    alone, _ = coder.encode(Lanes(np.array([40]), [1]), values[:1])
    assert coder.encode(Lanes(np.array([40, 0, 0]), [3]), values)[0] == alone


def test_models_without_positions_code_longer_sequences_than_in_training(build_tiny_model) -> None:
    model = build_tiny_model(**CHANGES["bytes"])
    values = np.random.default_rng(0).integers(0, 256, (2, 100))
    coder, lanes = Coder(model), Lanes(np.full(2, 100), [2])
    np.testing.assert_array_equal(coder.decode(lanes, coder.encode(lanes, values)[0]), values)


@every_model
def test_the_own_nats_are_those_of_the_engine(build_tiny_model, changes) -> None:
    model = build_tiny_model(**changes)
    values, labels = draw_values(model, 3), draw_labels(model, 3)
    engine = NativeEngine(model, 3, products=torch.int8)
    given = None if labels is None else torch.from_numpy(labels)
    tokens = model.shift_values(torch.from_numpy(values), given)
    steps = [engine.step(token).clone() for token in tokens.unbind(dim=1)]
    expected = -model.head.log_likelihood(torch.stack(steps, dim=1), torch.from_numpy(values))
    lanes = Lanes(np.full(3, values.shape[1]), [3])
    _, nats = Coder(model).encode(lanes, values, labels)
    torch.testing.assert_close(nats, expected.double().sum(dim=1), rtol=1e-5, atol=0)


@every_model
def test_frequencies_are_those_of_the_distribution(build_tiny_model, changes) -> None:
    model = build_tiny_model(**changes)
    predictor, engine = Predictor(model, 4), NativeEngine(model, 4, products=torch.int8)
    predictor.start()
    tokens = model.start_tokens(4)
    for values in draw_values(model, 4).T[:10]:
        frequencies = predictor.predict(tokens) + 1
        expected = model.head.log_probabilities(engine.step(tokens)).exp().numpy()
        assert (frequencies >= 1).all() and (frequencies == np.rint(frequencies)).all()
        assert (frequencies.sum(axis=1) == WHOLE).all()
        np.testing.assert_allclose(frequencies / WHOLE, expected, rtol=1e-4, atol=300 / WHOLE)
        tokens = torch.from_numpy(values)


def predict_sharply(model: PixelModel, sharpness: float) -> np.ndarray:
    """The first frequencies of a model whose head is changed by a factor of `sharpness`."""
    with torch.no_grad():
        model.head.projection.weight.mul_(sharpness)
        model.head.projection.bias.mul_(sharpness)
    predictor = Predictor(model, 1)
    predictor.start()
    return predictor.predict(model.start_tokens(1))[0] + 1


@loop_over("head", ["categorical", "mixture"])
@loop_over("sharpness", [0, 1e-3, 1, 1e3, 1e6, 1e30])
def test_the_sum_is_exact_for_flat_and_for_sharp_distributions(build_tiny_model, head, sharpness) -> None:
    frequencies = predict_sharply(build_tiny_model(head=head), sharpness)
    assert frequencies.sum() == WHOLE and frequencies.min() >= 1
    if head == "categorical" and sharpness == 0:
        assert frequencies.max() - frequencies.min() <= 16
    if head == "categorical" and sharpness == 1e30:
        assert frequencies.max() == WHOLE - 15


@every_model
def test_every_instruction_set_writes_the_same_data(build_tiny_model, instruction_set, changes, monkeypatch) -> None:
    model = build_tiny_model(**changes)
    values, labels = draw_values(model, 5), draw_labels(model, 5)
    lanes = Lanes(np.full(5, values.shape[1]), [5])
    data, _ = Coder(model).encode(lanes, values, labels)
    monkeypatch.undo()
    coder = Coder(model)
    assert coder.encode(lanes, values, labels)[0] == data
    np.testing.assert_array_equal(coder.decode(lanes, data), values)


def test_damaged_data_raise_nothing(build_tiny_model) -> None:
    """Data that no encoder wrote give some values, or zeros once the range coder notices."""
    model = build_tiny_model()
    lanes, rng = Lanes(np.full(2, 64), [2]), np.random.default_rng(0)
    coder = Coder(model)
    for data in (b"", b"\xff", b"\xff" * 400, *(rng.bytes(size) for size in range(0, 80, 7))):
        found = coder.decode(lanes, [data])
        assert found.shape == (2, 64) and found.min() >= 0 and found.max() < 16


def test_nan_is_an_error(build_tiny_model, raises_one_line) -> None:
    model = build_tiny_model()
    model.head.projection.bias.data[3] = torch.nan
    with raises_one_line(LintxError, "damaged"):
        Coder(model).encode(Lanes(np.full(1, 64), [1]), draw_values(model, 1))


def test_the_work_can_be_stopped_between_steps(build_tiny_model) -> None:
    model = build_tiny_model()
    with pytest.raises(Interrupted):
        Coder(model, stop_after(5)).encode(Lanes(np.full(1, 64), [1]), draw_values(model, 1))


def test_the_program_identifies_weights_and_network(build_tiny_model) -> None:
    one = identify_program(build_tiny_model())
    assert one == identify_program(build_tiny_model())
    assert one != identify_program(build_tiny_model(seed=1)) != identify_program(build_tiny_model(activation="relu"))


def test_one_line_says_that_a_model_has_no_exact_engine(build_tiny_model, raises_one_line) -> None:
    with raises_one_line(UsageError, "int8", "float64"):
        Coder(build_tiny_model(dtype=torch.float64))
