"""Tests of choosing and loading a library, and of every library that this processor can run."""

import functools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from loops import loop_over
from machine import needs_library

from linformer_cli.errors import UsageError
from linformer_cli.native import build, library
from linformer_cli.native.library import NoLibrary
from linformer_cli.sampling.decode import Sampler
from linformer_cli.sampling.engines import NATIVE
from linformer_cli.sampling.engines.native import NativeEngine
from linformer_cli.sampling.engines.reference import ReferenceEngine

EVERY, LIBRARIES = build.this_machine().instruction_sets, build.LIBRARIES


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of libraries, which is empty. Libraries are compared with the C++ of the package."""
    monkeypatch.setattr(build, "LIBRARIES", tmp_path)
    return tmp_path


def test_the_requested_library_is_loaded(instruction_set) -> None:
    chosen = library.try_library()
    assert isinstance(chosen, library.Library)
    assert chosen.instruction_set.name == instruction_set
    assert Path(chosen.functions._name) == build.library_file(build.this_machine(), chosen.instruction_set)
    assert f"{instruction_set} (" in library.describe_library() and library.VARIABLE in library.describe_library()


@loop_over("products", [torch.float32, torch.bfloat16])
@loop_over("attention", ["linear", "softmax"])
def test_every_library_steps_as_the_model_does(build_tiny_model, instruction_set, attention, products) -> None:
    model = build_tiny_model(attention=attention)
    engines = [NativeEngine(model, 5, products=products), ReferenceEngine(model, 5)]
    tolerance = 1e-4 if products == torch.float32 else 0.2
    for token in torch.randint(0, 16, (20, 5), generator=torch.Generator().manual_seed(1)):
        found, expected = (engine.step(token).clone() for engine in engines)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@needs_library
def test_a_library_built_by_zig_draws_the_same_images(build_tiny_model, tmp_path, monkeypatch) -> None:
    """It has runtime.cpp instead of the C++ library."""
    pytest.importorskip("ziglang")
    model = build_tiny_model()
    images = Sampler(model, 1, engine=NATIVE, products=torch.int8).sample_images(20)
    monkeypatch.setattr(build, "find_system_compiler", lambda: None)
    fastest = library.supported_sets()[-1]  # building takes most of the time
    monkeypatch.setattr(build, "LIBRARIES", tmp_path)
    monkeypatch.setitem(build.INSTRUCTION_SETS, build.this_machine().architecture, (fastest,))
    assert build.build_libraries(build.this_machine()).problems == ()
    monkeypatch.setattr(library, "try_library", functools.partial(library.choose_library, fastest.name))
    assert Path(library.load_library()._name).parent == tmp_path
    drawn = Sampler(model, 1, engine=NATIVE, products=torch.int8).sample_images(20)
    np.testing.assert_array_equal(drawn, images)


@needs_library
def test_the_fastest_supported_library_is_chosen(monkeypatch) -> None:
    monkeypatch.delenv(library.VARIABLE, raising=False)
    chosen = library.try_library()
    assert isinstance(chosen, library.Library) and chosen.instruction_set == library.supported_sets()[-1]


@needs_library
@pytest.mark.skipif(len(EVERY) < 2, reason="this architecture has one instruction set")
def test_a_processor_without_the_fastest_set_uses_the_next_and_refuses_a_request(monkeypatch, raises_one_line) -> None:
    monkeypatch.setattr(library, "supported_sets", lambda: EVERY[:1])
    chosen = library.choose_library()
    assert chosen.instruction_set == EVERY[0]
    assert chosen.reason == f"this processor does not support {EVERY[1].name}"
    with raises_one_line(UsageError, f"{library.VARIABLE}={EVERY[1].name}", EVERY[1].meaning, EVERY[0].name):
        library.choose_library(EVERY[1].name)


@needs_library
def test_an_unknown_instruction_set_gets_a_suggestion(raises_one_line) -> None:
    with raises_one_line(UsageError, library.VARIABLE, "'x86-64-v9'"):
        library.choose_library("x86-64-v9")


def test_a_missing_library_is_named_with_the_command_that_builds_it(folder, raises_one_line) -> None:
    with raises_one_line(NoLibrary, f"no compiled library {EVERY[0].name}", build.COMMAND):
        library.choose_library()


@needs_library
def test_a_library_of_other_cpp_is_not_loaded(folder, monkeypatch, raises_one_line) -> None:
    for one in EVERY:
        file = build.library_file(build.this_machine(), one)
        shutil.copy(LIBRARIES / file.name, file)
    assert Path(library.choose_library().functions._name).parent == folder
    monkeypatch.setattr(build, "OPTIONS", (*build.OPTIONS, "-DNEW"))
    with raises_one_line(NoLibrary, "the C++ differs", f"'{build.COMMAND}'"):
        library.choose_library()


def test_without_a_library_one_warning_says_what_is_slower_and_why(monkeypatch, caplog) -> None:
    monkeypatch.setattr(library, "try_library", lambda: NoLibrary("it was not built"))
    with library.reference_only():
        assert not library.has_library()
    assert not caplog.records
    assert not library.has_library() and not library.has_library()
    assert [record.message for record in caplog.records] == [
        "warning: training and sampling use plain torch, which is slower: it was not built"
    ]


def test_asking_again_for_a_missing_library_keeps_no_frames(monkeypatch) -> None:
    """An error that is stored and raised again keeps every frame that it has passed."""
    stored = NoLibrary("it was not built")
    monkeypatch.setattr(library, "try_library", lambda: stored)
    for _ in range(2):
        with pytest.raises(NoLibrary, match="it was not built") as raised:
            library.load_library()
        assert raised.value is not stored
