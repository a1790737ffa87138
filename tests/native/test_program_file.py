"""Tests that a program file draws the images of `lintx sample --precision int8` without Python, and that damage is
found.
"""

import ctypes
import dataclasses
import math
import re
import struct
import subprocess
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from loops import loop_over
from machine import needs_library
from numpy.typing import NDArray
from sampling.cases import CHANGES, LAYER_PARTS
from sampling.test_native_mechanisms import POSITIONS, VARIANTS, every_variant

from linformer_cli.checkpoint import load_model
from linformer_cli.config import ImageShape
from linformer_cli.data.sequence import paint, values_to_images
from linformer_cli.errors import LintxError
from linformer_cli.model.compile_step import encode_model
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.native import program_file
from linformer_cli.native.build import PACKAGE, find_system_compiler
from linformer_cli.native.library import load_library
from linformer_cli.native.program import NoProgram, Operation
from linformer_cli.native.runner import Runner
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.sampling.decode import Sampler
from linformer_cli.sampling.engines import NATIVE
from linformer_cli.sampling.engines.native import NativeEngine

pytestmark = needs_library

NATIVE_FOLDER = PACKAGE / "native"
SEED = 2**63 - 1


class Opened(Runner):
    """A runner of a program file, with the functions of runner.h as methods."""

    def __init__(self, data: bytes, image: ImageShape, batch: int = 1) -> None:
        self.image, self.batch = image, batch
        super().__init__(np.frombuffer(data, np.uint8), batch, copy=True)

    def filter(self, temperature: float, top_k: int = 0, top_p: float = 0) -> None:
        self.call("filter", temperature, top_k, top_p)

    def guide(self, weight: float) -> None:
        self.call("guide", weight)

    def start(self, seed: int = SEED, first: int = 0, labels: Sequence[int] | None = None) -> None:
        self.call("start", seed, first, None if labels is None else np.array(labels))

    def continue_from(self, other: "Opened") -> None:
        self.call("continue", other.address)

    def draw(self) -> int:
        return self.call("draw_next")

    def give(self, *values: int) -> int:
        return self.call("give_next", np.array(values))

    def finish(self) -> NDArray[np.int64]:
        """Draw all other values; returns the values [batch, T]."""
        while self.draw() < self.image.positions:
            pass
        return self.values(self.batch, self.image.positions)[:, :-1].clone().numpy()

    def probabilities(self, image: int) -> NDArray[np.float64]:
        found = np.empty(self.image.levels)
        self.call("probabilities", image, found)
        return found

    def pixels(self, image: int) -> NDArray[np.uint8]:
        bands = 4 if self.image.palette else self.image.channels
        found = np.empty((self.image.height, self.image.width, bands), np.uint8)
        self.call("pixels", image, found)
        return found

    def state(self, image: int, layer: int, number: int) -> NDArray[np.float32]:
        size = ctypes.c_int64()
        address = self.call("state", image, layer, number, ctypes.byref(size))
        return np.frombuffer(ctypes.string_at(address, size.value), np.float32)


@pytest.fixture
def open_program() -> Callable[..., Opened]:
    """Provides `open_program(model, batch)`, which makes a runner from the int8 program of a model or from a file."""

    def open_program(model: PixelModel, batch: int = 1, data: bytes | None = None) -> Opened:
        return Opened(data or encode_int8(model), model.config.image, batch)

    return open_program


def encode_int8(model: PixelModel) -> bytes:
    return encode_model(model, NativeEngine.window, torch.int8)


def sample(
    model: PixelModel, indices: Sequence[int], labels: Sequence[int] | None = None, filters: Filters | None = None
) -> NDArray[np.int64]:
    """Return the values [batch, T] that `lintx sample --precision int8` draws."""
    sampler = Sampler(model, SEED, filters, engine=NATIVE, products=torch.int8)
    return sampler.sample(indices, labels).values.long().numpy()


