"""A proxy between a client and an HTTP server on loopback, which spoils requests as networks and busy servers do."""

import http.client
import math
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Fault = Literal["busy", "late", "slow", "no request", "no answer", "half an answer", "expired", "silent"]
FAULTS: tuple[Fault, ...] = ("busy", "late", "slow", "no request", "no answer", "half an answer")

_ANSWERS = {
    "busy": (503, "SlowDown", "Reduce your request rate."),
    "late": (400, "RequestTimeout", "Your socket connection to the server was not read from in time."),
    "expired": (400, "ExpiredToken", "The provided token has expired."),
}
_SLOW_SECS = 0.2


class FlakyProxy:
    """A proxy for a server.

    Attributes:
        endpoint: Its URL.
        share: Of the requests, this much is spoiled.
        faults: By these.
        most: Not more than so many, in all.
        tried: How often each fault was.
        num_requests: How many requests there were.
    """

    def __init__(self, port: int, seed: int) -> None:
        self.share = 0.0
        self.faults = FAULTS
        self.most = math.inf
        self.tried: Counter[Fault] = Counter()
        self.num_requests = 0
        self.is_over = threading.Event()
        self._port = port
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        handler = type("_Handler", (_Handler,), {"proxy": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    def fate(self) -> Fault | None:
        """Of the next request."""
        with self._lock:
            self.num_requests += 1
            if self._random.random() >= self.share or self.tried.total() >= self.most:
                return None
            fault = self._random.choice(self.faults)
            self.tried[fault] += 1
            return fault

    def forward(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> tuple[int, bytes, bytes]:
        """Status, headers and body of the server's answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            data = answer.read()
            kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in _OWN_HEADERS]
            if method == "HEAD":
                kept.append(("Content-Length", answer.getheader("Content-Length") or "0"))
            else:
                kept.append(("Content-Length", str(len(data))))
            return answer.status, "".join(f"{name}: {value}\r\n" for name, value in kept).encode(), data
        finally:
            connection.close()


_OWN_HEADERS = ("content-length", "transfer-encoding", "connection", "date", "server")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FlakyProxy

    def do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.proxy.fate()
        self.close_connection = True
        if fault in _ANSWERS:
            status, code, reason = _ANSWERS[fault]
            told = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{reason}</Message></Error>".encode()
            self._send(status, b"Content-Length: %d\r\n" % len(told), b"" if self.command == "HEAD" else told)
            return
        if fault == "silent":
            self.proxy.is_over.wait()
        if fault in ("no request", "silent"):
            return
        if fault == "slow":
            time.sleep(_SLOW_SECS)
        headers = [
            (name, value) for name, value in self.headers.items() if name.lower() not in ("connection", "expect")
        ]
        status, told, data = self.proxy.forward(self.command, self.path, headers, body)
        if fault != "no answer":
            self._send(status, told, data[: len(data) // 2] if fault == "half an answer" else data)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do

    def _send(self, status: int, headers: bytes, body: bytes) -> None:
        try:
            self.wfile.write(b"HTTP/1.1 %d told\r\n%sConnection: close\r\n\r\n%s" % (status, headers, body))
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the client did not wait

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def flaky(port: int, seed: int) -> Iterator[FlakyProxy]:
    """A proxy in front of a port, which spoils nothing yet."""
    proxy = FlakyProxy(port, seed)
    thread = threading.Thread(target=proxy.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.is_over.set()
        proxy.server.shutdown()
        proxy.server.server_close()
        thread.join()
