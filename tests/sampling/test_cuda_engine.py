"""Tests of the GPU engine on the CPU: its results, and that a recorded step never waits for the host."""

import gc
import itertools
import weakref
from collections.abc import Callable

import pytest
import torch
from loops import first_fast, loop_over
from machine import NO_TRITON, TRITON_DEVICE
from sampling.cases import CHANGES, draw_tokens
from tolerances import assert_agree
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from waiting import KernelCounter, OnlyOn, Recorder

from linformer_cli.attention.base import fork_state
from linformer_cli.attention.kernels import registry
from linformer_cli.attention.parts.caches import FixedCache
from linformer_cli.attention.parts.folded_sums import FoldedState
from linformer_cli.config import ImageShape
from linformer_cli.errors import LintxError
from linformer_cli.model.mixers import list_mixers
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.native.library import reference_only
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.sampling.engines import ReferenceEngine, choose_engine, cuda
from linformer_cli.sampling.engines.cuda import CudaEngine, FusedCudaEngine, Graphs, HalfSumsEngine
from linformer_cli.sampling.engines.native import NativeEngine

FLOAT32, BFLOAT16 = 1e-5, 0.05
SOFTMAX = {"attention": "softmax"}
SERVED = dict(CHANGES)
SERVED |= {"softmax": SOFTMAX, "softmax, odd widths": {**SOFTMAX, "head_width": 7, "heads": 3, "classes": 3}}
SERVED |= {"softmax, pixels": {**SOFTMAX, **CHANGES["pixels"]}}
FEW_CHANGES = ("as it is", "pixels", "softmax", "palette")
every_change = pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=() if name in FEW_CHANGES else pytest.mark.slow)
        for name, changes in SERVED.items()
    ],
)


@pytest.fixture(autouse=True)
def _torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables Triton unless a test enables it."""
    _enable_triton(monkeypatch, False)


def _enable_triton(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    monkeypatch.setattr(registry, "has_triton", lambda device: enabled)


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Enables Triton when called; skips the test if it is not installed."""

    def enable() -> None:
        pytest.importorskip("triton", reason=NO_TRITON)
        _enable_triton(monkeypatch, True)

    return enable


@pytest.fixture
def build_tiny_model(build_tiny_model):
    return lambda **changes: build_tiny_model(**changes).to(TRITON_DEVICE)


@every_change
@loop_over(("dtype", "tolerance"), [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)])
def test_steps_match_the_model(build_tiny_model, changes, dtype, tolerance) -> None:
    model = build_tiny_model(**changes).to(dtype)
    tokens, engine = draw_tokens(model, 3, 30), CudaEngine(model, 3)
    expected, _ = model.attend(tokens)
    for token, theirs in zip(tokens.unbind(dim=1), expected.detach().unbind(dim=1), strict=True):
        ours = engine.step(token)
        assert ours.dtype == theirs.dtype
        assert_agree(ours.float(), theirs.float(), tolerance)


@loop_over("known", [9, 40])
@loop_over(
    "changes", [{}, {"classes": 3, "context": "hashed"}, SOFTMAX, *({"attention": x} for x in ("longformer", "lsh"))]
)
def test_the_engine_continues_from_a_state_of_attend(build_tiny_model, known, changes) -> None:
    model = build_tiny_model(**changes)
    tokens = draw_tokens(model, 2)
    with torch.no_grad():
        expected, _ = model.attend(tokens[:1])
        _, state = model.attend(tokens[:1, :known])
    engines = CudaEngine(model, 2, fork_state(state, 2)), ReferenceEngine(model, 2, fork_state(state, 2))
    for token in tokens[:, known:].unbind(dim=1):
        ours, theirs = (engine.step(token) for engine in engines)
        assert_agree(ours, theirs, FLOAT32)
    # The state that was forked is unchanged.
    assert_agree(CudaEngine(model, 1, fork_state(state, 1)).step(tokens[:1, known]), expected[:, known], FLOAT32)


