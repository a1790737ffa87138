"""The machine's ceilings: what is multiplied and copied, and how seconds become GFLOP/s and GB/s."""

import pytest
import torch

from linformer_cli.bench.measure import ceilings as ceilings_module
from linformer_cli.bench.measure.ceilings import MOST_ROWS, Ceilings, measure_copy_ceiling, measure_product_ceiling


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every sample takes 1, 2, 3 .. seconds; the works are run once and kept."""
    works: list[object] = []

    def measure(work, device, repeats):
        work()
        works.append(work)
        return tuple(float(number + 1) for number in range(repeats))

    monkeypatch.setattr(ceilings_module, "_time", measure)
    return works


def test_products_are_counted_and_divided(seconds) -> None:
    found = measure_product_ceiling([(8, 4), (4, 16)], 10, "fp32", "cpu", repeats=3)
    assert found.flops == 2 * 10 * (8 * 4 + 4 * 16)
    assert found.gigaflops == found.flops / 2 / 1e9
    assert found.gigaflops_quartiles == (found.flops / 2.5 / 1e9, found.flops / 1.5 / 1e9)
    assert (found.rows, found.precision, found.samples_seconds) == (10, "fp32", (1.0, 2.0, 3.0))


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_products_are_in_the_precision_asked_for(monkeypatch, seconds, precision, dtype) -> None:
    seen = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        ceilings_module.functional,
        "linear",
        lambda x, w: seen.append((x.dtype, w.dtype, x.shape, w.shape)) or linear(x, w),
    )
    measure_product_ceiling([(8, 4), (8, 2)], 3, precision, "cpu", repeats=1)
    assert seen == [(dtype, dtype, (3, 8), (4, 8)), (dtype, dtype, (3, 8), (2, 8))]


def test_a_copy_reads_and_writes(seconds) -> None:
    found = measure_copy_ceiling("cpu", copied_bytes=4000, repeats=3)
    assert found.copied_bytes == 4000
    assert found.gigabytes_per_second == 2 * 4000 / 2.0 / 1e9


def test_each_ceiling_is_measured_once(seconds) -> None:
    ceilings = Ceilings("cpu", repeats=2)
    first = ceilings.product([(8, 4), (8, 4)], 5, "fp32")
    assert ceilings.product([(8, 4), (8, 4)], 5, "fp32") is first
    assert ceilings.product([(8, 4)], 5, "fp32") is not first
    assert ceilings.product([(8, 4)], 5, "bf16").precision == "bf16"
    assert ceilings.product([(8, 4)], 10 * MOST_ROWS, "fp32").rows == MOST_ROWS
    assert ceilings.copy is ceilings.copy
    described = ceilings.describe()
    assert [row["products"] for row in described["products"]] == [2, 1, 1, 1]
    assert len(seconds) == 5


def test_short_work_is_repeated_within_a_sample() -> None:
    calls = []
    samples = ceilings_module._time(lambda: calls.append(0), "cpu", 2)
    assert len(samples) == 2 and min(samples) > 0
    assert len(calls) > 100
