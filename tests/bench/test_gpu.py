"""Tests of `bench gpu` at tiny sizes on the CPU."""

import json
from types import SimpleNamespace

import pytest
from fixed_ceilings import FixedCeilings
from interruptions import stop_after
from machine import HAS_LIBRARY, NO_LIBRARY, NO_TRITON

from linformer_cli.attention import linear
from linformer_cli.attention.kernels import registry
from linformer_cli.attention.kernels.registry import Operation
from linformer_cli.bench import gpu, gpu_checks
from linformer_cli.bench.gpu import GpuBench, GpuReport, GpuSizes
from linformer_cli.bench.gpu_checks import check_attention
from linformer_cli.bench.measure import attention_pass
from linformer_cli.config import ImageShape
from linformer_cli.errors import Interrupted
from linformer_cli.report.tables import to_json
from linformer_cli.sampling.engines import cuda
from linformer_cli.sampling.engines.ahead import AheadEngine
from linformer_cli.sampling.engines.cuda import CudaEngine, HalfSumsEngine


@pytest.fixture(scope="module")
def found() -> tuple[GpuReport, list[str]]:
    """The report of one complete run, and the JSON documents saved after its parts."""
    saved: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "Ceilings", FixedCeilings)
        patch.setattr(gpu_checks, "list_mixers", lambda: ["linear", "softmax", "lsh"])
        report = GpuBench("cpu", GpuSizes(), save=lambda report: saved.append(to_json(report))).run()
    return report, saved


@pytest.mark.slow
def test_every_part_gives_its_checks_and_rows(found) -> None:
    report, saved = found
    documents = [json.loads(text) for text in saved]  # after each of nine parts, and after each group of rows
    assert len(documents) == 9 + 2 + 1 + 1 and documents[-1] == json.loads(to_json(report))
    assert documents[0]["checks"] and documents[0]["ceilings"] and not documents[0]["sampling"]
    assert {"Triton kernels need a CUDA device", "look-ahead: it runs on CUDA devices only"} <= set(report.missing)
    assert report.failed == {} and report.passed
    names = [check.name for check in report.checks]
    assert len(names) == len(set(names))
    assert [name for name in names if "parallel" in name] == [
        f"{name}: parallel against step" for name in ("linear", "softmax", "lsh")
    ]
    assert sum(name.endswith("cuda, replayed against step") for name in names) == 3 + 3
    assert sum(name.endswith("cuda-fused, replayed against step") for name in names) == 3
    assert sum(name.endswith(": training with --graph") for name in names) == 3
    assert sum("T = 20" in name for name in names) == 2 * 3 * 2
    assert sum(name.startswith("engine ") for name in names) == 4
    assert all(0 <= check.error <= check.tolerance for check in report.checks)
    assert {(row.engine, row.precision) for row in report.sampling} >= {("reference", "fp32"), ("reference", "bf16")}
    assert {row.attention for row in report.sampling} == {"linear", "softmax"}
    assert all(row.times_softmax or row.times_softmax_of_other_engine for row in report.sampling if row.batch == 2)
    shares = [row.product_share for row in report.sampling if row.images_per_second]
    assert len(shares) >= 2 and min(shares) > 0
    (many,) = (row for row in report.sampling if row.batch == 3)
    assert many.images_per_second and many.attention == "linear" and many.state_bytes > 0
    assert {row.attention for row in report.training} == {"linear", "softmax"}
    assert [row.name for row in report.attention[:3]] == ["linear", "linear, plain torch", "torch's softmax"]
    assert all(row.seconds > 0 for row in report.attention)
    assert report.ceilings is not None and report.environment["versions"]["torch"]


@pytest.mark.skipif(not HAS_LIBRARY, reason=NO_LIBRARY)
def test_a_wrong_kernel_is_noticed(monkeypatch) -> None:
    bench = GpuBench("cpu", GpuSizes())
    real = linear.LINEAR_ATTENTION.cpu
    wrong = Operation(lambda q, k, v, *rest: real(q, k, 1.1 * v, *rest))
    monkeypatch.setattr(linear, "LINEAR_ATTENTION", wrong)
    bench.record(check_attention("cpu", (1, 20)))
    assert len(bench.result.checks) == 24 and not bench.result.passed
    assert all(not check.passed for check in bench.result.checks)


@pytest.mark.slow
def test_sums_in_bfloat16_are_checked_where_they_are_supported(monkeypatch) -> None:
    pytest.importorskip("triton", reason=NO_TRITON)
    monkeypatch.setattr(registry, "has_triton", lambda device: True)
    monkeypatch.setattr(HalfSumsEngine, "refusal", lambda model, products=None: None)
    monkeypatch.setattr(gpu_checks, "list_mixers", lambda: ["retention"])
    monkeypatch.setattr(gpu_checks, "_OTHER_STEPS", {})
    monkeypatch.setattr(attention_pass, "_CHECKED_IMAGE", ImageShape(height=2, width=4, levels=16))
    errors = {row.name: row.error for row in gpu_checks.check_mechanisms("cpu") if row.passed}
    assert len(errors) == 4
    # The sums are rounded in this check only.
    halves = errors["retention: cuda-fused:state=bf16, replayed against step"]
    assert 10 * errors["retention: cuda-fused, replayed against step"] < halves < gpu_checks.HALF_SUMS_TOLERANCE