@loop_over(
    "head, filters",
    [
        *(("categorical", Filters()), ("mixture", Filters(temperature=0.5))),
        *((head, Filters(top_k=3, top_p=0.8)) for head in ("categorical", "mixture")),
    ],
)
def test_images_match_those_of_the_reference_engine(build_tiny_model, head, filters) -> None:
    model = build_tiny_model(head=head)
    plain, engine = ReferenceEngine(model, 20), CudaEngine(model, 20)
    streams, again = UniformStreams(3, range(20)), UniformStreams(3, range(20))
    parameters = [stepper.step(model.start_tokens(20)).clone() for stepper in (plain, engine)]
    expected = plain.draw_values(parameters[0], streams, filters, 64)
    found = engine.draw_values(parameters[1], again, filters, 64)
    assert found.dtype == torch.uint8 and found.shape == (20, 64)
    assert len(torch.unique(found, dim=0)) == 20
    # In rare cases, rounding changes a value.
    assert (found == expected).all(dim=1).sum() >= 19


@pytest.mark.parametrize("head", ["categorical", "mixture"])
def test_guided_images_match_those_of_the_reference_engine(build_tiny_model, head) -> None:
    model = build_tiny_model(head=head, classes=3, optional_class=True)
    tokens, filters = torch.cat([torch.arange(20) % 3, torch.full((20,), 3)]).to(TRITON_DEVICE), Filters(guidance=3.0)
    plain, engine = ReferenceEngine(model, 40), CudaEngine(model, 40)
    expected, found = (
        each.draw_values(each.step(tokens).clone(), UniformStreams(3, range(20)), filters, 64)
        for each in (plain, engine)
    )
    assert found.shape == (20, 64) and (found == expected).all(dim=1).sum() >= 19


@pytest.mark.smoke
def test_an_image_can_be_drawn_in_parts(build_tiny_model) -> None:
    """Each part continues with the random numbers and the state of the previous part."""
    model = build_tiny_model()
    whole, parts = CudaEngine(model, 2), CudaEngine(model, 2)
    streams, again = UniformStreams(0, range(2)), UniformStreams(0, range(2))
    expected = whole.draw_values(whole.step(model.start_tokens(2)), streams, Filters(), 64)
    found = [parts.draw_values(parts.step(model.start_tokens(2)), again, Filters(), 30)]
    for count in (1, 33):
        parameters = parts.step(found[-1][:, -1].long().to(model.device))
        found.append(parts.draw_values(parameters, again, Filters(), count))
    assert torch.equal(torch.cat(found, dim=1), expected)


def test_drawing_beyond_the_image_is_refused(build_tiny_model) -> None:
    model = build_tiny_model(image=ImageShape(height=2, width=2, levels=16))
    engine = CudaEngine(model, 1)
    engine.draw_values(engine.step(model.start_tokens(1)), UniformStreams(0, range(1)), Filters(), 4)
    with pytest.raises(ValueError, match="all 4 values of the image have already been drawn"):
        engine.step(model.start_tokens(1))


@pytest.mark.parametrize("head", ["categorical", "mixture"])
@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
def test_a_damaged_model_is_reported_after_drawing(build_tiny_model, raises_one_line, head, damage) -> None:
    model = build_tiny_model(head=head)
    with torch.no_grad():
        model.blocks[0].feed_forward.output.bias[0] = damage
    engine = CudaEngine(model, 3)
    parameters = engine.step(model.start_tokens(3))
    with raises_one_line(LintxError, "its weights are damaged"):
        engine.draw_values(parameters, UniformStreams(0, range(3)), Filters(), 9)


def test_draws_from_nan_are_valid_values(build_tiny_model, monkeypatch) -> None:
    """Given NaN, a head may draw any number. The number indexes a table before NaN is reported."""
    model = build_tiny_model()
    engine = CudaEngine(model, 3)
    engine.step(model.start_tokens(3))
    monkeypatch.setattr(model.head, "draw", lambda parameters, uniforms: torch.tensor([-5, 3, 300]).to(model.device))
    engine.draw_next(Filters())
    assert engine._tokens.tolist() == [0, 3, 15]


def test_before_step_is_called_before_every_value(build_tiny_model) -> None:
    model = build_tiny_model()
    engine, asked = CudaEngine(model, 1), []
    parameters = engine.step(model.start_tokens(1))
    engine.draw_values(parameters, UniformStreams(0, range(1)), Filters(), 9, lambda: asked.append(1))
    assert len(asked) == 9


