"""Tests that engines agree with the model's own step, from any state, and give a reason for refusing a model."""

import concurrent.futures
import functools
import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import first_fast, loop_over
from machine import needs_library
from sampling.cases import CHANGES, complete_top, draw_tokens, sample_values, step_native
from tolerances import assert_agree

from linformer_cli.attention.base import fork_state
from linformer_cli.config import ImageShape
from linformer_cli.errors import LintxError, UsageError
from linformer_cli.evaluation.bits import measure_nats, stepped_nats
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.native import library
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.sampling.decode import Sampler
from linformer_cli.sampling.engines import ENGINES, EngineCache, ReferenceEngine, build_engine, choose_engine
from linformer_cli.sampling.engines.native import NativeEngine

FLOAT32, BFLOAT16 = 1e-5, 0.05
FEW = 2  # of engine.h
every_change = pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
# Up to 3 * FEW images, three threads share every product. With more images, they divide the images.
every_batch = pytest.mark.parametrize(
    ("batch", "threads"),
    first_fast([(1, 1), (33, 3), (17, 1), (3 * FEW, 3), (3 * FEW + 1, 3)], count=2),
    ids=str,
)


@pytest.fixture
def build_tiny_model(build_tiny_model: Callable[..., PixelModel]) -> Callable[..., PixelModel]:
    """Provides tiny models whose biases, gains and shifts all differ from their initial values."""

    def build(**changes: Any) -> PixelModel:
        model = build_tiny_model(**changes)
        generator = torch.Generator().manual_seed(12)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        return model

    return build


@needs_library
@every_change
@every_batch
@loop_over(("dtype", "tolerance"), [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)])
def test_native_steps_match_the_model(build_tiny_model, changes, batch, threads, dtype, tolerance) -> None:
    reference = build_tiny_model(**changes).to(dtype).float()  # weights rounded in the same way
    tokens = draw_tokens(reference, batch, 30)
    expected, _ = reference.attend(tokens)
    native = NativeEngine(build_tiny_model(**changes).to(dtype), batch)
    native.use_threads(threads)
    for token, parameters in zip(tokens.unbind(dim=1), expected.detach().unbind(dim=1), strict=True):
        assert_agree(native.step(token).float(), parameters, tolerance)


@needs_library
def test_native_rounds_once_to_the_nearest_bfloat16(build_tiny_model) -> None:
    """Sums and the residual stream are float32, so the engine is more accurate than torch in bfloat16."""
    model = build_tiny_model().to(torch.bfloat16)
    reference = build_tiny_model().to(torch.bfloat16).float()
    engines = (ReferenceEngine(reference, 33), NativeEngine(model, 33), ReferenceEngine(model, 33))
    steps = [[engine.step(token).float().clone() for engine in engines] for token in draw_tokens(model, 33).unbind(1)]
    exact, native, plain = (torch.stack(outputs) for outputs in zip(*steps, strict=True))
    # The error is 0.5 times that of torch; with truncation instead of rounding, it would be 0.87 times that of torch.
    assert (native - exact).square().mean().sqrt() < 0.7 * (plain - exact).square().mean().sqrt()


@needs_library
def test_native_matches_the_model_if_the_denominators_are_tiny(build_tiny_model) -> None:
    """Features are near exp(-45.5), so the reciprocals of their products overflow float32."""
    model = build_tiny_model()
    with torch.no_grad():
        for block in model.blocks:
            for name in ("q", "k"):
                block.attention.input.bias[block.attention.input_rows[name]] -= 45.5
    native, plain = NativeEngine(model, 2), ReferenceEngine(model, 2)
    for token in draw_tokens(model, 2).unbind(dim=1):
        # Products of such small numbers have few significant digits.
        assert_agree(native.step(token), plain.step(token), 1e-3)


