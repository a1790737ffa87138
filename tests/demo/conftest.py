"""Fixtures for tests of the page in a browser."""

import contextlib
import json
from collections.abc import Callable, Iterator

import pytest
import torch
from demo.browser import Browser, Site, open_browser, serve

from linformer_cli.checkpoint import open_checkpoint
from linformer_cli.data.look import Look
from linformer_cli.demo.site import BINARY, DESCRIPTION, MODEL, File, build_site, list_look
from linformer_cli.model.compile_step import encode_model
from linformer_cli.model.pixel_model import PixelModel


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def site() -> Site:
    return build_site(*open_checkpoint("mnist-deep"))


@pytest.fixture(scope="module")
def url(site) -> Iterator[str]:
    with serve(site) as url:
        yield url


@pytest.fixture
def open_view(browser, url) -> Iterator[Callable[[str], Browser]]:
    """Provides `open_view(name)`. At the end of the test, the console must be empty."""

    def open_view(name: str, address: str = url) -> Browser:
        browser.open("about:blank")
        browser.open(f"{address}#{name}")
        browser.wait("document.body.dataset.ready")
        return browser

    yield open_view
    assert browser.problems() == []


@pytest.fixture
def open_tiny(open_view, site) -> Iterator[Callable[..., Browser]]:
    """Provides `open_tiny(view, model, look, **changes to the description)` for models of `build_tiny_model`."""
    with contextlib.ExitStack() as servers:

        def open_tiny(view: str, model: PixelModel, look: Look | None = None, **changes: object) -> Browser:
            own = {"name": "tiny", "heads": 2, "head_width": 8, "rival": None}
            own["look"] = list_look(look or Look(model.config.image))
            described = json.loads(site[DESCRIPTION].data) | own | changes
            files = {DESCRIPTION: File("application/json", json.dumps(described).encode())}
            files[MODEL] = File(BINARY, encode_model(model, 8, torch.int8))
            return open_view(view, servers.enter_context(serve({**site, **files})))

        yield open_tiny
