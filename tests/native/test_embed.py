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
from machine import needs_library
from numpy.typing import NDArray
from test_docs import GUIDE, read_blocks

from linformer_cli.checkpoint import load_model, open_checkpoint
from linformer_cli.demo.site import build_site
from linformer_cli.native.build import PACKAGE, find_system_compiler
from linformer_cli.sampling.decode import Sampler
from linformer_cli.sampling.engines import NATIVE
from linformer_cli.sampling.engines.native import encode_step

pytestmark = [pytest.mark.slow, needs_library]
EXAMPLES = dict(read_blocks(GUIDE / "embed.md"))


@pytest.fixture(scope="module")
def seven() -> NDArray[np.uint8]:
    """The image [28, 28] that the examples draw: image 0 of seed 0, of class 7."""
    sampler = Sampler(load_model("mnist-deep"), 0, engine=NATIVE, products=torch.int8)
    return sampler.sample_images(1, labels=[7])[0, :, :, 0]


def test_the_program_in_c_draws_a_seven_in_the_terminal(tmp_path, seven) -> None:
    if not shutil.which("cmake") or find_system_compiler() is None:
        pytest.skip("there is no cmake, or no C++ compiler")
    shutil.copytree(PACKAGE / "native", tmp_path / "native", ignore=shutil.ignore_patterns("libraries"))
    (tmp_path / "digit.c").write_text(EXAMPLES["c"])
    (tmp_path / "CMakeLists.txt").write_text(EXAMPLES["cmake"])
    for command in (["-B", "build"], ["--build", "build"]):
        subprocess.run(["cmake", *command], cwd=tmp_path, check=True, capture_output=True)
    run = functools.partial(
        subprocess.run, [tmp_path / "build" / "digit"], cwd=tmp_path, capture_output=True, text=True
    )
    refused = run()
    assert (refused.returncode, refused.stderr) == (1, "this is not a program file of lintx\n")
    (tmp_path / "digits.lintx").write_bytes(encode_step(load_model("mnist-deep"), torch.int8))
    expected = ["".join("##" if pixel > 127 else "  " for pixel in row) for row in seven]
    assert run(check=True).stdout.splitlines() == expected


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
