"""Tests that the engine of the browser demo draws the images of `lintx sample --precision int8`, in node."""

import shutil
import subprocess
from collections.abc import Callable

import pytest
import torch
from demo.node import NODE, Node, needs_node
from machine import needs_library
from sampling.cases import CHANGES
from sampling.test_native_mechanisms import POSITIONS, VARIANTS
from sampling.test_particles import keep

from linformer_cli.checkpoint import load_model
from linformer_cli.config import ImageShape
from linformer_cli.data.sequence import paint
from linformer_cli.demo.build import DIGEST, ENGINE, FOLDER, compute_digest
from linformer_cli.model.compile_step import encode_model
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.sampling.choose import Filters
from linformer_cli.sampling.decode import Sampler
from linformer_cli.sampling.engines import NATIVE
from linformer_cli.sampling.engines.native import NativeEngine

SEED = 11
# Draws 1 and 2 images with every file, after a setting. With guidance, an image takes two places of the batch.
DRAW = """(names, open) => names.map((name) => [1, 2].map((images) => {{
  const runner = open(name, {batch} * images);
  {setting}
  runner.start(11, 0, {label});
  while (runner.draw() < runner.values);
  return runner.allPixels().map((pixels) => Array.from(pixels));
}}))"""


def draw(setting: str = "", batch: int = 1, label: str = "null") -> str:
    return DRAW.format(setting=setting, batch=batch, label=label)


# Returns images that continue a prefix read once, the same images if each of them reads the prefix, the probabilities
# of the next value, and the bytes of the state.
CONTINUE = """([name], open) => {
  const [prefix, continued, expected] = [open(name, 1), open(name, 3), open(name, 3)];
  for (const runner of [prefix, expected]) {
    runner.start(4);
    for (let n = 0; n < 20; n++) runner.give(n % 3);
  }
  continued.start(4);
  continued.continueFrom(prefix);
  const probabilities = Array.from(continued.probabilities());
  for (const runner of [continued, expected]) while (runner.draw() < runner.values);
  return [continued.allPixels(), expected.allPixels(), probabilities, prefix.stateBytes()];
}"""
# Keeps every third value, and draws the others with particles, without and with guidance.
KEEP_ANYWHERE = """([name], open) => [1, 2.5].map((weight) => {
  const each = weight === 1 ? 1 : 2;
  const runner = open(name, 16 * each);
  runner.resize(each);
  runner.setGuidance(weight);
  runner.start(11, 3, 2);
  runner.keep(16, Array.from({ length: runner.values }, (_, n) => (n % 3 ? -1 : n % 16)));
  while (runner.draw() < runner.values);
  const { pixels, fewest } = runner.pick();
  return [Array.from(pixels), fewest];
})"""
REFUSE = """(names, open) => names.map((name) => {
  try {
    open(name, 1);
  } catch (error) {
    return error.message;
  }
})"""

# The palettes of files, and by how much the memory grows with 100 runners that are closed.
PALETTES = """(names, open) => {
  const palettes = names.map((name) => Array.from(open(name, 1).palette()));
  const { engine } = open(names[0], 1);
  const before = engine.memory.buffer.byteLength;
  for (let n = 0; n < 100; n++) open(names[0], 64).close();
  return [palettes, engine.memory.buffer.byteLength - before];
}"""

RunNode = Callable[..., object]


@pytest.fixture
def run_node(tmp_path) -> RunNode:
    """Provides `run_node(function, files)`, which calls a JavaScript function with names of files and `open`."""
    return Node(tmp_path).run


def encode(model: PixelModel) -> bytes:
    return encode_model(model, NativeEngine.window, torch.int8)


def sample(model: PixelModel, count: int, filters: Filters | None = None) -> list[list[int]]:
    sampler = Sampler(model, SEED, filters, engine=NATIVE, products=torch.int8)
    return [image.reshape(-1).tolist() for image in paint(sampler.sample_images(count), model.config.image)]


def test_the_engine_is_newer_than_its_sources() -> None:
    command = "python -m linformer_cli.demo.build"
    assert DIGEST.read_text().strip() == compute_digest(), f"the C++ has changed; rebuild the demo's engine: {command}"


