"""A stand-in of the Hugging Face hub on this machine, as far as huggingface_hub asks it.

It serves directories as repositories of one revision, "main", and keeps what is pushed.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_of_the_stand_in"


@dataclass
class Hub:
    """What the stand-in has.

    Attributes:
        address: Its URL.
        repositories: Names -> directories.
        gated: Names whose files need `TOKEN`.
        pushed: Names -> files that were pushed, by path.
        asked: Requests so far, "GET /path".
        down: Whether it answers nothing but errors.
    """

    address: str = ""
    repositories: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    pushed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    down: bool = False

    def files(self, name: str) -> dict[str, Path]:
        folder = self.repositories[name]
        found = (path for path in sorted(folder.rglob("*")) if path.is_file())
        return {path.relative_to(folder).as_posix(): path for path in found}

    def commit(self, name: str) -> str:
        """It changes with names and sizes of files."""
        text = repr([(n, p.stat().st_size) for n, p in self.files(name).items()])
        return hashlib.sha1(text.encode()).hexdigest()

    def fetched(self, name: str) -> set[str]:
        """Files whose contents were asked for."""
        found = (re.match(rf"GET /{name}/resolve/[^/]+/(.+)", line) for line in self.asked)
        return {unquote(match[1]) for match in found if match}


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def answer(
        self, status: int, body: bytes | dict[str, Any] = b"", headers: Mapping[str, str] = {}
    ) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def fault(self, status: int, code: str) -> None:
        self.answer(status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    @property
    def allowed(self) -> bool:
        return self.headers.get("authorization") == f"Bearer {TOKEN}"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path}")
        if hub.down:
            return self.answer(503)
        if path == "/api/whoami-v2":
            return self.answer(200, {"name": "me"}) if self.allowed else self.fault(401, "Denied")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            name, revision = found[1], found[2] or "main"
            if name not in hub.repositories:
                return self.fault(401, "RepoNotFound")
            if revision not in ("main", hub.commit(name)):
                return self.fault(404, "RevisionNotFound")
            files = [{"rfilename": n, "size": p.stat().st_size} for n, p in hub.files(name).items()]
            return self.answer(200, {"id": name, "sha": hub.commit(name), "siblings": files})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path):
            sizes = {n: p.stat().st_size for n, p in hub.files(found[1]).items()}
            tree = [{"type": "file", "path": n, "size": s, "oid": n} for n, s in sizes.items()]
            return self.answer(200, json.dumps(tree).encode())
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.resolve(*found.groups())
        return self.fault(404, "EntryNotFound")

    def resolve(self, name: str, revision: str, file: str) -> None:
        hub = self.hub
        if name in hub.gated and not self.allowed:
            return self.fault(401, "GatedRepo")
        path = hub.files(name).get(file)
        if path is None:
            return self.fault(404, "EntryNotFound")
        data = path.read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": hub.commit(name),
            "Accept-Ranges": "bytes",
        }
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(part[1]), min(int(part[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            return self.answer(206, data[start : end + 1], headers)
        if self.command == "HEAD":
            headers["Content-Length"] = str(len(data))
        return self.answer(200, data, headers)

    def do_PUT(self) -> None:
        self.hub.blobs[self.path.rpartition("/")[2]] = self.body()
        self.answer(200)

    def do_POST(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.asked.append(f"POST {path}")
        body = self.body()
        if hub.down:
            return self.answer(503)
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if not self.allowed:
            return self.fault(401, "Denied")
        if path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given.get('organization') or 'me'}/{given['name']}"
            hub.private[name] = given.get("visibility", given.get("private"))
            hub.pushed.setdefault(name, {})
            return self.answer(200, {"url": f"{hub.address}/{name}"})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            files = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for f in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": files})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**o, "actions": {"upload": {"href": f"{hub.address}/blob/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            return self.answer(200, {"transfer": "basic", "objects": objects})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            self.keep(hub.pushed[found[1]], body)
            url = f"{hub.address}/{found[1]}/commit/{'0' * 40}"
            return self.answer(200, {"commitUrl": url, "commitOid": "0" * 40})
        return self.fault(404, "EntryNotFound")

    def keep(self, files: dict[str, bytes], body: bytes) -> None:
        from base64 import b64decode

        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))


@contextmanager
def serving(repositories: Mapping[str, Path]) -> Iterator[Hub]:
    """A stand-in that runs."""
    hub = Hub(repositories=dict(repositories))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def environment(hub: Hub, home: Path) -> dict[str, str]:
    """What a process needs to ask the stand-in, and no other."""
    return {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def use(hub: Hub, home: Path, patch: pytest.MonkeyPatch) -> None:
    """Have this process ask the stand-in, whatever it has read from its environment before."""
    from huggingface_hub import close_session, constants

    close_session()
    patch.setattr(constants, "ENDPOINT", hub.address)
    template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.delenv("HF_TOKEN", raising=False)