@pytest.mark.parametrize("changes", [{}, {"classes": 3}], ids=str)
def test_the_state_has_the_bytes_of_the_model_and_does_not_grow(build_tiny_model, changes) -> None:
    model = build_tiny_model(**changes)
    engine = CudaEngine(model, 9)
    assert engine.state_bytes == model.state_bytes(9)
    for token in draw_tokens(model, 9)[:, :5].unbind(dim=1):
        engine.step(token)
    assert engine.state_bytes == model.state_bytes(9)


@loop_over(("head", "filters"), [("categorical", Filters()), ("mixture", Filters(top_k=3, top_p=0.8))])
@loop_over("changes", [{}, {"classes": 3, "context": "hashed"}, SOFTMAX])
def test_drawing_an_image_never_waits_for_the_host(build_tiny_model, head, filters, changes) -> None:
    """The tensors have a device but no contents, so reading a number or mixing devices fails."""
    model, fake = build_tiny_model(head=head, **changes).cpu(), FakeTensorMode()
    with fake, torch.no_grad(), reference_only():
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                moved = {name: fake.from_tensor(x).to("cuda") for name, x in tensors.items() if x is not None}
                tensors.update(moved)
        engine = CudaEngine(model, 3)
        with OnlyOn("cuda"):  # a tensor on the host would have to be copied
            for _ in range(2):
                engine.take_step()
                engine.draw_next(filters)
        assert engine._parameters.device.type == engine._tokens.device.type == "cuda"
        with pytest.raises(DataDependentOutputException):
            bool(engine._finite)


# How many graphs 64 values need: one at the start, and then one for each set of numbers that decide what a step does.
# `flash` has chunks of 16 positions, and the kernel of `nystrom` covers 5.
GRAPHS = {"flash": ({"chunk": 16}, 32), "nystrom": ({"kernel": 5}, 5), "retention": ({}, 2), "none": ({}, 2)}
FEW = ("linear", "softmax", "performer", "rfa", "gla", "deltanet", "mlstm", "rwkv7", "mesa", "mamba", "gdn2", "lstm")
# The numbers of the rows that these read are on the device.
ROWS = ("sparse", "bigbird", "longformer", "logsparse", "lsh", "linformer", "long_short", "log_linear")
GRAPHS |= {name: ({}, 2) for name in FEW + ROWS}
# These read the whole cache up to a multiple of 16 rows (see the test).
GRAPHS |= {name: ({}, 5) for name in ("softmax", "gau", "single_head", "probsparse")}


# With one graph, one for each length of a cache, and one for each place in a chunk.
FAST = ["linear", "gau", "flash"]


@pytest.mark.parametrize("name", first_fast([*FAST, *(name for name in list_mixers() if name not in FAST)], len(FAST)))
def test_replayed_steps_of_every_mechanism_match_the_model(build_tiny_model, monkeypatch, name) -> None:
    """Later images replay the recorded operations, which know nothing of the numbers on the host."""
    recorded = Recorder.replace_graphs(monkeypatch)
    monkeypatch.setattr(cuda, "_ROOM", 16)
    options, count = GRAPHS[name]
    model = build_tiny_model(attention=name, attention_options=options, layers=1, classes=3)
    expected = ReferenceEngine(model, 2)
    tokens = draw_tokens(model, 2, 64 if count > 2 else 40)
    wanted = torch.stack([expected.step(token) for token in tokens.unbind(dim=1)])
    engine = CudaEngine(model, 2)
    engine._graphs = Graphs(torch.device("cuda"))
    for _ in range(3):  # run, record, replay
        engine.start()
        assert_agree(torch.stack([engine.step(token).clone() for token in tokens.unbind(dim=1)]), wanted, FLOAT32)
    assert len(recorded) == count


def test_work_runs_once_then_is_recorded_and_replayed(monkeypatch) -> None:
    done: list[str] = []

    class Graph:
        def __init__(self, work: Callable[[], None]) -> None:
            done.append("recorded")
            self.replay = work

    monkeypatch.setattr(Graphs, "record", lambda graphs, work: Graph(work))
    on_card = Graphs(torch.device("cuda"))
    for name in ("one", "one", "two", "one", "two"):
        on_card.run(name, lambda name=name: done.append(name))
    assert done == ["one", "recorded", "one", "two", "one", "recorded", "two"]
    done.clear()
    elsewhere = Graphs(torch.device("cpu"))
    for _ in range(3):
        elsewhere.run("one", lambda: done.append("run"))
    assert done == ["run"] * 3


