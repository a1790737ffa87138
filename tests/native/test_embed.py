"""Tests that the programs of docs/guide/embed.md draw, in C and in a web page."""

import functools
import shutil
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from demo.browser import needs_browser, open_browser, read_images
from demo.node import NODE, needs_node
from machine import needs_library
from numpy.typing import NDArray
from test_docs import GUIDE, read_blocks

from linformer_cli.checkpoint import load_model, open_checkpoint
from linformer_cli.demo.site import build_site
from linformer_cli.native.build import PACKAGE, find_system_compiler
from linformer_cli.sampling.choose import Filters
from linformer_cli.sampling.complete import complete_values
from linformer_cli.sampling.decode import Sampler
from linformer_cli.sampling.engines import NATIVE
from linformer_cli.sampling.engines.native import encode_step

pytestmark = [pytest.mark.slow, needs_library]
EXAMPLES = dict(reversed(list(read_blocks(GUIDE / "embed.md"))))  # the first of each language
(HOLE,) = (text for language, text in read_blocks(GUIDE / "embed.md") if "lintx_keep" in text)
# What a program needs of the folder native/.
SHIPPED = ("CMakeLists.txt", "runner.cpp", "threads.cpp", "*.h", "ops/*.h", "ops/parts/*.h")


@pytest.fixture(scope="module")
def seven() -> NDArray[np.uint8]:
    """The image [28, 28] that the examples draw: image 0 of seed 0, of class 7."""
    sampler = Sampler(load_model("mnist-deep"), 0, Filters(guidance=2.5), NATIVE, torch.int8)
    return sampler.sample_images(1, labels=[7])[0, :, :, 0]


@pytest.fixture(scope="module")
def filled() -> str:
    """What the programs that fill a hole print."""
    model = load_model("mnist-deep")
    values = Sampler(model, 2, engine=NATIVE, products=torch.int8).sample([0]).values[0].long()
    kept = torch.ones(28, 28, dtype=torch.bool)
    kept[10:20, 10:20] = False
    sampler = Sampler(model, 1, engine=NATIVE, products=torch.int8)
    work = complete_values(sampler, values, kept.flatten(), 1, particles=64)
    rows = "".join(" ".join(map(str, row)) + "\n" for row in work.values.view(28, 28).tolist())
    return rows + f"smallest effective sample size: {work.particles[0].fewest:.1f}\n"


def test_the_programs_in_c_draw_a_seven_and_fill_a_hole(tmp_path, seven, filled) -> None:
    if not shutil.which("cmake") or find_system_compiler() is None:
        pytest.skip("there is no cmake, or no C++ compiler")
    for file in (file for pattern in SHIPPED for file in (PACKAGE / "native").glob(pattern)):
        copy = tmp_path / file.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    (tmp_path / "digit.c").write_text(EXAMPLES["c"])
    (tmp_path / "CMakeLists.txt").write_text(EXAMPLES["cmake"])
    build = functools.partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True)
    build(["cmake", "-B", "build"])
    build(["cmake", "--build", "build"])
    run = functools.partial(
        subprocess.run, [tmp_path / "build" / "digit"], cwd=tmp_path, capture_output=True, text=True
    )
    refused = run()
    assert (refused.returncode, refused.stderr) == (1, "digits.lintx: No such file or directory\n")
    (tmp_path / "digits.lintx").write_bytes(encode_step(load_model("mnist-deep"), torch.int8))
    expected = ["".join("##" if pixel > 127 else "  " for pixel in row) for row in seven]
    assert run(check=True).stdout.splitlines() == expected
    (tmp_path / "digit.c").write_text(HOLE)
    build(["cmake", "--build", "build"])
    done = run(check=True)
    assert done.stdout + done.stderr == filled and "size: 2.4" in filled  # as the page says


@needs_node
def test_the_program_in_node_fills_the_same_hole(tmp_path, filled) -> None:
    (tmp_path / "site").mkdir()
    for name, file in build_site(*open_checkpoint("mnist-deep")).items():
        (tmp_path / "site" / name).write_bytes(file.data)
    (tmp_path / "site" / "package.json").write_text('{"type": "module"}')
    (tmp_path / "hole.mjs").write_text(EXAMPLES["js"])
    done = subprocess.run([str(NODE), "hole.mjs"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout + done.stderr == filled


@needs_browser[1]
def test_a_page_of_another_site_draws_the_same_seven(tmp_path, seven) -> None:
    (tmp_path / "index.html").write_text(EXAMPLES["html"])
    (tmp_path / "site").mkdir()
    for name, file in build_site(*open_checkpoint("mnist-deep")).items():
        if name in ("engine.js", "engine.wasm", "model.lintx"):
            (tmp_path / "site" / name).write_bytes(file.data)
    handler = functools.partial(QuietHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, open_browser() as browser:
        threading.Thread(target=server.serve_forever).start()
        try:
            browser.open(f"http://127.0.0.1:{server.server_port}/")
            browser.wait("document.querySelector('canvas').getContext('2d').getImageData(0, 0, 1, 1).data[3] === 255")
            (drawn,) = read_images(browser, "body")
        finally:
            server.shutdown()
    assert drawn == [(grey, grey, grey) for grey in seven.reshape(-1).tolist()]


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass
