"""Fixtures for tests of the page in a browser."""

from collections.abc import Callable, Iterator

import pytest
from demo.browser import Browser, Site, open_browser, serve

from linformer_cli.checkpoint import open_checkpoint
from linformer_cli.demo.site import build_site


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