def test_a_deleted_engine_frees_its_memory_at_once(build_tiny_model) -> None:
    model = build_tiny_model()
    engine = CudaEngine(model, 2)
    engine.draw_values(engine.step(model.start_tokens(2)), UniformStreams(0, range(2)), Filters(), 5)
    dropped = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert dropped() is None
    finally:
        gc.enable()


def test_other_devices_are_not_supported(build_tiny_model) -> None:
    model = build_tiny_model().cpu()
    assert CudaEngine.refusal(model) == "it runs on CUDA devices only"
    assert choose_engine("auto", model).value != "cuda"


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        (SOFTMAX, torch.float32, None),
        ({"attention": "flash"}, torch.float32, None),
        ({}, torch.float64, "it does not support float64"),
        (CHANGES["pixels"], torch.float32, None),
        ({"attention_options": {"feature_map": "relu"}}, torch.float32, None),
        ({}, torch.bfloat16, None),
    ],
)
def test_unsupported_models_are_refused_with_a_reason(build_tiny_model, monkeypatch, changes, dtype, reason) -> None:
    model = build_tiny_model(**changes).to(dtype)
    monkeypatch.setattr(PixelModel, "device", torch.device("cuda"))
    assert CudaEngine.refusal(model) == reason


@pytest.mark.slow
@loop_over(("known", "dtype", "tolerance"), [(0, torch.bfloat16, BFLOAT16), (5, torch.float32, FLOAT32)])
@loop_over(
    ("changes", "state_type"),
    [({}, FoldedState), (SOFTMAX, FixedCache), (CHANGES["pixels"], FoldedState)],
)
def test_steps_with_triton_match_the_model(
    build_tiny_model, with_triton, changes, state_type, known, dtype, tolerance
) -> None:
    with_triton()
    model = build_tiny_model(**{**changes, "head_width": 16, "layers": 1}).to(dtype)
    tokens: Tensor = draw_tokens(model, 2)
    with torch.no_grad():
        state = model.init_state(2)
        for token in tokens[:, :known].unbind(dim=1):
            _, state = model.step(token, state)
    engine, plain = CudaEngine(model, 2, fork_state(state)), ReferenceEngine(model, 2, state)
    assert all(isinstance(layer, state_type) for layer in engine.states)
    for token in tokens[:, known : known + 9].unbind(dim=1):  # more than one fold
        assert_agree(engine.step(token).float(), plain.step(token).float(), tolerance)


# Every mechanism with running sums, and the options that change its fused step.
FUSED: list[tuple[str, dict[str, object]]] = [
    ("gdn2", {}),
    ("linear", {"feature_map": "poly2"}),
    ("retention", {}),
    ("retention", {"distance": "plane", "output_gate": False}),
    ("gla", {}),
    ("gla", {"gate": "scalar", "output_gate": False}),
    ("deltanet", {"negative_eigenvalues": True}),
    ("deltanet", {"gate": False}),
    ("gdn2", {"write": "tied", "erase": "head", "decay": "head"}),
    *((name, {}) for name in ("linear", "softmax", "mlstm", "rwkv7", "rfa", "performer", "mamba", "mesa")),
]


NETWORKS = itertools.cycle([("post", "gelu"), ("pre", "relu")])


@pytest.mark.parametrize(
    ("attention", "options", "norm", "activation"),
    first_fast([(*case, *network) for case, network in zip(FUSED, NETWORKS, strict=False)], count=1),
)
def test_fused_steps_match_the_model(build_tiny_model, with_triton, attention, options, norm, activation) -> None:
    with_triton()
    changes = {"attention_options": options, "norm": norm, "activation": activation}
    model = build_tiny_model(attention=attention, head_width=16, **changes)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in model.parameters():  # biases and gains that differ from 0 and 1
            parameter.add_(0.1 * torch.randn_like(parameter))
    engine, plain = FusedCudaEngine(model, 2), ReferenceEngine(model, 2)
    for token in draw_tokens(model, 2)[:, :2].unbind(dim=1):
        assert_agree(engine.step(token), plain.step(token), FLOAT32)


