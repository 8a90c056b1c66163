"""A stand-in of a hub: the part of its HTTP API that models are pushed to and loaded from."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest

Files = dict[str, bytes]


class Hub(ThreadingHTTPServer):
    """Repositories in memory, one branch each; weights come by the LFS protocol."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Files] = {}
        self.private: dict[str, bool] = {}
        self.tokens: set[str | None] = set()
        self.messages: list[str] = []
        self.stored: Files = {}
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def commit(self, repo: str, lines: list[dict]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                self.repositories[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.repositories[repo][value["path"]] = self.stored[value["oid"]]
            else:
                raise AssertionError(f"a stand-in knows no {line['key']}")


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, value: object = None, status: int = 200, **headers: str) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        hub, body = self.server, self._body()
        hub.asked.append(f"POST {self.path}")
        hub.tokens.add(self.headers.get("Authorization"))
        if self.path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given.get('organization') or 'someone'}/{given['name']}"
            hub.repositories.setdefault(name, {})
            is_private = given.get("private") or given.get("visibility") == "private"
            hub.private.setdefault(name, bool(is_private))
            return self._answer({"url": f"{hub.url}/{name}"})
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if match := re.fullmatch(r"/api/models/(.+?)/preupload/.*", self.path):
            files = json.loads(body)["files"]
            modes = {True: "lfs", False: "regular"}
            return self._answer(
                {
                    "files": [
                        {
                            "path": file["path"],
                            "uploadMode": modes[file["path"].endswith(".safetensors")],
                            "shouldIgnore": False,
                        }
                        for file in files
                    ]
                }
            )
        if self.path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                known | {"actions": {"upload": {"href": f"{hub.url}/lfs/{known['oid']}"}}}
                for known in json.loads(body)["objects"]
            ]
            return self._answer({"transfer": "basic", "objects": objects})
        if match := re.fullmatch(r"/api/models/(.+?)/commit/.*", self.path):
            hub.commit(match[1], [json.loads(line) for line in body.splitlines()])
            url = f"{hub.url}/{match[1]}/commit/{'0' * 40}"
            return self._answer({"commitOid": "0" * 40, "commitUrl": url})
        return self._answer({"error": "not here"}, 404)

    def do_PUT(self) -> None:
        body = self._body()
        assert hashlib.sha256(body).hexdigest() == self.path.removeprefix("/lfs/")
        self.server.stored[self.path.removeprefix("/lfs/")] = body
        self._answer({})

    def do_GET(self) -> None:
        hub = self.server
        hub.asked.append(f"{self.command} {self.path}")
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/([^?]+).*", self.path)
        files = hub.repositories.get(match[1], {}) if match else {}
        if match is None or match[2] not in files:
            return self._answer({}, 404, X_Error_Code="EntryNotFound")
        content = files[match[2]]
        tag = hashlib.sha256(content).hexdigest()
        return self._answer(content, ETag=f'"{tag}"', X_Repo_Commit="0" * 40)

    do_HEAD = do_GET


@contextlib.contextmanager
def standing_in(monkeypatch: pytest.MonkeyPatch, cache: object) -> Iterator[Hub]:
    """A hub that huggingface_hub talks to, with a cache of its own."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        constants = huggingface_hub.constants
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # which is no HTTP API
        yield hub
        hub.shutdown()
        thread.join()
