"""An HTTP proxy in front of S3 that counts, and fails as networks and services do."""

import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
import torch

ERRORS = {500: "InternalError", 503: "SlowDown", 429: "TooManyRequests"}
FAULTS = ("drop", "lost", "500", "503", "429", "delay", "truncate")


class Proxy(ThreadingHTTPServer):
    """rate: the part of requests that one of `kinds` is done to.

    "drop": the connection is reset before anybody has seen the request. "lost": the request is
    done, and the answer is lost. "truncate": half of the answer comes. "stall", when it is asked
    for: what follows the head of the request is not read, and nothing answered. `asked` lists (name
    of the request, key) of all that came, `ranges` those that were asked for; `faults` counts what
    was done to them.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = port
        self.rate, self.kinds, self.random = 0.0, FAULTS, random.Random(7)
        self.only = lambda name, key: True
        self.refuse_conditions = False
        self.asked: list[tuple[str, str]] = []
        self.ranges: list[str] = []
        self.faults: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.closing = threading.Event()

    def fault(self, name: str, key: str) -> str | None:
        with self.lock:
            self.asked.append((name, key))
            if not self.only(name, key) or self.random.random() >= self.rate:
                return None
            kind = self.random.choice(self.kinds)
            self.faults[kind] += 1
            return kind

    def counted(self) -> Counter[str]:
        with self.lock:
            return Counter(name for name, _ in self.asked)

    def handle_error(self, request, client_address) -> None:
        pass  # connections that were reset


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, *_) -> None:
        pass

    def do(self) -> None:
        kind = self.server.fault(*named(self.command, self.path))
        if kind == "stall":
            self.close_connection = True
            self.server.closing.wait()
            return None
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "Range" in self.headers:
            self.server.ranges.append(self.headers["Range"])
        if kind == "drop":
            return self.reset()
        if self.server.refuse_conditions and "If-None-Match" in self.headers:
            return self.answer(501, [], b"<Error><Code>NotImplemented</Code></Error>")
        if kind in ("500", "503", "429"):
            status = int(kind)
            code = ERRORS[status]
            text = (
                f"<Error><Code>{code}</Code><Message>made by the proxy</Message></Error>".encode()
            )
            return self.answer(
                status,
                [("Content-Type", "application/xml")],
                b"" if self.command == "HEAD" else text,
            )
        if kind == "delay":
            time.sleep(0.05)
        behind = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=60)
        behind.request(self.command, self.path, body, dict(self.headers))
        found = behind.getresponse()
        data = found.read()
        headers = [
            (n, v)
            for n, v in found.getheaders()
            if n.lower() not in ("connection", "transfer-encoding")
        ]
        behind.close()
        if kind == "lost" or (kind == "truncate" and not data):
            return self.reset()
        return self.answer(found.status, headers, data, cut=kind == "truncate")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do

    def answer(self, status, headers, data, cut=False) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() != "content-length" or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.close_connection = True

    def reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


def named(method: str, target: str) -> tuple[str, str]:
    """What a request is called in the documentation of S3, and the key it is about."""
    parts = urlsplit(target)
    query = parse_qs(parts.query, keep_blank_values=True)
    key = parts.path.split("/", 2)[2] if parts.path.count("/") > 1 else ""
    if method == "GET" and "list-type" in query:
        return "list", query.get("prefix", [""])[0]
    if "uploads" in query:
        return ("begin" if method == "POST" else "list uploads"), key
    if "uploadId" in query:
        return {"PUT": "part", "POST": "complete", "DELETE": "abort"}.get(method, method), key
    if method == "POST" and "delete" in query:
        return "delete many", key
    return {"GET": "get", "PUT": "put", "HEAD": "head", "DELETE": "delete"}.get(method, method), key


@pytest.fixture
def proxy(s3):
    server = Proxy(s3.port)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def through(s3, proxy):
    """storage_options that lead through the proxy."""

    def options(**more):
        return s3.options_at(proxy.server_address[1], **more)

    return options


def state_of(mark, items=1000):
    g = torch.Generator().manual_seed(mark)
    return {
        "model": {f"w{n}": torch.randn(items, generator=g) for n in range(3)},
        "progress": {"mark": mark, "name": f"mark {mark}", "big": 2**70 + mark},
    }


@pytest.fixture(name="state_of")
def state_of_fixture():
    return state_of