@loop_over(("capability", "early"), [((8, 9), False), ((9, 0), True), ((12, 0), True)])
def test_fused_kernels_start_early_where_a_gpu_can_do_that(with_triton, monkeypatch, capability, early) -> None:
    with_triton()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    arguments = {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
    launch = registry._triton("triton_steps")._launch
    assert launch(torch.device("cuda")) == arguments and launch(torch.device("cpu")) == {"EARLY": False}


# `softmax` has no sums, and `rwkv7` updates and rounds its own twice a position.
SUMS = [case for case in FUSED if case[0] not in ("softmax", "rwkv7")]


@pytest.mark.parametrize(("attention", "options"), first_fast(SUMS, count=1))
def test_sums_in_bfloat16_are_updated_in_float32_and_rounded(build_tiny_model, with_triton, attention, options) -> None:
    with_triton()
    model = build_tiny_model(attention=attention, attention_options=options, head_width=16, layers=1)
    whole, half = FusedCudaEngine(model, 2), HalfSumsEngine(model, 2)
    tokens, changed = draw_tokens(model, 2), False
    folds = isinstance(half.states[0], FoldedState)
    for token in tokens[:, : 9 if folds else 3].unbind(dim=1):
        assert torch.equal(half.step(token), whole.step(token))
        for ours, theirs in zip(half.tensors(), whole.tensors(), strict=True):
            if ours.dtype == theirs.dtype:
                assert torch.equal(ours, theirs)
            else:
                # Triton's interpreter cuts numbers where a GPU rounds.
                assert ours.dtype == torch.bfloat16 and ((ours - theirs).abs() <= theirs.abs() / 128).all()
                changed |= not torch.equal(ours.float(), theirs)
                theirs.copy_(ours)
    assert changed and half.state_bytes < whole.state_bytes


@pytest.mark.slow
@loop_over("attention", ["linear", "softmax", "retention", "gla"])
def test_fused_steps_in_bfloat16_match_the_model(build_tiny_model, with_triton, attention) -> None:
    """Triton's interpreter cuts numbers to bfloat16 where a GPU rounds, which delta rules amplify."""
    with_triton()
    model = build_tiny_model(attention=attention, head_width=16).bfloat16()
    engine, plain = FusedCudaEngine(model, 3), ReferenceEngine(model, 3)
    for token in draw_tokens(model, 3)[:, :3].unbind(dim=1):
        assert_agree(engine.step(token).float(), plain.step(token).float(), BFLOAT16)


# The batch, the parts of an image that it allows, and the known values.
PARTS = [(1, 8, 0), (1, 8, 7), (3, 2, 40), (9, 1, 1)]
PARTS += [
    case for case in itertools.product((1, 3, 9), (8, 2, 1), (0, 1, 7, 40)) if case[:2] in ((1, 8), (3, 2), (9, 1))
]


@pytest.mark.parametrize("batch, parts, known", first_fast(dict.fromkeys(PARTS), count=4))
def test_small_batches_of_softmax_divide_the_positions_of_an_image(
    build_tiny_model, with_triton, monkeypatch, batch, parts, known
) -> None:
    with_triton()
    triton_steps, seen = registry._triton("triton_steps"), set()
    monkeypatch.setattr(triton_steps, "PROGRAMS", 16)
    monkeypatch.setattr(triton_steps, "LEAST_ROWS", 8)  # of 64
    step_cache = triton_steps.step_cache
    monkeypatch.setattr(triton_steps, "step_cache", lambda *x, parts: seen.add(parts) or step_cache(*x, parts=parts))
    model = build_tiny_model(**SOFTMAX, head_width=16, heads=2, layers=1)
    tokens = draw_tokens(model, batch)
    with torch.no_grad():
        state = model.attend(tokens[:, :known])[1] if known else model.init_state(batch)
    engine, plain = FusedCudaEngine(model, batch, fork_state(state)), ReferenceEngine(model, batch, state)
    for token in tokens[:, known : known + 2].unbind(dim=1):
        assert_agree(engine.step(token), plain.step(token), FLOAT32)
    assert seen == {parts}


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["linear", "softmax", "gdn2"])
def test_a_fused_layer_has_five_kernels(build_tiny_model, with_triton, monkeypatch, attention) -> None:
    with_triton()
    counter, load = KernelCounter(), registry._triton
    monkeypatch.setattr(registry, "_triton", lambda module: counter.watch(load(module)))
    counts = []
    for layers in (1, 2):
        engine = FusedCudaEngine(build_tiny_model(attention=attention, layers=layers, head_width=16), 2)
        with torch.no_grad(), reference_only():
            monkeypatch.setattr(registry, "has_triton", lambda device: True)
            engine.take_step()
            counter.kernels = 0
            with counter:
                engine.take_step()
        counts.append(counter.kernels)
    assert counts[1] - counts[0] == 5


