"""A Hugging Face Hub on this machine, so that its real library can be used without a network."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pull_helpers import sha256


@dataclass
class Hub:
    """What the local Hub serves, and what it was asked for."""

    url: str
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    served: dict[str, bytes] = field(default_factory=dict)
    """Contents that differ from what is listed."""
    stalled: bool = False
    """Downloads stop after 11 MiB and hang."""
    requests: list[tuple[str, str | None]] = field(default_factory=list)


COMMIT = "c" * 40


@contextmanager
def serve() -> Iterator[Hub]:
    """A server that speaks as much of the Hub's protocol as its library needs."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = self.path.split("?")[0].strip("/")
            state.requests.append((path, self.headers.get("Range")))
            for repo, (status, code) in state.refusals.items():
                if repo in path:
                    return self.reply(status, b"{}", {"X-Error-Code": code})
            for repo, files in state.repos.items():
                if path.startswith(f"api/models/{repo}"):
                    return self.reply(200, json.dumps(listing(repo, files)).encode())
                for name, content in files.items():
                    if path == f"{repo}/resolve/{COMMIT}/{name}":
                        return self.reply(200, state.served.get(name, content))
            return self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            span = self.headers.get("Range")
            if span and status == 200:
                start = int(span.removeprefix("bytes=").rstrip("-"))
                headers = {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"}
                status, body = 206, body[start:]
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if state.stalled and "/resolve/" in self.path:
                self.wfile.write(body[: 11 << 20])
                over.wait()
                return
            self.wfile.write(body)

    def listing(repo: str, files: dict[str, bytes]) -> dict[str, Any]:
        def sibling(name: str, content: bytes) -> dict[str, Any]:
            shown: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": "b"}
            if name.endswith((".gguf", ".safetensors")):
                size = len(content)
                shown["lfs"] = {"sha256": sha256(content), "size": size, "pointerSize": 1}
            return shown

        siblings = [sibling(name, content) for name, content in files.items()]
        return {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    over = threading.Event()
    state = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield state
    over.set()
    server.shutdown()
    server.server_close()
    thread.join()
