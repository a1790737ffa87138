"""A stand-in for the Hugging Face Hub on this machine: it keeps the files of repositories in memory."""

import base64
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TOKEN = "hf_of_a_test"
Repositories = dict[str, dict[str, bytes]]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repositories: Repositories

    def log_message(self, *_: object) -> None: ...

    def answer(self, code: int, content: object = None, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_GET(self) -> None:
        if found := re.match(r"/api/models/(.+)/(revision|tree)/", self.path):
            if (files := self.repositories.get(found[1])) is None:
                self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            elif found[2] == "revision":
                names = [{"rfilename": name} for name in files]
                self.answer(200, {"id": found[1], "sha": "0" * 40, "siblings": names, "private": False, "tags": []})
            else:
                sizes = {name: len(data) for name, data in files.items()}
                self.answer(200, [{"type": "file", "path": name, "size": sizes[name], "oid": "0"} for name in files])
            return
        if self.path.startswith("/api/"):
            self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return
        found = re.match(r"/(.+)/resolve/[^/]+/(.+)", self.path)
        data = self.repositories[found[1]][found[2]] if found else b""
        tag = hashlib.sha256(data).hexdigest()
        self.answer(200, data, ETag=f'"{tag}"', X_Repo_Commit="0" * 40)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.repositories.setdefault(name, {})
            self.answer(200, {"url": f"http://{self.headers['Host']}/{name}"})
        elif found := re.match(r"/api/models/(.+)/preupload/", self.path):
            named = [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            self.answer(200, {"files": named})
        elif found := re.match(r"/api/models/(.+)/commit/", self.path):
            for one in map(json.loads, body.splitlines()):
                if one["key"] == "file":
                    self.repositories[found[1]][one["value"]["path"]] = base64.b64decode(one["value"]["content"])
            self.answer(200, {"commitUrl": f"http://{self.headers['Host']}/{found[1]}/commit/0", "commitOid": "0" * 40})
        else:
            self.answer(200, {})  # of a card


@contextmanager
def serve_hub(repositories: Repositories) -> Iterator[str]:
    """Serve `repositories`, which uploads change, and provide the address."""
    handler = type("Handler", (_Handler,), {"repositories": repositories})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