@needs_library
@every_batch
@loop_over("known", [1, 40])
def test_native_continues_from_a_state_of_attend(build_tiny_model, batch, threads, known) -> None:
    model = build_tiny_model(classes=3)
    tokens = draw_tokens(model, batch)
    with torch.no_grad():
        expected, _ = model.attend(tokens)
        _, state = model.attend(tokens[:1, :known])
    forked = fork_state(state, batch)
    native = NativeEngine(model, batch, forked)
    native.use_threads(threads)
    plain = ReferenceEngine(model, batch, fork_state(state, batch))
    for token in tokens[:, known:].unbind(dim=1):
        assert_agree(native.step(token), plain.step(token), FLOAT32)
    # The state that was forked is unchanged.
    again = NativeEngine(model, 1, fork_state(state, 1))
    assert_agree(again.step(tokens[:1, known]), expected[:1, known], FLOAT32)


@needs_library
@loop_over("states", [1, 2, 6])
@loop_over("name", ["categorical", "pixels"])
def test_adjacent_images_continue_the_same_state(build_tiny_model, name, states) -> None:
    model = build_tiny_model(classes=3, **CHANGES.get(name, {}))
    tokens = draw_tokens(model, states)
    with torch.no_grad():
        _, state = model.attend(tokens[:, :9])
    engine, plain = NativeEngine(model, 6, state), ReferenceEngine(model, 6, fork_state(state, 6 // states))
    for token in draw_tokens(model, 6)[:, 9:14].unbind(dim=1):
        assert_agree(engine.step(token), plain.step(token), FLOAT32)


@needs_library
def test_native_accepts_a_state_with_any_strides(build_tiny_model) -> None:
    model = build_tiny_model()
    tokens = draw_tokens(model, 3)
    with torch.no_grad():
        expected, _ = model.attend(tokens[:, :24])
        _, state = model.attend(tokens[:, :23])
    turned = tuple(
        type(layer)(*(part.transpose(-1, -2).contiguous().transpose(-1, -2) for part in layer))
        for layer in state.layers
    )
    native = NativeEngine(model, 3, state._replace(layers=turned))
    assert_agree(native.step(tokens[:, 23]), expected[:, 23], FLOAT32)


@needs_library
@pytest.mark.parametrize("head", ["categorical", "mixture"])
def test_native_draws_match_the_head(build_tiny_model, head) -> None:
    model = build_tiny_model(head=head, image=ImageShape(height=8, width=8, levels=256))
    native = NativeEngine(model, 500)
    generator = torch.Generator().manual_seed(5)
    parameters = 3 * torch.randn(500, model.head.projection.out_features, generator=generator)
    parameters[:50, 0] = 2000.0  # all probability on one value or component
    parameters[50:100] = -50.0
    if head == "mixture":
        parameters[100:200, 2 * model.head.mixtures :] = -50.0  # below the lower bound of log scales
    else:
        parameters[100:400, 100:] = -2000.0  # the last values have probability 0
    for uniforms in (
        torch.rand(500, generator=generator, dtype=torch.float64),
        torch.zeros(500, dtype=torch.float64),
        torch.full((500,), 1 - 2.0**-53, dtype=torch.float64),
    ):
        ours, theirs = native.draw(parameters, uniforms, Filters()), model.head.draw(parameters, uniforms)
        assert ours.dtype == theirs.dtype == torch.int64
        # The head's softmax is float32, so engine and head may choose differently at the boundary between two values.
        assert (ours != theirs).sum() <= (2 if 0 < float(uniforms[0]) < 0.9999 else 500)
        assert bool(((ours >= 0) & (ours < 256)).all())
        if head == "categorical":
            assert bool((model.head.log_probabilities(parameters).gather(1, ours[:, None]) > -60).all())


@needs_library
def test_a_random_number_at_a_boundary_selects_the_upper_value(build_tiny_model) -> None:
    model = build_tiny_model()
    uniforms = torch.arange(16, dtype=torch.float64) / 16
    values = NativeEngine(model, 16).draw(torch.zeros(16, 16), uniforms, Filters())
    assert values.tolist() == list(range(16)) == model.head.draw(torch.zeros(16, 16), uniforms).tolist()


@needs_library
@pytest.mark.parametrize("changes", [{}, CHANGES["the paper's"]], ids=["tiny", "paper"])
def test_engines_draw_the_same_images(build_tiny_model, changes) -> None:
    model = build_tiny_model(**changes)
    images = [sample_values(model, range(40), seed=2, engine=name).values for name in ("reference", "native")]
    images += [
        torch.cat([sample_values(model, range(i, i + 2), seed=2, engine="native").values for i in range(0, 40, 2)])
    ]
    assert len(torch.unique(images[0], dim=0)) == 40
    for other in images[1:]:
        # In rare cases, rounding in float32 changes a value.
        assert (other == images[0]).all(dim=1).sum() >= 39


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_outputs_have_the_same_bits_for_any_batch_and_threads(build_tiny_model, dtype) -> None:
    model = build_tiny_model(width=24, layers=3).to(dtype)
    tokens = draw_tokens(model, 23)
    expected = step_native(model, tokens)
    for batch, threads in ((23, 3), (7, 1), (2, 1), (1, 1)):
        assert torch.equal(step_native(model, tokens[:batch], threads), expected[:batch])


@needs_library
@pytest.mark.parametrize("batch", [2 * FEW, 40])
def test_threads_do_not_interfere(build_tiny_model, batch) -> None:
    """The threads are real, and the products are large enough to be divided among them."""
    model = build_tiny_model(width=128, heads=4, head_width=32, feed_forward=512)
    tokens = draw_tokens(model, batch)
    assert torch.equal(step_native(model, tokens, 1), step_native(model, tokens, 2))


@needs_library
def test_engines_in_several_python_threads_do_not_interfere(build_tiny_model) -> None:
    """The engines of a process share their helper threads."""
    model = build_tiny_model(width=128, heads=4, head_width=32, feed_forward=512)
    tokens = draw_tokens(model, 4)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda _: step_native(model, tokens, threads=3), range(8)))
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@needs_library
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_steps_without_the_helpers_of_its_parent(build_tiny_model) -> None:
    model = build_tiny_model(width=128, heads=4, head_width=32, feed_forward=512)
    native = NativeEngine(model, 4)
    native.use_threads(3)
    expected = native.step(model.start_tokens(4)).clone()
    native.start()
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(native.step(model.start_tokens(4)), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_library
def test_native_refuses_to_draw_beyond_the_image(build_tiny_model) -> None:
    model = build_tiny_model(image=ImageShape(height=2, width=2, levels=16))
    native = NativeEngine(model, 1)
    for _ in range(4):
        native.step(model.start_tokens(1))
    with pytest.raises(LintxError, match="all values of the image are known"):
        native.step(model.start_tokens(1))


@needs_library
def test_the_likelihood_by_steps_matches_the_parallel_likelihood(build_tiny_model) -> None:
    model = build_tiny_model()
    images = sample_values(model, range(7), seed=1).values.view(7, 8, 8, 1).mul(16).numpy()
    parallel = measure_nats(model, images, batch=3).describe()
    for name in (name for name, engine in ENGINES.items() if engine.refusal(model) is None):
        nats = functools.partial(stepped_nats, EngineCache(name, model))
        stepped = measure_nats(model, images, batch=3, nats=nats).describe()
        assert stepped.bits_per_dim == pytest.approx(parallel.bits_per_dim, abs=1e-5)
        assert stepped.standard_error == pytest.approx(parallel.standard_error, abs=1e-5)


@needs_library
@pytest.mark.parametrize("classes", [0, 3])
def test_the_state_has_the_bytes_of_the_model_and_does_not_grow(build_tiny_model, classes) -> None:
    model = build_tiny_model(classes=classes)
    for batch in (1, 9):
        native = NativeEngine(model, batch, look_ahead=False)
        assert native.state_bytes == model.state_bytes(batch)
        for token in draw_tokens(model, batch).unbind(dim=1):
            native.step(token)
        assert native.state_bytes == model.state_bytes(batch)


@needs_library
@pytest.mark.parametrize("feature_map", ["elu", "relu"])
@pytest.mark.parametrize("row", [0, 16], ids=["query", "key"])
def test_nan_features_stay_nan(build_tiny_model, feature_map, row) -> None:
    model = build_tiny_model(attention_options={"feature_map": feature_map})
    projection = model.blocks[0].attention.input
    with torch.no_grad():
        projection.bias[row] = torch.nan
    for batch in (1, 20):
        assert bool(torch.isnan(NativeEngine(model, batch).step(model.start_tokens(batch))).any())


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({}, torch.float64, "not support float64"),
        ({"head": "mixture", "mixtures": 2000}, torch.float32, "mixtures up to"),
    ],
)
def test_unsupported_models_use_the_reference_engine(build_tiny_model, raises_one_line, changes, dtype, reason):
    model = build_tiny_model(dtype=dtype, **changes)
    choice = choose_engine("auto", model)
    assert choice.value == "reference" and choice.reason.startswith("not native: it ") and reason in choice.reason
    with raises_one_line(UsageError, "engine 'native' does not support this model here", reason):
        choose_engine("native", model)
    assert isinstance(build_engine("auto", model, 2), ReferenceEngine)
    assert choose_engine("reference", model).reason == "requested"


