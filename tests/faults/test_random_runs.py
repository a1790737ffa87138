"""Tests that random changes of the files of a run give a result or a one-line error."""

import contextlib
import json
from pathlib import Path
from typing import Any

from faults.random_cases import anything, cases, nearly, one_line_or_result
from hypothesis import given
from hypothesis import strategies as st

from linformer_cli.checkpoint import load_training_state, read_checkpoint
from linformer_cli.comparison.figures import read_figures
from linformer_cli.metrics import METRICS_FILE, cut_metrics, load_runs
from linformer_cli.training.progress import Progress
from linformer_cli.training.run_folder import RunFolder
from linformer_cli.training.settings import read_tables

SPEED = {"batch": 4, "device": "cpu", "precision": "fp32", "processor": "a processor", "threads": 1}
texts = nearly | st.text(max_size=20) | st.sampled_from(["\u00b2", "9" * 400, "9" * 5000, "nan", "[" * 3000, "\0"])


def test_random_run_files_give_a_result_or_a_one_line_error(copy: Path, share: float) -> None:
    run = RunFolder(copy)
    names = (METRICS_FILE, "config.toml")
    whole = {name: (copy / name).read_text(encoding="utf-8") for name in names}

    @cases(share, 2500)
    @given(
        name=st.sampled_from(names),
        places=st.lists(st.tuples(st.floats(0, 1), texts), min_size=1, max_size=4),
        kept=st.floats(0.2, 1.5),
        cell=st.booleans(),
    )
    def attempt(name: str, places: list[tuple[float, str]], kept: float, cell: bool) -> None:
        parts = whole[name].replace(" = ", ",= ,").split(",") if cell else list(whole[name])
        for place, text in places:
            parts[int(place * (len(parts) - 1))] = text
        text = (",".join(parts).replace(",= ,", " = ") if cell else "".join(parts))[: int(kept * len(whole[name]))]
        (copy / name).write_text(text, encoding="utf-8", errors="replace", newline="")
        one_line_or_result(run.read_config)
        one_line_or_result(lambda: read_tables(run.config_file))
        one_line_or_result(lambda: load_runs([copy]))
        one_line_or_result(lambda: cut_metrics(run.metrics_file, 2))
        for other in names:
            (copy / other).write_text(whole[other], encoding="utf-8", newline="")

    attempt()


def test_random_progress_is_refused_or_has_the_right_types(copy: Path, share: float) -> None:
    values = load_training_state(read_checkpoint(copy / "last")).values
    keys = [*values, *(f"loss.{key}" for key in values["loss"]), "more"]

    @cases(share, 2500)
    @given(changes=st.dictionaries(st.sampled_from(keys), anything, min_size=1, max_size=3))
    def attempt(changes: dict[str, Any]) -> None:
        changed = json.loads(json.dumps(values))
        for key, value in changes.items():
            table = changed["loss"] if key.startswith("loss.") and isinstance(changed["loss"], dict) else changed
            table[key.removeprefix("loss.")] = value
        with contextlib.suppress(ValueError, KeyError):  # what `Trainer.resume` reports
            progress = Progress.from_values(changed)
            assert type(progress.step) is int and 0 <= progress.step <= 2**40
            assert type(progress.loss.mean) is float and progress.loss.mean == progress.loss.mean

    attempt()


def test_random_times_of_a_comparison_are_dropped_or_usable(tmp_path: Path, share: float) -> None:
    file = tmp_path / "sampling.json"

    @cases(share, 500)
    @given(changes=st.dictionaries(st.sampled_from([*SPEED, "samples_seconds"]), anything, max_size=2))
    def attempt(changes: dict[str, Any]) -> None:
        file.write_text(json.dumps({**SPEED, "samples_seconds": [0.5, 1.5], **changes}))
        assert all(0 < seconds < float("inf") for seconds in read_figures(file, SPEED))

    attempt()