def test_the_digest_covers_the_sources(monkeypatch, tmp_path) -> None:
    shutil.copytree(FOLDER.parent / "native", tmp_path / "native", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("linformer_cli.demo.build.HEADERS", tmp_path / "native")
    assert compute_digest() == DIGEST.read_text().strip()
    with (tmp_path / "native" / "ops" / "project.h").open("a") as header:
        header.write("\n")
    assert compute_digest() != DIGEST.read_text().strip()


@pytest.mark.smoke
@needs_node
@needs_library
def test_a_shipped_model_draws_the_images_of_the_sampler(run_node) -> None:
    model = load_model("mnist-deep")
    expected = sample(model, 2)
    assert run_node(draw(), [encode(model)]) == [[expected[:1], expected]]


@needs_node
@needs_library
@pytest.mark.parametrize("name", ["mnist-deep", "mixture"])
def test_a_temperature_gives_the_images_of_the_sampler(run_node, build_tiny_model, name) -> None:
    model = build_tiny_model(head="mixture") if name == "mixture" else load_model(name)
    expected = sample(model, 2, Filters(temperature=0.8))
    assert run_node(draw("runner.setTemperature(0.8);"), [encode(model)]) == [[expected[:1], expected]]
    assert expected != sample(model, 2)


@needs_node
@needs_library
def test_guidance_gives_the_images_of_the_sampler(run_node) -> None:
    model = load_model("mnist-deep")
    sampler = Sampler(model, SEED, Filters(guidance=2.5), engine=NATIVE, products=torch.int8)
    expected = [image.reshape(-1).tolist() for image in sampler.sample_images(2, labels=[7, 7])]
    assert run_node(draw("runner.setGuidance(2.5);", batch=2, label="7"), [encode(model)]) == [[expected[:1], expected]]


@needs_node
@needs_library
def test_every_mechanism_draws_the_images_of_the_sampler(run_node, build_tiny_model) -> None:
    """The first variant of each; tests/native/test_other_machines.py has all."""
    image = ImageShape(height=POSITIONS // 10, width=10, levels=16)
    models = {
        name: build_tiny_model(attention=name, attention_options=options, image=image)
        for name, options in reversed(VARIANTS.values())
    }
    models |= {name: build_tiny_model(**CHANGES[name]) for name in ("palette", "palette, hashed, odd widths", "RGBA")}
    models["mixture in colour"] = build_tiny_model(head="mixture", image=ImageShape(height=5, width=4, channels=3))
    drawn = run_node(draw(), [encode(model) for model in models.values()])
    for (name, model), (alone, together) in zip(models.items(), drawn, strict=True):
        expected = sample(model, 2)
        assert [alone, together] == [expected[:1], expected], name


@needs_node
def test_a_beginning_is_completed_in_several_ways(run_node, build_tiny_model) -> None:
    model = build_tiny_model()
    continued, expected, probabilities, state_bytes = run_node(CONTINUE, [encode(model)])
    assert continued == expected
    assert sum(probabilities) == pytest.approx(1, abs=1e-12)
    assert state_bytes == 2 * 2 * (8 * 8 + 8) * 4  # layers, heads, s and z, bytes of a float


@needs_node
@needs_library
def test_values_are_kept_anywhere_as_in_complete(run_node, build_tiny_model) -> None:
    model = build_tiny_model(classes=3, optional_class=True)
    given = torch.tensor([-1 if n % 3 else n % 16 for n in range(64)])
    expected = []
    for filters in (Filters(), Filters(guidance=2.5)):
        engine = NativeEngine(model, 16 * filters.rows_per_image, products=torch.int8)
        kept = keep(engine, given, index=3, seed=SEED, filters=filters, label=2)
        expected.append([(-(-kept.values * 255 // 15)).tolist(), kept.fewest])
    assert run_node(KEEP_ANYWHERE, [encode(model)]) == expected


@needs_node
def test_the_palette_is_read_and_closed_runners_free_their_memory(run_node, build_tiny_model) -> None:
    models = [build_tiny_model(**CHANGES["palette"]), build_tiny_model()]
    (own, none), growth = run_node(PALETTES, [encode(model) for model in models])
    assert own == [band for colour in models[0].config.image.colours for band in colour] and none == []
    assert growth < 2**21


@needs_node
def test_a_damaged_file_is_refused_with_a_reason(run_node, build_tiny_model) -> None:
    data = encode(build_tiny_model())
    not_a_program, cut = run_node(REFUSE, [b"PK" + data[2:], data[:-1]])
    assert not_a_program == "The engine refuses: this is not a program file of lintx."
    assert "bytes instead of" in cut


@needs_node
def test_products_of_floats_are_refused(run_node, build_tiny_model) -> None:
    model = build_tiny_model()
    messages = run_node(REFUSE, [encode_model(model, 8, products) for products in (torch.float32, torch.bfloat16)])
    reason = "the file has products of floats, and this engine has products in int8 only"
    assert messages == [f"The engine refuses: {reason}."] * 2


def test_the_engine_is_small() -> None:
    """A page loads it before it can draw."""
    assert ENGINE.stat().st_size < 150_000


@needs_node
def test_the_engine_needs_nothing_from_the_page(tmp_path) -> None:
    script = "WebAssembly.Module.imports(new WebAssembly.Module(require('fs').readFileSync(process.argv[1])))"
    found = subprocess.run([str(NODE), "-p", script, ENGINE], check=True, capture_output=True, text=True)
    assert found.stdout == "[]\n"


@needs_node
def test_a_browser_without_simd_gets_a_clear_message(run_node, tmp_path) -> None:
    (tmp_path / "engine.wasm").write_bytes(b"\0asm\1\0\0\0\xff")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run_node(draw(), [])
    assert b"This browser cannot run the engine: its WebAssembly has no SIMD." in failed.value.stderr