def test_engines_pass_random_numbers_to_the_head_unchanged(build_tiny_model, monkeypatch) -> None:
    """MPS has no float64, so the head must change device and type of the random numbers in one call."""
    model, given = build_tiny_model(), []
    monkeypatch.setattr(model.head, "draw", lambda parameters, uniforms: given.append(uniforms))
    monkeypatch.setattr(
        "linformer_cli.sampling.engines.base.draw_filtered",
        lambda log_probabilities, uniforms, filters: given.append(uniforms),
    )
    engine, uniforms = ReferenceEngine(model, 2), torch.rand(2, dtype=torch.float64)
    for filters in (Filters(), Filters(top_k=1)):
        engine.draw(torch.empty(2, 16, device="meta"), uniforms, filters)
    assert [number is uniforms for number in given] == [True, True]


SERVED = ["reference", pytest.param("native", marks=needs_library)]


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_restarted_engine_draws_the_images_of_a_new_one(build_tiny_model, name, batch) -> None:
    """The engine restarts at the start of an image and after given values. The same engine must be reused."""
    model = build_tiny_model(context="hashed", classes=3)
    start, given = model.start_tokens(1), draw_tokens(model, 1)[:, :20]
    engines, seen = EngineCache(name, model), []
    for tokens in (start.unsqueeze(1), given, start.unsqueeze(1), given):
        new = build_engine(name, model, batch)
        drawn, count = [], 65 - tokens.shape[1]
        with engines.start(batch) as reused:
            for engine in (reused, new):
                first = engine.read(tokens)
                drawn.append(engine.draw_values(first, UniformStreams(1, range(batch)), Filters(), count))
        assert torch.equal(*drawn)
        assert reused.look_aheads == new.look_aheads and reused.state_bytes == new.state_bytes
        seen.append(reused)
    assert all(engine is seen[0] for engine in seen)


@pytest.mark.parametrize("name", SERVED)
def test_batches_of_one_size_share_an_engine(build_tiny_model, monkeypatch, name) -> None:
    built = []
    for kind in ENGINES.values():
        real = kind.__init__

        def watched(self, model, batch, *rest, real=real):
            built.append(batch)
            real(self, model, batch, *rest)

        monkeypatch.setattr(kind, "__init__", watched)
    model = build_tiny_model()
    parts = list(Sampler(model, engine=name).iter_batches(range(11), 4))
    assert [len(part.values) for part in parts] == [4, 4, 3] and built == [4, 3]
    sampler = Sampler(model, engine=name)
    for _ in range(3):
        complete_top(sampler, torch.arange(64) % 16, 24, 2)
    assert built == [4, 3, 2]


@pytest.mark.parametrize("name", SERVED)
def test_only_one_engine_and_state_are_kept(build_tiny_model, name) -> None:
    model = build_tiny_model()
    engines = EngineCache(name, model)
    with engines.start(4) as engine:
        first = weakref.ref(engine)
    del engine
    with engines.start(3):
        gc.collect()
        assert first() is None


def test_an_engine_whose_work_failed_is_dropped(build_tiny_model) -> None:
    engines = EngineCache("reference", build_tiny_model())
    with pytest.raises(MemoryError), engines.start(4) as engine:
        raise MemoryError
    failed = weakref.ref(engine)
    del engine
    gc.collect()
    assert failed() is None