@pytest.mark.parametrize(
    ("attention", "triton"),
    first_fast([("linear", False), ("softmax", False), ("linear", True), ("softmax", True)], count=2),
)
def test_a_restarted_engine_reuses_its_memory(build_tiny_model, with_triton, attention, triton) -> None:
    """CUDA graphs keep reading and writing the tensors that they were recorded with."""
    if triton:
        with_triton()
    model = build_tiny_model(attention=attention, heads=1, head_width=16, layers=1, classes=3, context="wide")
    tokens = draw_tokens(model, 4)
    with torch.no_grad():
        (_, state), (_, single) = model.attend(tokens[:, :5]), model.attend(tokens[:1, :5])
        _, pair = model.attend(tokens[::2, :5])
    engine = CudaEngine(model, 4)
    memory = [part.data_ptr() for part in engine.tensors()]
    forked = ((5, single, fork_state(single, 4)), (5, pair, fork_state(pair, 2)))
    for known, start, same in ((0, None, None), (5, state, state), *forked, (0, None, None)):
        engine.start(start)
        new = CudaEngine(model, 4, same)
        # More than one fold of linear attention.
        for token in tokens[:, known : known + (9 if attention == "linear" else 3)].unbind(dim=1):
            assert torch.equal(engine.step(token), new.step(token))
    assert [part.data_ptr() for part in engine.tensors()] == memory


def test_steps_run_as_they_are_if_recording_fails(monkeypatch, caplog) -> None:
    def fail(graphs: Graphs, work: Callable[[], None]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(Graphs, "record", fail)
    graphs, done = Graphs(torch.device("cuda")), []
    for number in range(4):
        graphs.run("one", lambda number=number: done.append(number))
    assert done == [0, 1, 2, 3]
    assert [record.getMessage().count("\n") for record in caplog.records] == [0]


def test_auto_leaves_models_that_never_ran_on_a_gpu_to_the_reference_engine(build_tiny_model, monkeypatch) -> None:
    monkeypatch.setattr(CudaEngine, "refusal", lambda model, products=None: None)
    monkeypatch.setattr(NativeEngine, "refusal", lambda model, products=None: "not here")
    monkeypatch.setattr(cuda, "triton_refusal", lambda device: None)
    others = ({"attention": "flash"}, {"output_gate": True}, {"attention_options": {"feature_map": "relu"}})
    others += (
        {"head_width": 16},
        {**SOFTMAX, "head_width": 16},
        {"context": "hashed"},
        CHANGES["palette"],
        CHANGES["pixels"],
    )
    for changes in others:
        choice = choose_engine("auto", build_tiny_model(**{"head_width": 32, **changes}))
        assert choice.value == "reference" and "have not run on a GPU yet; --engine cuda" in choice.reason
    monkeypatch.setattr(cuda, "triton_refusal", lambda device: "Triton is not installed")
    assert choose_engine("auto", build_tiny_model(head_width=32)).value == "reference"


def test_auto_chooses_the_gpu_engine_on_a_gpu(build_tiny_model, monkeypatch) -> None:
    monkeypatch.setattr(CudaEngine, "refusal", lambda model, products=None: None)
    monkeypatch.setattr(NativeEngine, "refusal", lambda model, products=None: "not here")
    monkeypatch.setattr(cuda, "triton_refusal", lambda device: None)
    choice = choose_engine("auto", build_tiny_model(head_width=32))
    assert choice.value == "cuda" and choice.reason == "not native: not here"
    choice = choose_engine("auto", build_tiny_model(head_width=32), forks=True)
    assert choice.value == "reference" and "copies of states have not run on a GPU yet" in choice.reason
