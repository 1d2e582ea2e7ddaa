"""A real HTTP server on 127.0.0.1 that can be told to misbehave: ranges, entity tags, dropped connections, refusals."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Site:
    """What the server offers. ``drops`` holds, per coming GET, after how many bytes the connection breaks."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    tags: bool = True
    drops: list[int] = field(default_factory=list)
    refusals: list[int] = field(default_factory=list)  # status codes of the coming GETs
    commit: str = ""  # as a Hugging Face hub names it
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range
    authorizations: list[str | None] = field(default_factory=list)  # the header of each request
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    site: Site

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        site, path = self.site, unquote(urlsplit(self.path).path)
        site.requests.append((self.command, path, self.headers.get("Range")))
        site.authorizations.append(self.headers.get("Authorization"))
        content = site.files.get(path)
        if content is None or (body and site.refusals):
            self.send_response(404 if content is None else site.refusals.pop(0))
            if content is None and path.startswith("/api/models/"):
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        start = 0
        wanted = self.headers.get("Range")
        if site.ranges and wanted and self.headers.get("If-Range", tag) == tag:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if site.tags:
            self.send_header("ETag", tag)
        if site.commit:
            self.send_header("X-Repo-Commit", site.commit)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if body:
            end = start + site.drops.pop(0) if site.drops else len(content)
            self.wfile.write(content[start:end])

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve(site: Site) -> Generator[Site]:
    handler = type("Handler", (_Handler,), {"site": site})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def hub_site(repo: str, commit: str, files: dict[str, bytes]) -> Site:
    """A site with the three parts of the Hugging Face API that fetching a snapshot uses."""
    info = {"id": repo, "modelId": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
    site = Site({f"/{repo}/resolve/{commit}/{name}": content for name, content in files.items()}, commit=commit)
    for path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/{commit}", f"/api/models/{repo}/revision/main"):
        site.files[path] = json.dumps(info).encode()
    tree = [
        {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        for name, content in files.items()
    ]
    site.files[f"/api/models/{repo}/tree/{commit}"] = json.dumps(tree).encode()
    return site