# The types of runner.h and those that Python passes or receives.
TYPES = {"int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64, "double": ctypes.c_double, "void": None}


def test_python_calls_the_functions_that_runner_h_declares(open_program, build_tiny_model) -> None:
    open_program(build_tiny_model())  # declares the functions
    header = re.sub(r"/\*.*?\*/", "", (NATIVE_FOLDER / "runner.h").read_text(), flags=re.DOTALL)
    declared = re.findall(r"^((?:const )?\w+\*? )(lintx_\w+)\((.*?)\);", header, re.MULTILINE | re.DOTALL)
    assert len(declared) == header.count(");") > 25

    def find_type(text: str) -> object:
        return ctypes.c_void_p if "*" in text else TYPES[text.split()[0]]

    for result, name, arguments in declared:
        function = getattr(load_library(), name)
        if name == "lintx_error":
            assert (result, arguments, function.restype) == ("const char* ", "void", ctypes.c_char_p)
        elif name not in ("lintx_describe", "lintx_palette"):  # only programs in C and the page call them
            expected = [find_type(argument) for argument in arguments.split(",")]
            assert [*(function.argtypes or ())] == expected, name
            assert function.restype == find_type(result), name


# Seven levels do not divide the brightnesses evenly.
IMAGES = CHANGES | LAYER_PARTS | {"seven levels": {"image": ImageShape(height=8, width=8, levels=7)}}


@loop_over("changes", IMAGES)
def test_a_program_draws_the_images_of_the_sampler(open_program, build_tiny_model, changes) -> None:
    model = build_tiny_model(**IMAGES[changes])
    expected = sample(model, range(5, 8))
    runner = open_program(model, batch=3)
    runner.start(first=5)
    assert np.array_equal(runner.finish(), expected)
    pixels = paint(values_to_images(torch.from_numpy(expected), model.config.image), model.config.image)
    assert np.array_equal(runner.pixels(2), pixels[2])
    alone = open_program(model)
    alone.start(first=6)
    assert np.array_equal(alone.finish(), expected[1:2])


@every_variant
def test_every_mechanism_draws_the_images_of_the_sampler(open_program, build_tiny_model, variant) -> None:
    attention, options = VARIANTS[variant]
    image = ImageShape(height=POSITIONS // 10, width=10, levels=16)
    model = build_tiny_model(attention=attention, attention_options=options, image=image)
    expected, data = sample(model, range(2)), encode_int8(model)
    for batch in (1, 2):
        runner = open_program(model, batch, data)
        runner.start()
        assert np.array_equal(runner.finish(), expected[:batch])


def test_the_number_of_threads_does_not_change_an_image(open_program, build_tiny_model) -> None:
    model = build_tiny_model()
    runner = open_program(model, batch=7)
    runner.call("use_threads", 3)
    runner.start()
    assert np.array_equal(runner.finish(), sample(model, range(7)))


@pytest.mark.smoke
def test_classes_are_chosen_or_rotate(open_program, build_tiny_model) -> None:
    model = build_tiny_model(classes=3)
    runner = open_program(model, batch=4)
    runner.start(labels=[2, 2, 0, 1])
    assert np.array_equal(runner.finish(), sample(model, range(4), [2, 2, 0, 1]))
    runner.start()
    assert np.array_equal(runner.finish(), sample(model, range(4)))
    for wrong in (-1, 3):
        with pytest.raises(LintxError, match="classes are 0 to 2"):
            runner.start(labels=[0, 0, 0, wrong])


def test_an_optional_class_is_none_by_default(open_program, build_tiny_model) -> None:
    model = build_tiny_model(classes=3, optional_class=True)
    runner = open_program(model, batch=4)
    runner.start(labels=[2, 3, 0, 1])
    mixed = runner.finish()
    assert np.array_equal(mixed, sample(model, range(4), [2, 3, 0, 1]))
    runner.start()
    without = runner.finish()
    assert np.array_equal(without, sample(model, range(4)))
    assert [np.array_equal(*rows) for rows in zip(mixed, without, strict=True)] == [False, True, False, False]
    alone = open_program(model)
    alone.start(first=2)
    assert np.array_equal(alone.finish(), without[2:3])
    for wrong in (-1, 4):
        with pytest.raises(LintxError, match="classes are 0 to 2"):
            runner.start(labels=[0, 0, 0, wrong])


@pytest.mark.parametrize(
    ("optional", "initial", "reason"),
    [
        (True, 2.0, "header is not valid"),
        (True, 4.0, "header is not valid"),
        (False, 3.0, "'embed' leaves its buffers"),
    ],
)
def test_a_wrong_initial_class_is_refused(open_program, build_tiny_model, optional, initial, reason) -> None:
    model = build_tiny_model(classes=3, optional_class=optional)
    data = encode_int8(model)
    start = data.index(struct.pack("<qqqd", 1, 5, 1, 3.0 if optional else 0.0)) + 24
    body = data[32:start] + struct.pack("<d", initial) + data[start + 8 :]
    with pytest.raises(LintxError, match=reason):
        open_program(model, data=data[:24] + zlib.crc32(body).to_bytes(8, "little") + body)


@pytest.mark.parametrize("head", ["categorical", "mixture"])
@pytest.mark.parametrize("filters", [Filters(temperature=0.8), Filters(1.5, 7, 0.9)], ids=str)
def test_filters_are_those_of_the_sampler(open_program, build_tiny_model, head, filters) -> None:
    model = build_tiny_model(head=head)
    expected = sample(model, range(3), filters=filters)
    for batch in (1, 3):
        runner = open_program(model, batch)
        runner.filter(filters.temperature, filters.top_k or 0, filters.top_p or 0)
        runner.start()
        assert np.array_equal(runner.finish(), expected[:batch])
        runner.filter(1)
        runner.start()
        assert np.array_equal(runner.finish(), sample(model, range(batch)))
    assert not np.array_equal(expected, sample(model, range(3)))


@pytest.mark.parametrize("head", ["categorical", "mixture"])
def test_guided_images_are_those_of_the_sampler(open_program, build_tiny_model, head) -> None:
    """The second half of the batch has the same values, so that each image also steps without its class."""
    model = build_tiny_model(head=head, classes=3, optional_class=True)
    filters, labels = Filters(temperature=0.8, guidance=3.0), [2, 0, 1]
    sampler = Sampler(model, SEED, filters, engine=NATIVE, products=torch.int8)
    expected = sampler.sample(range(3), labels).values
    assert not np.array_equal(expected, sample(model, range(3), filters=Filters(0.8), labels=labels))
    for count in (1, 3):
        runner = open_program(model, 2 * count)
        runner.filter(filters.temperature)
        for weight in (filters.guidance, 1.0):
            runner.guide(weight)
            runner.start(labels=[*labels[:count], *[3] * count])
            assert np.array_equal(runner.finish()[:count], expected[:count]) == (weight != 1)
        # A beginning is read once for all completions.
        prefix, continued = open_program(model, 2), open_program(model, 2 * count)
        for each in (prefix, continued, runner):
            each.filter(0.8)
            each.guide(3)
        prefix.start(labels=[2, 3])
        runner.start(labels=[2] * count + [3] * count)
        for known in range(20):
            prefix.give(*[known % 16] * 2)
            runner.give(*[known % 16] * 2 * count)
        continued.start()
        continued.continue_from(prefix)
        found = continued.finish()
        assert np.array_equal(found, runner.finish())
        assert np.array_equal(found[:count], found[count:])


def test_guidance_begins_with_the_next_image(open_program, build_tiny_model) -> None:
    model = build_tiny_model(classes=3, optional_class=True)
    runner = open_program(model, 2)
    runner.start(labels=[0, 1])
    runner.draw()
    runner.guide(3)
    assert np.array_equal(runner.finish(), sample(model, range(2), labels=[0, 1]))
    runner.start(labels=[0, 1])
    runner.give(5, 6)  # the values of the second half are not read
    first, second = runner.finish()
    assert np.array_equal(first, second) and first[0] == 5


def test_a_refused_start_changes_nothing(open_program, build_tiny_model) -> None:
    model = build_tiny_model(classes=2, optional_class=True)
    runner, expected = open_program(model, 2), open_program(model, 2)
    for each in (runner, expected):
        each.start(labels=[0, 1])
        each.draw()
    runner.guide(2.0)
    with pytest.raises(LintxError, match="classes are 0 to 1"):
        runner.start(labels=[-1, 0])
    assert np.array_equal(runner.finish(), expected.finish())


def test_wrong_guidance_is_refused(open_program, build_tiny_model) -> None:
    runner = open_program(build_tiny_model(classes=3, optional_class=True), 3)
    with pytest.raises(LintxError, match="the batch is twice the number of images"):
        runner.guide(2)
    for wrong in (-1, 1001, math.nan):
        with pytest.raises(LintxError, match="from 0 to 1000"):
            runner.guide(wrong)
    with pytest.raises(LintxError, match="needs a model with an optional class"):
        open_program(build_tiny_model(classes=3), 2).guide(2)
    guided, plain = (open_program(build_tiny_model(classes=3, optional_class=True), 2) for _ in range(2))
    guided.guide(2)
    guided.start()
    with pytest.raises(LintxError, match="one runner has guidance and the other has none"):
        guided.continue_from(plain)


def test_look_ahead_continues_after_single_steps(open_program, build_tiny_model) -> None:
    model = build_tiny_model()
    runner = open_program(model)
    runner.start()
    while (known := runner.draw()) < 40:
        if known % 3 == 0:
            runner.probabilities(0)  # the next draw takes a single step
    assert np.array_equal(runner.finish(), sample(model, [0]))


@pytest.mark.parametrize("head", ["categorical", "mixture"])
def test_probabilities_and_states_are_those_of_the_engine(open_program, build_tiny_model, head) -> None:
    model = build_tiny_model(head=head)
    prefix = torch.randint(0, 16, (2, 20), generator=torch.Generator().manual_seed(4))
    engine = NativeEngine(model, 2, products=torch.int8)
    runner = open_program(model, batch=2)
    runner.start()
    tokens = model.start_tokens(2)
    for known in range(20):
        expected = model.head.log_probabilities(engine.step(tokens)).exp()
        for image in range(2):
            found = runner.probabilities(image)
            assert found.sum() == pytest.approx(1, abs=1e-12)
            assert found == pytest.approx(expected[image].numpy(), abs=1e-6)
        states = engine.states[1:]  # the first one is the ring of recent values
        for number, state in enumerate(states):
            layer, place = divmod(number, len(states) // 2)
            assert np.array_equal(runner.state(1, layer, place), state[1].numpy())
        tokens = prefix[:, known]
        assert runner.give(*tokens.tolist()) == known + 1
    for missing in ((1, 2, 0), (2, 0, 0), (0, 0, 9)):
        with pytest.raises(LintxError, match="no such state"):
            runner.state(*missing)
    assert np.array_equal(runner.finish()[:, :20], prefix.numpy())


def test_a_prefix_uses_no_random_numbers(open_program, build_tiny_model) -> None:
    model = build_tiny_model()
    engine = NativeEngine(model, 1, look_ahead=False, products=torch.int8)
    parameters = engine.step(model.start_tokens(1))
    runner = open_program(model)
    runner.start()
    for value in (3, 1, 4, 1, 5):
        runner.give(value)
        parameters = engine.step(torch.tensor([value]))
    rest = engine.draw_values(parameters, UniformStreams(SEED, [0]), Filters(), 59)
    assert np.array_equal(runner.finish()[:, 5:], rest.numpy())


@pytest.mark.parametrize("changes", ["categorical", "mixture"])
@pytest.mark.parametrize("batch", [1, 3])
def test_images_continue_a_beginning_that_another_runner_read(open_program, build_tiny_model, changes, batch) -> None:
    model = build_tiny_model(head=changes, classes=2)
    prefix, continued, expected = open_program(model), open_program(model, batch), open_program(model, batch)
    prefix.start(seed=1, labels=[1])
    continued.start(first=4)
    continued.finish()  # what was drawn before leaves no trace
    continued.start(first=4)
    expected.start(first=4, labels=[1] * batch)
    for value in (3, 1, 4, 1, 5, 9, 2, 6):
        prefix.give(value)
        expected.give(*[value] * batch)
    for _ in range(2):  # the second time, the step for the next value is done already
        continued.continue_from(prefix)
        probabilities = prefix.probabilities(0)
    assert np.array_equal(continued.probabilities(batch - 1), probabilities)
    assert np.array_equal(continued.finish(), expected.finish())
    for other in (build_tiny_model(head=changes), build_tiny_model(1, head=changes, classes=2)):
        with pytest.raises(LintxError, match="different programs"):
            continued.continue_from(open_program(other))


def test_wrong_calls_are_refused(open_program, build_tiny_model) -> None:
    model = build_tiny_model()
    runner = open_program(model)
    for wrong in (-1, 16):
        with pytest.raises(LintxError, match="values are 0 to 15"):
            runner.give(wrong)
    for filters, reason in (
        *(((temperature,), "a temperature is above 0") for temperature in (0.0, -1.0, np.inf, np.nan)),
        ((1.0, -1), "top-k is not negative"),
        *(((1.0, 0, top_p), "top-p is 0 to 1") for top_p in (-0.1, 1.1, np.nan)),
    ):
        with pytest.raises(LintxError, match=reason):
            runner.filter(*filters)
    with pytest.raises(LintxError, match="no such image"):
        runner.probabilities(1)
    runner.finish()
    for call in (runner.draw, lambda: runner.give(0), lambda: runner.probabilities(0)):
        with pytest.raises(LintxError, match="all values"):
            call()
    with pytest.raises(LintxError, match="a batch has"):
        open_program(model, batch=0)


def test_a_damaged_model_is_refused(open_program, build_tiny_model) -> None:
    model = build_tiny_model()
    model.norm.bias.data[0] = torch.nan
    for batch in (1, 2):
        runner = open_program(model, batch)
        for _ in range(2):
            with pytest.raises(LintxError, match="not a finite number"):
                runner.draw()


def test_a_damaged_file_is_refused(open_program, build_tiny_model) -> None:
    model = build_tiny_model()
    data = encode_int8(model)
    cases = {
        "not a program file": b"PK" + data[2:],
        "has format 4": data[:8] + b"\4" + data[9:],
        "bytes instead of": data[:-1],
        "checksum": data[:-9] + b"!" + data[-8:],
    }
    for reason, damaged in cases.items():
        with pytest.raises(LintxError, match=reason):
            open_program(model, data=damaged)
    for length in [*range(1, 100), *range(100, len(data), 997)]:
        with pytest.raises(LintxError):
            open_program(model, data=data[:length])


def test_unknown_and_unsound_operations_are_refused(open_program, build_tiny_model) -> None:
    model = build_tiny_model()
    data = encode_int8(model)

    def replace(old: bytes, new: bytes) -> bytes:
        damaged = data[32:].replace(old, new, 1)
        assert damaged != data[32:]
        return data[:24] + zlib.crc32(damaged).to_bytes(8, "little") + damaged

    with pytest.raises(LintxError, match=r"unknown operation 'mix\.tinear'"):
        open_program(model, data=replace(b"mix.linear", b"mix.tinear"))
    heads = (2).to_bytes(8, "little") + (8).to_bytes(8, "little") * 2
    with pytest.raises(LintxError, match=r"operation 'mix\.linear' leaves its buffers"):
        open_program(model, data=replace(heads, (3).to_bytes(8, "little") + heads[8:]))


@pytest.mark.parametrize(
    ("changes", "name", "place", "value"),
    [
        ({"attention": "mesa"}, "mix.mesa", -1, 9),  # iterations of a head of width 8
        ({"short_convolution": 3}, "short_convolution", 1, 0),  # columns
        (CHANGES["palette"], "look_around", 1, 6),  # levels of seven colours
        (CHANGES["palette"], "look_around", 1, 8),
    ],
)
def test_integers_without_meaning_are_refused(open_program, build_tiny_model, monkeypatch, changes, name, place, value):
    encode = program_file._encode_operation

    def change(operation: Operation) -> bytes:
        integers = list(operation.integers)
        if operation.name == name:
            integers[place] = value
        return encode(dataclasses.replace(operation, integers=tuple(integers)))

    model = build_tiny_model(**changes)
    open_program(model)
    monkeypatch.setattr(program_file, "_encode_operation", change)
    with pytest.raises(LintxError, match=f"operation '{name}' leaves its buffers"):
        open_program(model)


def compile_executable(target: Path, *arguments: str) -> None:
    """Compile C++ for any processor of this architecture, as docs/reference/formats.md explains."""
    compiler = find_system_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    flags = ("-std=c++17", "-ffp-contract=off", "-I", str(NATIVE_FOLDER))
    files = [str(NATIVE_FOLDER / f"{name}.cpp") for name in ("runner", "threads")]
    subprocess.run([*compiler.command, *flags, *arguments, *files, "-o", str(target), "-pthread"], check=True)


@pytest.mark.slow
def test_an_executable_draws_the_images_of_a_shipped_model(tmp_path, build_tiny_model) -> None:
    model = load_model("mnist-deep")
    (tmp_path / "digits.lintx").write_bytes(encode_int8(model))
    compile_executable(tmp_path / "draw", "-O1", str(NATIVE_FOLDER / "draw.cpp"))
    expected = Sampler(model, 11, engine=NATIVE, products=torch.int8).sample_images(2)
    for count in (1, 2):
        drawn = subprocess.run(
            [tmp_path / "draw", tmp_path / "digits.lintx", "11", str(count)], env={}, check=True, capture_output=True
        )
        assert drawn.stdout == b"P5\n28 %d\n255\n" % (28 * count) + expected[:count].tobytes()
    cold = Sampler(model, 11, Filters(temperature=0.8), engine=NATIVE, products=torch.int8).sample_images(2)
    command = [tmp_path / "draw", tmp_path / "digits.lintx", "11", "2", "0.8"]
    assert subprocess.run(command, env={}, check=True, capture_output=True).stdout.endswith(cold.tobytes())
    palette = build_tiny_model(**CHANGES["palette"])
    (tmp_path / "sprites.lintx").write_bytes(encode_int8(palette))
    found = Sampler(palette, 11, engine=NATIVE, products=torch.int8).sample_images(2)
    command = [tmp_path / "draw", tmp_path / "sprites.lintx", "11", "2"]
    header = b"P7\nWIDTH 6\nHEIGHT 14\nDEPTH 4\nMAXVAL 255\nTUPLTYPE RGB_ALPHA\nENDHDR\n"
    drawn = subprocess.run(command, env={}, check=True, capture_output=True)
    assert drawn.stdout == header + paint(found, palette.config.image).tobytes()
    (tmp_path / "digits.lintx").write_bytes(b"LINTX")
    drawn = subprocess.run(
        [tmp_path / "draw", tmp_path / "digits.lintx", "11", "1"], check=False, capture_output=True, text=True
    )
    assert (drawn.returncode, drawn.stderr) == (1, "error: this is not a program file of lintx\n")


@pytest.mark.slow
def test_no_damage_makes_a_program_access_memory_outside_its_buffers(build_tiny_model, tmp_path, share) -> None:
    image = ImageShape(height=POSITIONS // 10, width=10, levels=16)
    shared = {"image": image, "classes": 3, "optional_class": True}  # with guidance, two images are one
    # Variants of a mechanism have the same operation, so the first of each is enough.
    first = dict(reversed(VARIANTS.values()))
    variants = VARIANTS.values() if share else first.items()
    models = [build_tiny_model(attention=name, attention_options=o, **shared) for name, o in variants]
    cases = CHANGES | LAYER_PARTS
    models += [build_tiny_model(**changes) for key, changes in cases.items() if "hashed" not in key]
    files = []
    for number, model in enumerate(models):
        products = (torch.int8, torch.float32, torch.bfloat16)[number % 3]
        files.append(tmp_path / f"{number}.lintx")
        files[-1].write_bytes(encode_model(model, NativeEngine.window, products))
    sanitizers = ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all")
    fuzz = str(Path(__file__).with_name("fuzz.cpp"))
    compile_executable(tmp_path / "fuzz", "-O0", *sanitizers, fuzz)  # -O1 compiles for longer than it saves
    environment = {"ASAN_OPTIONS": "allocator_may_return_null=1:max_allocation_size_mb=1000"}
    found = subprocess.run(
        [tmp_path / "fuzz", "1", str(max(round(400 * share), 5)), *files],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    accepted, tried = map(int, re.findall(r"\d+", found.stdout))
    print(f"{tried:,} damaged programs, {accepted:,} of them accepted")  # noqa: T201
    assert 0 < accepted < tried


def test_a_mixture_that_no_runner_can_open_is_not_encoded(build_tiny_model) -> None:
    with pytest.raises(NoProgram, match="mixtures up to 1024"):
        encode_model(build_tiny_model(head="mixture", mixtures=1025), 1, torch.int8)
