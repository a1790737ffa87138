"""Tests of bits/dim: nats are summed over all values and divided once, and the batch size has no effect."""

import math
import statistics
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from linformer_cli.config import ImageShape
from linformer_cli.evaluation.bits import Bits, measure_mean, measure_nats


def pictures(count: int, shape: tuple[int, ...] = (8, 8, 1)) -> np.ndarray:
    return np.random.default_rng(2).integers(0, 256, (count, *shape), dtype=np.uint8)


def measure_bits(*given: Any, **options: Any) -> Bits:
    return measure_nats(*given, **options).describe()


class Table(torch.nn.Module):
    """A model that looks up nats in a table; the first value of an image selects the row."""

    def __init__(self, nats: torch.Tensor) -> None:
        super().__init__()
        self.table = nats
        self.config = SimpleNamespace(image=ImageShape(height=1, width=nats.shape[1]))
        self.device = torch.device("cpu")
        self.batches: list[int] = []

    def nats(self, values: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        assert not self.training
        self.batches.append(len(values))
        return self.table[values[:, 0]]

    def images(self) -> np.ndarray:
        images = np.zeros((len(self.table), 1, self.table.shape[1], 1), dtype=np.uint8)
        images[:, 0, 0, 0] = range(len(self.table))
        return images


def test_bits_and_errors_match_a_computation_by_hand() -> None:
    # There are two images of two values; they have 1 + 3 and 2 + 0 bits.
    model = Table(torch.tensor([[1.0, 3.0], [2.0, 0.0]], dtype=torch.float64) * math.log(2))
    bits = measure_bits(model, model.images())
    assert bits.bits_per_dim == pytest.approx(6 / 4, rel=1e-12)
    # The images have 2 and 1 bits/dim, so the standard deviation is 1/sqrt(2) and the standard error is 1/2.
    assert bits.standard_error == pytest.approx(0.5, rel=1e-12)
    # Without their first values, the images have 3 and 0 bits.
    assert bits.bits_per_dim_without_first_value == pytest.approx(1.5, rel=1e-12)
    assert bits.standard_error_without_first_value == pytest.approx(1.5, rel=1e-12)
    assert (bits.images, bits.values_per_image) == (2, 2)


def test_the_standard_error_of_a_difference_comes_from_the_differences_of_single_images() -> None:
    # The images have 2 and 6 bits/dim with one model, and 1.5 and 5 with the other. The differences, 0.5 and 1, vary
    # much less than the bits/dim of either model.
    tables = [[[1.0, 3.0], [8.0, 4.0]], [[2.0, 1.0], [5.0, 5.0]]]
    models = [Table(torch.tensor(table, dtype=torch.float64) * math.log(2)) for table in tables]
    one, other = (measure_nats(model, model.images()) for model in models)  # type: ignore[arg-type]
    assert measure_mean(torch.tensor([[1.0, 1.0], [3.0, 3.0]])) == (2, 1)  # two runs without noise of images
    assert one.measure_difference(other) == pytest.approx((0.75, 0.25), rel=1e-12)
    assert other.measure_difference(one) == pytest.approx((-0.75, 0.25), rel=1e-12)
    assert one.describe().standard_error == pytest.approx(2, rel=1e-12)


@pytest.mark.parametrize("head", ["categorical", "mixture"])
def test_bits_of_a_real_model_match_a_computation_by_hand(build_tiny_model, head) -> None:
    model = build_tiny_model(dtype=torch.float64, head=head)
    images = pictures(5)
    bits = measure_bits(model, images, batch=2)
    values = torch.from_numpy(images.reshape(5, 64) // 16).long()
    logs = model.head.log_probabilities(model.attend(model.shift_values(values))[0]).detach()
    found = [[-float(logs[i, t, values[i, t]]) / math.log(2) for t in range(64)] for i in range(5)]
    whole = [math.fsum(row) / 64 for row in found]
    rest = [math.fsum(row[1:]) / 63 for row in found]
    assert bits.bits_per_dim == pytest.approx(statistics.fmean(whole), rel=1e-12)
    assert bits.standard_error == pytest.approx(statistics.stdev(whole) / math.sqrt(5), rel=1e-9)
    assert bits.bits_per_dim_without_first_value == pytest.approx(statistics.fmean(rest), rel=1e-12)
    assert bits.standard_error_without_first_value == pytest.approx(statistics.stdev(rest) / math.sqrt(5), rel=1e-9)


def test_results_do_not_depend_on_the_batch_size() -> None:
    nats = torch.rand(100, 37, generator=torch.Generator().manual_seed(0)) * 5
    model = Table(nats)
    found = []
    for batch, batches in ((1, [1] * 100), (7, [7] * 14 + [2]), (32, [32, 32, 32, 4]), (100, [100]), (1000, [100])):
        model.batches.clear()
        found.append(measure_bits(model, model.images(), batch))
        assert model.batches == batches
    assert len(set(found)) == 1


def test_out_of_memory_halves_the_batch_and_counts_every_image_once(monkeypatch) -> None:
    model = Table(torch.rand(50, 7, generator=torch.Generator().manual_seed(0)))
    expected = measure_bits(model, model.images())
    nats = model.nats

    def limited(values: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        if len(values) > 9:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return nats(values, labels)

    monkeypatch.setattr(model, "nats", limited)
    model.batches.clear()
    assert measure_bits(model, model.images()) == expected
    assert model.batches == [8] * 6 + [2]


def test_nats_in_float32_are_added_up_in_float64() -> None:
    nats = torch.rand(40, 5_000, generator=torch.Generator().manual_seed(0)) * 7
    nats[:, 0] = 1e6  # a float32 sum would lose the last digits of the other values
    model = Table(nats)
    bits = measure_bits(model, model.images())
    exact = math.fsum(nats.double().flatten().tolist()) / math.log(2) / nats.numel()
    rest = math.fsum(nats[:, 1:].double().flatten().tolist()) / math.log(2) / (40 * 4_999)
    assert bits.bits_per_dim == pytest.approx(exact, rel=1e-13)
    assert bits.bits_per_dim_without_first_value == pytest.approx(rest, rel=1e-9)


def test_one_image_has_no_standard_error_and_one_value_has_no_bits_without_the_first() -> None:
    model = Table(torch.full((1, 3), math.log(2)))
    bits = measure_bits(model, model.images())
    assert (bits.bits_per_dim, bits.standard_error) == (pytest.approx(1), None)
    model = Table(torch.full((2, 1), math.log(2)))
    bits = measure_bits(model, model.images())
    assert (bits.bits_per_dim, bits.bits_per_dim_without_first_value) == (pytest.approx(1), 0)


def test_dropout_is_off_while_measuring_and_the_mode_is_restored(build_tiny_model) -> None:
    model, images = build_tiny_model(dropout=0.5), pictures(4)
    expected = measure_bits(model, images)
    assert not model.training
    assert measure_bits(model.train(), images) == expected
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_every_image_is_measured_with_its_own_label(build_tiny_model) -> None:
    model = build_tiny_model(dtype=torch.float64, classes=3)
    images, labels = pictures(5), np.array([2, 0, 1, 2, 0, 1, 1])  # more labels than images: the first labels are used
    bits = measure_bits(model, images, batch=2, labels=labels)
    each = [measure_bits(model, images[i : i + 1], labels=labels[i : i + 1]).bits_per_dim for i in range(5)]
    assert bits.bits_per_dim == pytest.approx(statistics.mean(each), rel=1e-12)
    assert bits.bits_per_dim != measure_bits(model, images, labels=labels[1:]).bits_per_dim
    with pytest.raises(ValueError, match="needs labels"):
        measure_bits(model, images)
