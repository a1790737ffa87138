"""Tests of the demo's page in a headless Chromium."""

import re

import numpy as np
import pytest
import torch
from data.photographs import CASES, photograph
from demo.browser import COMPLETED, PAGE_ERROR, encode_picture, needs_browser, read_images, serve
from machine import needs_library

from linformer_cli.checkpoint import load_model
from linformer_cli.checkpoint_files import Frame, find_shipped
from linformer_cli.config import ImageShape
from linformer_cli.data.framing import frame_picture
from linformer_cli.data.look import Look
from linformer_cli.demo.site import BINARY, MODEL, File, build_sites
from linformer_cli.sampling.choose import Filters
from linformer_cli.sampling.decode import Sampler
from linformer_cli.sampling.engines import NATIVE

pytestmark = needs_browser
# Strokes of a 7, in shares of the board.
SEVEN = [(0.3, 0.25), (0.5, 0.25), (0.7, 0.25), (0.62, 0.4), (0.54, 0.6), (0.46, 0.8)]
COUNT_INK = """document.querySelector('#completions canvas').getContext('2d').getImageData(0, 0, 28, 28).data.filter(
  (brightness, n) => n % 4 === 0 && brightness > 99).length"""


def test_a_drawing_is_completed(open_view) -> None:
    page = open_view("draw")
    page.wait(COMPLETED)
    before = read_images(page, "#completions")
    page.drag("#board", SEVEN)
    page.wait(COMPLETED)
    completions = read_images(page, "#completions")
    assert len(completions) == 6
    assert all(old != new for old, new in zip(before, completions, strict=True))
    grey = [[red == green == blue for red, green, blue in image] for image in completions]
    kept = next(n for n in range(0, 784, 28) if not all(grey[0][n : n + 28]))
    assert 150 < kept < 500
    assert all(image[:kept] == completions[0][:kept] for image in completions)
    assert len({tuple(image) for image in completions}) > 1
    assert max(red for red, _, _ in completions[0][:kept]) > 240
    # The bar of the 7 is wider than it is tall.
    rows = [n // 28 for n in range(kept) if completions[0][n][0] > 128]
    columns = [n % 28 for n in range(kept) if completions[0][n][0] > 128]
    assert min(rows) in (7, 8, 9)  # the centre of mass of a 7 is in its upper half
    assert max(columns) - min(columns) > 10


def test_an_erased_part_of_a_drawing_is_drawn_again(open_tiny, build_tiny_model) -> None:
    page = open_tiny("draw", build_tiny_model(image=ImageShape(height=14, width=14, levels=4)))
    page.press("\ue010", "line")  # end
    page.wait(COMPLETED)
    (before, *_) = read_images(page, "#completions")
    page.click("#tool [value=eraser]")
    page.drag("#board", [(0.2, 0.5), (0.5, 0.5)])
    page.wait(COMPLETED)
    completions = read_images(page, "#completions")
    page.click("#tool [value=pencil]")
    page.drag("#board", [(0.2, 0.5), (0.5, 0.5)])
    page.wait(COMPLETED)
    inked = read_images(page, "#completions")
    changed = {n // 14 for image in completions for n in range(196) if image[n] != before[n]}
    assert changed and changed <= {5, 6, 7, 8}
    assert len({tuple(image) for image in completions}) == 6
    # The pen goes over what is erased, and is narrower.
    assert all(image[7 * 14 + column] == (255, 255, 255) for image in inked for column in range(3, 7))


def test_a_completion_that_rests_on_few_particles_is_reported(open_tiny, build_tiny_model) -> None:
    few = "(document.getElementById('draw').innerText.match(/Few.*/) ?? [''])[0]"  # what can be read
    for certain in (False, True):
        model = build_tiny_model(image=ImageShape(height=6, width=6, levels=4))
        model.head.projection.weight.data.mul_(7 if certain else 0.1)
        page = open_tiny("draw", model)
        page.click("#tool [value=eraser]")
        page.drag("#board", [(0.2, 0.2), (0.8, 0.2)])
        page.wait(COMPLETED)
        said = r"Few of 64 tries fit what is kept, in [1-6] of 6 completions\. More tries"
        assert re.fullmatch(said if certain else "", page.evaluate(few))
    page.click("#tries")
    page.wait(COMPLETED)
    assert re.fullmatch(r"Few of 256 tries fit what is kept, in [1-6] of 6 completions\.", page.evaluate(few))
    page.click("#undo")  # everything is kept above the line
    page.wait(COMPLETED)
    assert page.evaluate(few) == ""


def test_a_photograph_of_a_drawing_is_completed(open_tiny, build_tiny_model) -> None:
    shape, frame = ImageShape(height=28, width=28), Frame(ground=0, ink=253, box=20, centre=(14.5, 14.5))
    page = open_tiny("draw", build_tiny_model(image=shape), Look(shape, frame=frame))
    page.press("\ue010", "line")  # end

    def read_board(pictures: int) -> list[int]:
        page.wait(f"document.body.dataset.pictures === '{pictures}' && {COMPLETED}")
        return [red for red, _, _ in read_images(page, "#completions")[0]]

    picture, _ = photograph(38, *CASES[38])
    page.give(encode_picture(np.asarray(picture)))
    framed = read_board(1)
    ((expected, _),) = frame_picture(picture, frame, shape)
    assert np.corrcoef(framed, expected.ravel())[0, 1] > 0.97
    # The pen draws on the picture, and both stay where they are, wherever the line is.
    page.drag("#board", [(0.01, 0.01), (0.01, 0.99)])
    drawn = read_board(1)
    assert min(drawn[::28]) > 200 and all(drawn[n] == framed[n] for n in range(784) if n % 28 > 2)
    page.press("\ue011" + "\ue00f" * 3, "line")  # home, and page down
    assert read_board(1)[: 12 * 28] == drawn[: 12 * 28]
    page.press("\ue010")
    # A picture as large as the images has their frame.
    grey = np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)
    page.give(encode_picture(grey), "paste")
    assert read_board(2) == grey.ravel().tolist()
    for _ in range(2):  # the pasted picture, and the line
        page.click("#undo")
    assert read_board(2) == framed
    page.give(encode_picture(np.full((300, 300), 230, np.uint8)))
    said = page.wait(f"!document.getElementById('error').hidden && {PAGE_ERROR}")
    assert said == "own.png shows no drawing on a plain ground."
    assert read_board(2) == framed


def test_the_line_and_the_pen_follow_the_keyboard(open_view) -> None:
    page = open_view("draw")
    page.evaluate("document.getElementById('clear').click()")
    now = "Number(document.getElementById('line').getAttribute('aria-valuenow'))"
    first = page.evaluate(now)
    page.press("\ue015\ue015\ue013", "line")  # down, down, up
    assert page.evaluate(now) == first + 1
    page.press("\ue010")  # end
    assert page.evaluate(now) == 28
    page.wait(COMPLETED)
    assert page.evaluate(COUNT_INK) == 0
    page.press(" " + "\ue015" * 6 + " ", "board")
    page.wait(f"{COUNT_INK} > 8")
    page.wait(COMPLETED)
    assert page.evaluate("document.getElementById('draw-speed').textContent") == ""  # the model drew nothing
    page.evaluate("HTMLAnchorElement.prototype.click = function () { document.title = this.download; }")
    page.click("#draw-save")
    page.wait("document.title === 'mnist-deep-completed.png'")


def test_a_change_of_the_tab_loses_no_value(open_view) -> None:
    found = []
    for leave in (False, True):
        page = open_view("inspect")
        page.evaluate("document.getElementById('speed').value = 5")
        page.wait("document.body.dataset.known > 100")
        if leave:
            page.click("#tab-sample")
            page.click("#tab-inspect")
        page.wait("document.body.dataset.known == 784")
        found.append(page.evaluate("document.getElementById('bits').textContent"))
    assert found[0] == found[1]
    page.click("#tab-sample")  # its images are half drawn
    page.wait("!document.getElementById('save').disabled")
    page.evaluate("HTMLAnchorElement.prototype.click = function () { document.title = this.download; }")
    page.click("#save")
    page.wait("document.title === 'mnist-deep-seed-0-temperature-1.png'")


@needs_library
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_samples_are_those_of_the_command_line(open_view, temperature) -> None:
    page = open_view("sample")
    page.evaluate(f"document.getElementById('temperature').value = {temperature}")
    page.evaluate("document.getElementById('seed').value = 7")
    page.evaluate("document.getElementById('seed').onchange()")
    page.wait("document.getElementById('grid').dataset.done === '7'")
    command = page.evaluate("document.getElementById('sample-speed').textContent")
    assert command.endswith("--precision int8" if temperature == 1 else "--temperature 0.8")
    found = [[red for red, _, _ in image] for image in read_images(page, "#grid")]
    filters = Filters(temperature)
    sampler = Sampler(load_model("mnist-deep"), 7, filters, engine=NATIVE, products=torch.int8)
    assert found == [image.reshape(-1).tolist() for image in sampler.sample_images(len(found))]


def test_a_step_shows_state_bits_and_probabilities(open_view) -> None:
    page = open_view("inspect")
    page.wait("document.body.dataset.known > 3")
    page.click("#play")
    before = int(page.wait("document.body.dataset.known"))
    page.click("#step")
    page.wait(f"document.body.dataset.known == {before + 1}")
    state = read_images(page, ".state")
    page.evaluate("document.getElementById('layer').value = 3, document.getElementById('layer').onchange()")
    assert read_images(page, ".state") != state
    page.evaluate("document.getElementById('speed').value = 5, document.getElementById('play').click()")
    page.wait("document.body.dataset.known == 784")
    assert page.evaluate("Number(document.getElementById('bits').textContent)") > 50


def test_both_models_race(open_view) -> None:
    page = open_view("race")
    count = "Array.from(document.querySelectorAll('.lane dd:nth-of-type(1)'), (found) => Number(found.textContent))"
    page.wait(f"Math.min(...{count}) > 0.3")
    page.click("#race-stop")
    stopped = page.evaluate(count)
    sizes = page.evaluate(
        "Array.from(document.querySelectorAll('.lane dd:nth-of-type(3)'), (found) => found.textContent)"
    )
    assert sizes[0] == "132 KiB"
    page.click("#race-go")
    page.wait(f"{count}[0] > 0 && {count}[0] < {stopped[0]}")


def test_views_change_with_the_arrow_keys(open_view) -> None:
    page = open_view("draw")
    page.press("\ue014", "tab-draw")  # right
    assert page.evaluate("location.hash") == "#sample"
    assert page.evaluate("document.getElementById('draw').hidden")
    page.press("\ue012\ue012")  # left, and around the end
    assert page.evaluate("location.hash") == "#race"


TAB_KEY = "\ue004"
CONTROLS = {
    "draw": [
        "Drawing. Arrow keys move the pen, the space bar lowers and lifts it.",
        *("First row that the model draws", "Pen", "Undo", "Clear", "Open a picture"),
        *("Other completions", "Class"),
    ],
    "sample": ["Seed", "Temperature", "Class", "Next seed", "Save PNG"],
    "inspect": ["New image", "Pause", "Step", "Speed", "Layer", "Head", "Show"],
    "race": ["Start again", "Stop"],
}


@pytest.mark.parametrize("view", CONTROLS)
def test_the_keyboard_reaches_every_control(open_view, view) -> None:
    page = open_view(view)
    page.wait("document.getElementById('grid').dataset.done" if view == "sample" else "true")
    page.evaluate(f"document.getElementById('tab-{view}').focus()")
    found = []
    for _ in CONTROLS[view]:
        page.press(TAB_KEY)
        found.append(page.focused_label())
        assert page.evaluate("getComputedStyle(document.activeElement).outlineWidth") == "3px"
    assert found == CONTROLS[view]
    visible = f"document.querySelectorAll('#{view} :is(button, input, select, [tabindex])')"
    reached = "(control) => control.checkVisibility() && (control.type !== 'radio' || control.checked)"
    count = f"Array.from({visible}).filter({reached}).length"
    assert page.evaluate(count) == len(found)


@pytest.mark.parametrize("view", CONTROLS)
def test_the_page_fits_a_phone(open_view, view) -> None:
    page = open_view(view)
    with page.as_phone(360):
        assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_a_finger_draws_and_moves_the_line(browser, open_view) -> None:
    with browser.as_phone(390):
        page = open_view("draw")
        page.wait(COMPLETED)
        page.touch("#board", SEVEN)
        page.wait(COMPLETED)
        (first, *_) = read_images(page, "#completions")
        page.evaluate("scrollTo(0, 0)")
        now = "Number(document.getElementById('line').getAttribute('aria-valuenow'))"
        before = page.evaluate(now)
        page.touch("#line span", [(0.5, 0.5), (0.5, 2.0), (0.5, 4.0)])
        assert page.evaluate(now) >= before + 5
        page.wait(COMPLETED)
        (second, *_) = read_images(page, "#completions")
        assert page.evaluate("scrollY") == 0  # the page does not move under the finger
    grey = [sum(red == green == blue for red, green, blue in image) for image in (first, second)]
    # The model draws in orange, and only below the line.
    assert max(red for red, _, _ in first[:300]) > 240
    assert grey[0] < grey[1] and first != second


def test_a_damaged_model_is_reported_on_the_page(browser, site) -> None:
    program = site[MODEL].data
    cases = {
        "bytes instead of": {**site, MODEL: File(BINARY, site[MODEL].data[:-1])},
        "has format 4": {**site, MODEL: File(BINARY, program[:8] + b"\4" + program[9:])},
        "has no SIMD": {**site, "engine.wasm": File("application/wasm", b"\0asm\1\0\0\0\xff")},
        "model.lintx cannot be loaded": {name: file for name, file in site.items() if name != MODEL},
        "model.json cannot be loaded": {name: file for name, file in site.items() if name != "model.json"},
    }
    for reason, damaged in cases.items():
        with serve(damaged) as address:
            browser.open(address)
            assert reason in browser.wait(f"!document.getElementById('error').hidden && {PAGE_ERROR}")
    with serve({name: file for name, file in site.items() if name != "draw.js"}) as address:
        browser.open(address)
        assert "a file is missing" in browser.evaluate("document.getElementById('about').textContent")
    browser.problems()  # the browser reports missing files, too


def test_a_page_that_is_opened_as_a_file_says_what_to_do(browser, site, tmp_path) -> None:
    for name, file in site.items():
        (tmp_path / name).write_bytes(file.data)
    browser.open((tmp_path / "index.html").as_uri())
    browser.wait("document.querySelector('.late').checkVisibility({ visibilityProperty: true })")
    assert "lintx demo" in browser.evaluate("document.getElementById('about').innerText")
    assert browser.evaluate("document.querySelector('main').checkVisibility()") is False
    browser.problems()  # the browser reports that it loads no modules


def test_another_model_is_chosen_from_the_list(open_view) -> None:
    with serve(build_sites({name: find_shipped(name) for name in ("mnist-deep", "sprites")})) as address:
        page = open_view("sample", address)
        page.wait("document.title === 'lintx · mnist-deep'")
        page.evaluate("(list => { list.value = 1; list.onchange(); })(document.getElementById('model'))")
        page.wait("document.body.dataset.ready && document.title === 'lintx · sprites'")
        assert page.evaluate("[location.search, location.hash].join()") == "?model=1,#sample"
        assert page.evaluate("document.getElementById('model').selectedOptions[0].text") == "sprites"
        page.click("#tab-race")
        page.wait("!document.getElementById('race-stop').disabled")


def test_a_page_needs_no_server_once_it_is_loaded(open_view, site) -> None:
    with serve(site) as address:
        page = open_view("draw", address)
        loaded = "performance.getEntriesByType('resource').some(({ name }) => name.endsWith('rival.lintx'))"
        assert not page.evaluate(loaded)
        page.click("#tab-race")
        page.wait("!document.getElementById('race-stop').disabled")
        assert page.evaluate(loaded)
    for view in ("sample", "inspect", "race", "draw"):
        page.click(f"#tab-{view}")
    page.wait(COMPLETED)
    page.click("#more")
    page.wait(COMPLETED)


@needs_library
@pytest.mark.parametrize("optional", [False, True])
def test_a_model_with_classes_draws_the_chosen_class(open_tiny, build_tiny_model, optional) -> None:
    model = build_tiny_model(classes=3, optional_class=optional)
    look = Look(model.config.image, class_names=("ant", "bee", "sea cow"))
    page = open_tiny("sample", model, look, optional_class=optional, guidance=3.0)
    assert page.evaluate("document.getElementById('tab-race').hidden")
    names = ["any"] * optional + ["ant", "bee", "sea cow"]
    assert page.evaluate("Array.from(document.getElementById('draw-class').options, ({ text }) => text)") == names
    page.wait("document.getElementById('sample-speed').textContent.includes('--precision int8')")
    assert page.evaluate("document.getElementById('class').options[0].text") == ("any" if optional else "all")
    first = [[red for red, _, _ in image] for image in read_images(page, "#grid")]
    page.evaluate("document.getElementById('class').value = 2, document.getElementById('class').onchange()")
    assert page.evaluate("document.getElementById('class').selectedOptions[0].text") == "sea cow"
    page.wait("document.getElementById('sample-speed').textContent.includes(`--class 'sea cow'`)")
    said = page.evaluate("document.getElementById('sample-speed').textContent")
    assert "--guidance" not in said
    found = [[red for red, _, _ in image] for image in read_images(page, "#grid")]
    guided = Filters(guidance=3.0 if optional else 1.0)
    for images, labels, filters in ((first, None, Filters()), (found, [2] * len(found), guided)):
        sampler = Sampler(model, 0, filters, engine=NATIVE, products=torch.int8)
        expected = sampler.sample(range(len(images)), labels).values.long()
        assert images == (-(-expected * 255 // 15)).tolist()


def test_every_head_of_a_deep_model_can_be_selected(open_tiny, build_tiny_model) -> None:
    page = open_tiny("inspect", build_tiny_model(layers=11))
    page.wait("document.body.dataset.known > 0")
    assert page.evaluate("document.getElementById('state-caption').textContent").startswith("Layer 1, head 1: s (8")
    # 8 layers are side by side, and 3 below them.
    for place, layer, head in (((0.9, 0.1), 8, 1), ((0.3, 0.9), 11, 2), ((0.9, 0.9), 11, 2), ((0.1, 0.6), 9, 1)):
        page.drag("#inside-all", [place])
        expected = f"Layer {layer}, head {head}: s (8 × 8) and, to its right, z"
        assert page.evaluate("document.getElementById('state-caption').textContent") == expected


@needs_library
@pytest.mark.parametrize("changes", [{}, {"embedding": "none", "context": "recent"}])
def test_a_model_of_bytes_shows_its_state_and_its_text(open_tiny, build_tiny_model, changes) -> None:
    model = build_tiny_model(image=ImageShape(height=1, width=40), **changes)
    page = open_tiny("draw", model, text=True, bits_unit="bits/byte", bits_per_dim=2.5)  # the only view is the state
    assert page.evaluate("['draw', 'sample', 'race'].every((name) => document.getElementById(name).hidden)")
    assert "bits/byte" in page.evaluate("document.getElementById('facts').textContent")
    page.evaluate("document.getElementById('speed').value = 5")
    page.wait("document.body.dataset.known == 40")
    found = page.evaluate("document.getElementById('inside-text').textContent")
    sampler = Sampler(model, 0, engine=NATIVE, products=torch.int8)
    assert found == sampler.sample([0]).values.numpy().tobytes().decode(errors="replace")
