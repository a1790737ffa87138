"""Serves the files of the demo to the browsers of this machine, and nothing else."""

import sys
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

from .site import File

ADDRESS = "127.0.0.1"
_HTTP_PORT = 80
# The page may load only its own files, and may send nothing to other hosts. index.html has the same policy.
POLICY = (
    "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; object-src 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",  # the next model may have the same address
}


class DemoServer(ThreadingHTTPServer):
    """Answers requests for the files of `site`, which are in memory. Port 0 is a free port."""

    daemon_threads = True

    def __init__(self, site: Mapping[str, File], port: int = 0) -> None:
        self.site = {f"/{name}": file for name, file in site.items()} | {"/": site["index.html"]}
        super().__init__((ADDRESS, port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Report errors, except that a browser has closed its connection."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: DemoServer
    server_version, sys_version = "lintx", ""
    timeout: ClassVar[float] = 30.0

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        port = self.server.server_port
        end = "" if port == _HTTP_PORT else f":{port}"  # browsers leave out the usual port
        # A page of another site could have its host name point to this machine, and then read the answers.
        if self.headers.get_all("Host") not in ([ADDRESS + end], ["localhost" + end]):
            return self.send_error(HTTPStatus.FORBIDDEN)
        file = self.server.site.get(self.path.partition("?")[0])
        if file is None:
            return self.send_error(HTTPStatus.NOT_FOUND)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", file.media_type)
        self.send_header("Content-Length", str(len(file.data)))
        self.end_headers()
        if body:
            self.wfile.write(file.data)

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing: a library does not print."""