@pytest.mark.slow
def test_look_ahead_is_checked_and_timed(monkeypatch, build_tiny_model) -> None:
    pytest.importorskip("triton", reason=NO_TRITON)
    model = build_tiny_model(head_width=16, layers=1, image=ImageShape(height=3, width=4, levels=4))
    monkeypatch.setattr(registry, "has_triton", lambda device: True)
    monkeypatch.setattr(CudaEngine, "refusal", lambda model, products=None: None)
    monkeypatch.setattr(cuda, "triton_refusal", lambda device: None)
    monkeypatch.setattr(gpu, "Ceilings", FixedCeilings)
    monkeypatch.setattr(gpu, "open_checkpoint", lambda *name: (SimpleNamespace(name="tiny"), model))
    monkeypatch.setattr(gpu_checks, "COMPARED_IMAGES", 2)
    monkeypatch.setattr(AheadEngine, "window", 4)
    bench = GpuBench("cpu", GpuSizes(limit_seconds=1000))
    bench.measure_look_ahead()
    (check,) = bench.result.checks
    assert check.name.startswith("engine cuda-fused:look-ahead=16: share of images") and check.error == 0
    rows = [(row.engine, row.look_ahead, row.batch) for row in bench.result.sampling]
    assert rows == [("cuda-fused", False, 1), ("cuda-fused:look-ahead=16", True, 1)]
    assert all(row.images_per_second for row in bench.result.sampling)
    # A pass that keeps what is wrong is noticed.
    monkeypatch.setattr(AheadEngine, "start", lambda engine, state=None: CudaEngine.start(engine, state))
    monkeypatch.setattr(AheadEngine, "_passes", 0, raising=False)
    assert not all(row.passed for row in gpu_checks.check_look_ahead(model))


def test_a_part_that_fails_does_not_stop_the_others(monkeypatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(gpu, "Ceilings", FixedCeilings)
    for name in ("record", "measure_sampling", "measure_training"):
        monkeypatch.setattr(GpuBench, name, fail if name == "measure_sampling" else lambda *arguments: None)
    monkeypatch.setattr(gpu, "find_flash_linear_attention", lambda: None)
    report = GpuBench("cpu", GpuSizes()).run()
    assert report.failed == {"sampling": "RuntimeError: no such instruction"} and not report.passed
    assert report.sampling and report.attention and "flash-linear-attention" in report.missing


def test_a_part_that_is_out_of_time_keeps_its_rows_and_leaves_the_others_theirs(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "Ceilings", FixedCeilings)
    for name in ("measure_sampling", "measure_training", "measure_many", "measure_attention"):
        monkeypatch.setattr(GpuBench, name, lambda bench: None)
    report = GpuBench("cpu", GpuSizes(seconds=0)).run()
    assert report.cut == [f"{name} checks" for name in ("mechanism", "training", "attention", "engine")]
    assert len(report.checks) == 4 and report.passed


def test_an_interruption_keeps_what_was_measured_and_begins_nothing_else(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "Ceilings", FixedCeilings)
    bench = GpuBench("cpu", GpuSizes(), check=stop_after(1))
    with pytest.raises(Interrupted):
        bench.run()
    assert bench.result.checks and not bench.result.sampling
    begun: list[str] = []
    monkeypatch.setattr(gpu, "measure_groups", lambda groups, bench: begun.append("group") or (["row"], "interrupted"))
    bench = GpuBench("cpu", GpuSizes(), check=stop_after(1))
    with pytest.raises(Interrupted):
        bench.measure_sampling()
    assert begun == ["group"] and bench.result.sampling == ["row"]
    with pytest.raises(Interrupted):
        GpuBench("cpu", GpuSizes(), check=stop_after(5)).measure_attention()  # between passes


def test_another_library_is_timed_without_copying_its_inputs(monkeypatch) -> None:
    seen: list[tuple[int, tuple[int, ...], bool]] = []

    def attend(q, k, v, scale, normalize):
        seen.append((v.data_ptr(), tuple(v.shape), v.is_contiguous()))
        return q * k * v, None

    monkeypatch.setattr(gpu.importlib, "import_module", lambda name: SimpleNamespace(chunk_linear_attn=attend))
    bench = GpuBench("cpu", GpuSizes())
    bench.measure_attention()
    assert [row.name for row in bench.result.attention][-1] == "flash-linear-attention" and not bench.result.missing
    assert seen == [(seen[0][0], (1, 20, 2, 32), True)] * 2  # a warm-up and one repeat
