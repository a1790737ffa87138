"""A headless Chromium, driven over WebDriver with the standard library only."""

import base64
import contextlib
import io
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from linformer_cli.demo.server import DemoServer
from linformer_cli.demo.site import File

Site = dict[str, File]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1200,1000")
needs_browser = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="the page is opened with Chromium and chromedriver"),
]
COMPLETED = "document.getElementById('completions').ariaBusy === 'false'"
PIXELS = """Array.from(document.querySelectorAll('%s canvas'), (canvas) => Array.from(
  canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data))"""

# Gives a file to the page, as the bytes in base64, by an event: its name, class and property.
GIVE = """((letters, type, kind, property) => {
  const data = new DataTransfer();
  data.items.add(new File([Uint8Array.from(atob(letters), (letter) => letter.charCodeAt())], 'own.png'));
  const event = new kind(type, { [property]: data, bubbles: true, cancelable: true });
  document.getElementById('draw').dispatchEvent(event);
})('%s', %s)"""
EVENTS = {"drop": "'drop', DragEvent, 'dataTransfer'", "paste": "'paste', ClipboardEvent, 'clipboardData'"}

# Advice about reading canvases, and an icon of the tab that the browser asks for when the test has stopped its server.
HARMLESS = ("willReadFrequently", "icon.svg - Failed to load resource: net::")


class Browser:
    """A session of the WebDriver server at `address`."""

    def __init__(self, address: str) -> None:
        options = {"binary": CHROMIUM, "args": ARGUMENTS}
        asked = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.base = f"{address}/session"
        found = self.call("", {"capabilities": {"alwaysMatch": asked}})
        self.base += f"/{found['sessionId']}"

    def call(self, path: str, body: object = None, method: str = "POST") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def open(self, url: str) -> None:
        self.call("/url", {"url": url})

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        return self.call("/execute/sync", {"script": f"return {script}", "args": []})

    def wait(self, script: str, seconds: float = 60.0) -> Any:
        """Wait until an expression is true; returns its value."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            assert time.monotonic() < end, f"still false: {script}; the page says: {self.evaluate(PAGE_ERROR)}"
            time.sleep(0.05)
        return value

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def locate(self, selector: str, points: list[tuple[float, float]]) -> list[dict[str, int]]:
        """The places on the page of points that are shares of the width and height of an element."""
        box = self.evaluate(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        return [{"x": round(box["x"] + x * box["width"]), "y": round(box["y"] + y * box["height"])} for x, y in points]

    def give(self, file: bytes, event: str = "drop") -> None:
        """Drop a file on the page, or paste it."""
        self.evaluate(GIVE % (base64.b64encode(file).decode(), EVENTS[event]))

    def drag(self, selector: str, points: list[tuple[float, float]]) -> None:
        """Press the mouse button, move and release; points are shares of the width and height of an element."""
        moves = [{"type": "pointerMove", "duration": 10, **place} for place in self.locate(selector, points)]
        actions = [moves[0], {"type": "pointerDown", "button": 0}, *moves[1:], {"type": "pointerUp", "button": 0}]
        self.call("/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": actions}]})

    def touch(self, selector: str, points: list[tuple[float, float]]) -> None:
        """Put a finger down, move it and lift it; points are shares of the width and height of an element."""
        for number, place in enumerate(self.locate(selector, points)):
            self.command("Input.dispatchTouchEvent", type="touchMove" if number else "touchStart", touchPoints=[place])
        self.command("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    @contextlib.contextmanager
    def as_phone(self, width: int) -> Iterator[None]:
        """A context in which the browser has the touch screen of a phone, `width` pixels wide."""
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=2, mobile=True)
        self.command("Emulation.setTouchEmulationEnabled", enabled=True)
        try:
            yield
        finally:
            self.command("Emulation.setTouchEmulationEnabled", enabled=False)
            self.command("Emulation.clearDeviceMetricsOverride")

    def focused_label(self) -> str:
        """What a screen reader calls the element that has the focus."""
        (element,) = self.call("/element/active", method="GET").values()
        return str(self.call(f"/element/{element}/computedlabel", method="GET")).strip()

    def press(self, keys: str, focus: str | None = None) -> None:
        """Press keys one after the other, in the element with the id `focus` or in the one that has the focus."""
        if focus:
            self.evaluate(f"document.getElementById('{focus}').focus()")
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.call("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def command(self, name: str, **parameters: object) -> Any:
        """Send a command of the DevTools protocol; returns its result."""
        return self.call("/goog/cdp/execute", {"cmd": name, "params": parameters})

    def problems(self) -> list[str]:
        """The warnings and errors on the console since the last call, except for those in `HARMLESS`."""
        entries = self.call("/se/log", {"type": "browser"})
        found = [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]
        return [message for message in found if not any(part in message for part in HARMLESS)]

    def screenshot(self) -> bytes:
        return base64.b64decode(self.call("/screenshot", method="GET"))


@contextlib.contextmanager
def serve(site: Site) -> Iterator[str]:
    with DemoServer(site) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


def encode_picture(pixels: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def read_images(browser: Browser, selector: str) -> list[list[tuple[int, ...]]]:
    """The red, green and blue of every pixel of each canvas."""
    found = browser.evaluate(PIXELS % selector)
    return [list(zip(data[::4], data[1::4], data[2::4], strict=True)) for data in found]


PAGE_ERROR = "document.getElementById('error')?.textContent"


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen([str(DRIVER), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5).close()
                break
            time.sleep(0.05)
        browser = Browser(f"http://127.0.0.1:{port}")
        try:
            yield browser
        finally:
            browser.call("", method="DELETE")
    finally:
        driver.terminate()
        driver.wait()
