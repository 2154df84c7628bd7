"""A statuses API as GitHub's behaves, on a port of its own: limits, bad answers, and what was asked of it."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Statuses:
    """What the API holds and answers: ``limit`` posts per commit and context, then 422; ``script`` answers first."""

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self.script: list[tuple[int, dict[str, str]]] = []
        self.posted: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.asked: list[tuple[str, str, str | None]] = []
        self.address = ""


@contextmanager
def statuses_api(limit: int = 1000) -> Iterator[Statuses]:
    """Serve on 127.0.0.1 for as long as the block runs."""
    held = Statuses(limit)

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, code: int, document: object, headers: dict[str, str] | None = None) -> None:
            body = json.dumps(document).encode()
            self.send_response(code)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def _scripted(self) -> bool:
            held.asked.append((self.command, self.path, self.headers.get("Authorization")))
            if not held.script:
                return False
            code, headers = held.script.pop(0)
            self._answer(code, {"message": "scripted"}, headers)
            return True

        def do_GET(self) -> None:
            if not self._scripted():
                commit = self.path.split("/commits/")[1].split("/")[0]
                listed = held.posted[commit][::-1]
                self._answer(200, {"state": "pending", "total_count": len(listed), "statuses": listed})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self._scripted():
                return
            commit = self.path.rpartition("/")[2]
            same = [one for one in held.posted[commit] if one["context"] == body["context"]]
            if len(same) >= held.limit or len(body["description"]) > 140:
                self._answer(422, {"message": "Validation Failed"})
                return
            held.posted[commit].append(body)
            self._answer(201, body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    held.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield held
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
