"""Tests of the machine's ceilings: which products and copies are timed, and their rates."""

import pytest
import torch

from linformer_cli.bench.measure import ceilings as ceilings_module
from linformer_cli.bench.measure.ceilings import MOST_ROWS, Ceilings, time_samples


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Three samples take 1, 2 and 3 seconds. The list has an entry for each measurement."""
    done: list[object] = []

    def time_samples(work, device, repeats):
        done.append(work())
        return tuple(float(number + 1) for number in range(repeats))

    monkeypatch.setattr(ceilings_module, "time_samples", time_samples)
    monkeypatch.setattr(ceilings_module, "REPEATS", 3)
    return done


def test_the_rate_of_products_is_their_operations_per_second(timed) -> None:
    found = Ceilings("cpu").product([(8, 4), (4, 16)], 10, "fp32")
    assert found.flops == 2 * 10 * (8 * 4 + 4 * 16) and found.products == 2
    assert found.gigaflops == pytest.approx(found.flops / 2 / 1e9)
    assert (found.rows, found.precision, found.samples_seconds) == (10, "fp32", (1.0, 2.0, 3.0))


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_products_use_the_requested_precision(monkeypatch, timed, precision, dtype) -> None:
    seen = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        ceilings_module.functional,
        "linear",
        lambda x, w: seen.append((x.dtype, w.dtype, x.shape, w.shape)) or linear(x, w),
    )
    Ceilings("cpu").product([(8, 4), (8, 2)], 3, precision)
    assert seen == [(dtype, dtype, (3, 8), (4, 8)), (dtype, dtype, (3, 8), (2, 8))]


def test_a_copy_counts_bytes_read_and_bytes_written(monkeypatch, timed) -> None:
    monkeypatch.setattr(ceilings_module, "measure_free_memory", lambda device: 8 * 4000)
    found = Ceilings("cpu").copy
    assert found.copied_bytes == 4000
    assert found.gigabytes_per_second == pytest.approx(2 * 4000 / 2.0 / 1e9)


def test_each_ceiling_is_measured_once(monkeypatch, timed) -> None:
    monkeypatch.setattr(ceilings_module, "measure_free_memory", lambda device: 8000)
    ceilings = Ceilings("cpu")
    first = ceilings.product([(8, 4), (8, 4)], 5, "fp32")
    assert ceilings.product([(8, 4), (8, 4)], 5, "fp32") is first
    assert ceilings.product([(8, 4)], 5, "fp32") is not first
    assert ceilings.product([(8, 4)], 5, "bf16").precision == "bf16"
    assert ceilings.product([(8, 4)], 10 * MOST_ROWS, "fp32").rows == MOST_ROWS
    elsewhere = Ceilings("meta")  # a device without contents, in place of a GPU
    assert elsewhere.product([(8, 4)], 10 * MOST_ROWS, "fp32").rows == 10 * MOST_ROWS
    assert ceilings.copy is ceilings.copy
    described = ceilings.describe()
    assert [row.products for row in described.products] == [2, 1, 1, 1] and described.copy is ceilings.copy
    assert len(timed) == 6


def test_short_work_is_repeated_within_a_sample() -> None:
    calls = []
    samples = time_samples(lambda: calls.append(0), "cpu", 2)
    assert len(samples) == 2 and min(samples) > 0
    assert len(calls) > 100
