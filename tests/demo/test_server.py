"""Tests of the demo's server: it answers only for its own files, and only to its own address."""

import re
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse

import pytest
from loops import loop_over

from linformer_cli.demo import server as server_module
from linformer_cli.demo.server import POLICY, DemoServer
from linformer_cli.demo.site import FOLDER, File, list_pages

SITE = {"index.html": File("text/html; charset=utf-8", b"<p>page"), "engine.wasm": File("application/wasm", b"\0asm")}


@pytest.fixture
def server() -> Iterator[DemoServer]:
    with DemoServer(SITE) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: DemoServer, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_files_are_answered_with_their_type(server) -> None:
    for path, name in {"/": "index.html", "/index.html": "index.html", "/engine.wasm?1": "engine.wasm"}.items():
        answer, body = ask(server, path)
        assert (answer.status, body) == (200, SITE[name].data)
        assert answer.headers["Content-Type"] == SITE[name].media_type
    answer, body = ask(server, "/", "HEAD")
    assert (answer.status, answer.headers["Content-Length"], body) == (200, "7", b"")


def test_every_answer_protects_the_page(server) -> None:
    for path in ("/", "/missing"):
        answer, _ = ask(server, path)
        assert answer.headers["Content-Security-Policy"] == f"{POLICY}; frame-ancestors 'none'"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


@loop_over(
    "path",
    ["/missing", "/demo/", "/x/index.html", "/../pyproject.toml", "/%2e%2e/pyproject.toml", "/server.py", "index.html"],
)
def test_other_paths_do_not_exist(server, path) -> None:
    assert ask(server, path)[0].status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_other_methods_are_refused(server, method) -> None:
    assert ask(server, "/", method)[0].status == 501


def test_only_the_own_host_is_answered(server) -> None:
    port = server.server_port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        assert ask(server, "/", Host=host)[0].status == 200
    for host in ("127.0.0.1", "example.org", f"example.org:{port}", f"127.0.0.1:{port + 1}", ""):
        assert ask(server, "/", Host=host)[0].status == 403
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.0 403")


def test_the_usual_port_is_left_out(server, monkeypatch) -> None:
    monkeypatch.setattr(server_module, "_HTTP_PORT", server.server_port)
    for host in ("127.0.0.1", "localhost"):
        assert ask(server, "/", Host=host)[0].status == 200
    assert ask(server, "/", Host="example.org")[0].status == 403


def test_other_machines_are_not_answered(server) -> None:
    assert server.server_address == ("127.0.0.1", server.server_port)
    assert server.url == f"http://127.0.0.1:{server.server_port}/"


def test_the_page_has_the_policy_of_the_server() -> None:
    assert f'http-equiv="Content-Security-Policy" content="{POLICY}"' in (FOLDER / "index.html").read_text()


def test_the_page_has_and_uses_all_its_files() -> None:
    pages = {path.name for path in list_pages()}
    text = "".join((FOLDER / name).read_text() for name in pages if not name.endswith(".wasm"))
    used = set(re.findall(r'"(?:\./)?([a-z]+\.(?:js|css|svg|wasm))"', text))
    assert used | {"index.html"} == pages


def test_the_page_names_no_other_host() -> None:
    text = "".join(path.read_text() for path in list_pages() if path.suffix not in (".wasm", ".svg"))
    assert "//" not in re.sub(r"//.*", "", text, flags=re.MULTILINE)
    assert "http" not in text.replace("http-equiv", "").replace("-m http.server", "")