def test_an_unknown_engine_gets_a_suggestion(build_tiny_model, raises_one_line) -> None:
    with raises_one_line(UsageError, "unknown engine 'referense'; did you mean 'reference'?"):
        choose_engine("referense", build_tiny_model())


def test_without_a_library_auto_gives_the_reason_for_the_reference_engine(build_tiny_model, monkeypatch) -> None:
    monkeypatch.setattr(library, "try_library", lambda: library.NoLibrary("it was not built"))
    choice = choose_engine("auto", build_tiny_model())
    assert choice.value == "reference" and "not native: it was not built" in choice.reason


@needs_library
def test_kernels_do_not_flush_denormals(build_tiny_model) -> None:
    """Linking with fast math would set denormal numbers to 0 in the whole process."""
    NativeEngine(build_tiny_model(), 1)
    assert float(torch.tensor([1e-40]) * 0.5) > 0


FILTERS = (
    *(Filters(temperature=temperature) for temperature in (1e-300, 0.05, 0.8, 3.0, 1000.0, 1e300)),
    *(Filters(top_k=3), Filters(top_k=10**30), Filters(top_p=0.9), Filters(top_p=1e-300), Filters(top_p=1.0)),
    Filters(0.9, 20, 0.7),
)


@needs_library
@loop_over("head", ["categorical", "mixture"])
@loop_over("filters", FILTERS)
def test_native_filters_like_the_reference_engine(build_tiny_model, head, filters) -> None:
    model = build_tiny_model(head=head, image=ImageShape(height=8, width=8, levels=256))
    engines = NativeEngine(model, 500), ReferenceEngine(model, 500)
    generator = torch.Generator().manual_seed(5)
    parameters = 3 * torch.randn(500, model.head.projection.out_features, generator=generator)
    parameters[:50, 0] = 2000.0  # all probability on one value or component
    parameters[50:100] = -50.0  # below the lower bound of log scales; equal probabilities without a mixture
    uniforms = torch.rand(500, generator=generator, dtype=torch.float64)
    ours, theirs = (engine.draw(parameters, uniforms, filters) for engine in engines)
    # The head's probabilities are float32, so the engines may choose differently at the boundary between two values.
    assert (ours != theirs).sum() <= 2
    assert len(torch.unique(ours)) > 10


@needs_library
@pytest.mark.parametrize("filters", [Filters(temperature=0.5), Filters(top_k=3, top_p=0.9)], ids=str)
def test_filters_stay_in_bounds_if_parameters_are_nan(build_tiny_model, filters) -> None:
    model = build_tiny_model()
    parameters = torch.randn(50, 16, generator=torch.Generator().manual_seed(4))
    parameters[:25, ::3] = torch.nan
    parameters[25:] = torch.nan
    values = NativeEngine(model, 50).draw(parameters, torch.full((50,), 0.5, dtype=torch.float64), filters)
    assert bool(((values >= 0) & (values < 16)).all())


@needs_library
@pytest.mark.parametrize("head", ["categorical", "mixture"])
def test_native_draws_a_valid_value_from_nan(build_tiny_model, head) -> None:
    """NaN is checked only every few steps. A value drawn before the check must be a valid index into the tables."""
    model = build_tiny_model(head=head)
    native = NativeEngine(model, 200)
    generator = torch.Generator().manual_seed(6)
    for strange in (torch.nan, torch.inf, -torch.inf, 3e38):
        for share in (0.1, 1.0):
            parameters = torch.randn(200, model.head.projection.out_features, generator=generator)
            parameters[torch.rand(parameters.shape, generator=generator) < share] = strange
            values = native.draw(parameters, torch.rand(200, generator=generator, dtype=torch.float64), Filters())
            assert bool(((values >= 0) & (values < model.head.levels)).all()), (strange, share, values)
