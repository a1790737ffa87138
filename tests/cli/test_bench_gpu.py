"""Tests of `lintx bench gpu` and its output file."""

import json

import pytest
import torch

from linformer_cli.bench import gpu
from linformer_cli.bench.gpu import GpuBench
from linformer_cli.evaluation.agreement import AgreementRow, build_row

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.mark.smoke
@without_gpu
def test_without_a_gpu_nothing_is_measured(lintx, tmp_path) -> None:
    outcome = lintx("bench", "gpu", "--out", tmp_path / "gpu.json")
    assert outcome.code == 2
    assert "there is no CUDA device here" in outcome.stderr and "--tiny" in outcome.stderr
    assert not list(tmp_path.iterdir())


def test_the_file_has_the_report_and_a_failed_check_sets_the_exit_code(lintx, tmp_path, monkeypatch) -> None:
    found: list[AgreementRow] = []
    monkeypatch.setattr(gpu, "check_attention", lambda *arguments: found)
    monkeypatch.setattr(gpu, "check_engines", lambda *arguments: [])
    for name in ("check_mechanisms", "check_training"):
        monkeypatch.setattr(gpu, name, lambda *arguments: [])
    for name in ("measure_sampling", "measure_many", "measure_training", "measure_attention"):
        monkeypatch.setattr(GpuBench, name, lambda self: None)
    arguments = ["bench", "gpu", "--tiny", "--device", "cpu", "--out", tmp_path / "deep" / "gpu.json", "--json"]
    outcome = lintx(*arguments)
    assert outcome.code == 0, outcome.stderr
    assert json.loads((tmp_path / "deep" / "gpu.json").read_text()) == outcome.document
    found.append(build_row("a kernel", float("inf"), 1e-4))
    outcome = lintx(*arguments)
    assert outcome.code == 1 and "failed: a kernel" in outcome.stderr
