"""The playground's HTTP server: it serves one page and answers the page's questions, on this machine only.

``GET /`` returns the page, ``GET /plan?<question>`` the figures of a plan as JSON, ``GET /drawing?<question>`` its
passes, and ``GET /file?<question>`` its file, which a job runs. Later requests for a plan are answered from a cache.
A question that cannot be answered gets status 400 and ``{"error": sentence}``. The Host header of a request must name
this machine; otherwise another site could point its name here and act as our page (DNS rebinding). Requests from pages
of other sites are rejected too: such a page could not read the answer, but could keep the server busy with planning.
"""

from __future__ import annotations

import json
import select
import socket
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTP_PORT
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from urllib.parse import SplitResult, urlsplit

from megatron.zero_bubble.cli.playground.answers import Answers, Encoded, refusal
from megatron.zero_bubble.cli.playground.job import PageJob
from megatron.zero_bubble.cli.playground.page import build_page
from megatron.zero_bubble.cli.playground.questions import catalogue, read_question

_HOME = "127.0.0.1"
_OUR_SITES = (None, "none", "same-origin")
"""Accepted ``Sec-Fetch-Site``: from a client that is not a browser, an address that the user opened, and our page."""


class Server(ThreadingHTTPServer):
    """A server that listens on ``port`` of this machine from its construction; 0 selects a free port.

    Args:
        job: what the page starts from.

    Raises:
        OSError: when the port cannot be opened.
        UserError: for a job that the page cannot draw.
    """

    daemon_threads = True  # the process exits without waiting for a search

    def __init__(self, port: int, job: PageJob | None = None) -> None:
        self.page = build_page(catalogue(job)).encode()
        self.answers = Answers(job)
        self.planning, self.searching = Lock(), Lock()
        super().__init__((_HOME, port), _Handler)

    @property
    def address(self) -> str:
        """URL of the page."""
        return f"http://{_HOME}:{self.server_port}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """Accepted Host headers: with the port, and also without it on HTTP's default port, as browsers send it."""
        names = (_HOME, "localhost")
        with_port = tuple(f"{name}:{self.server_port}" for name in names)
        return (*with_port, *names) if self.server_port == HTTP_PORT else with_port


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds that an open connection may be idle

    def handle(self) -> None:
        with suppress(ConnectionError):  # a page closes the connection when it sends a newer question
            super().handle()

    def do_GET(self) -> None:
        host, site = self.headers.get("Host"), self.headers.get("Sec-Fetch-Site")
        if host not in self.server.hosts:
            wanted = " or ".join(self.server.hosts)
            self._refuse(HTTPStatus.FORBIDDEN, f"the Host header must be {wanted}; got the host {host!r}")
        elif site not in _OUR_SITES:
            remedy = f"open {self.server.address} directly"
            self._refuse(
                HTTPStatus.FORBIDDEN, f"requests from pages of other sites are rejected; got a {site} request; {remedy}"
            )
        else:
            try:
                self._serve(urlsplit(self.path))
            except (ValueError, OverflowError) as error:  # UserError, or an error of urllib for a malformed query
                self._refuse(HTTPStatus.BAD_REQUEST, refusal(error))

    def _serve(self, url: SplitResult) -> None:
        if url.path == "/":
            self._reply(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)
        elif url.path in ("/plan", "/drawing", "/file"):
            if (encoded := self._answer(url.query)) is None:
                return
            if url.path == "/plan":
                self._reply(HTTPStatus.OK, "application/json", encoded.plan)
            else:
                body = encoded.drawing if url.path == "/drawing" else encoded.file
                self._reply(HTTPStatus.OK, "application/json", body, encoding="gzip")
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"only /, /plan, /drawing and /file exist; got {url.path!r}")

    def _answer(self, query: str) -> Encoded | None:
        """Answer a question, or return None if the client has disconnected.

        One search and one other plan run at a time, and neither for a client that disconnects while it waits.
        """
        server, answers = self.server, self.server.answers
        asked = read_question(query, answers.job)
        if (known := answers.kept.get(query)) is not None:
            return known
        with server.searching if asked.question.searches else server.planning:
            if self._has_left():
                return None
            return answers.make(query, asked)

    def _has_left(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        left = bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        self.close_connection |= left
        return left

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        self._reply(status, "application/json", json.dumps({"error": sentence}).encode())

    def _reply(self, status: HTTPStatus, kind: str, body: bytes, encoding: str = "identity") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Encoding", encoding)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing, to keep the user's terminal clean."""
