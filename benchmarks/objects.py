"""A server that speaks as much S3 as `python -m benchmarks remote` needs, from memory: so that
clients are what is measured.

Launch by hand: `python -m benchmarks.objects`. It prints its port, and ends when its standard input
does. Servers made for tests take ten times as long for a byte as any client. It checks no signature
and no digest, and keeps what it is given.
"""

from __future__ import annotations

import re
import socketserver
import sys
import threading
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["Server"]

Parts = list[memoryview]


class Server(socketserver.ThreadingTCPServer):
    """Objects by key; an object is the list of its parts."""

    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, Parts] = {}
        self.uploads: dict[str, dict[int, memoryview]] = {}
        self.lock = threading.Lock()


class _Handler(socketserver.StreamRequestHandler):
    server: Server
    disable_nagle_algorithm = True
    rbufsize = 1 << 20

    def handle(self) -> None:
        try:
            while self.one():
                pass
        except ConnectionError:
            pass

    def one(self) -> bool:
        line = self.rfile.readline().split()
        if len(line) != 3:
            return False
        headers: dict[str, str] = {}
        while header := self.rfile.readline().strip():
            name, _, value = header.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        if headers.get("expect", "").lower() == "100-continue":
            self.request.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = memoryview(bytearray(int(headers.get("content-length", 0))))
        got = 0
        while got < len(body):
            count = self.rfile.readinto(body[got:])  # type: ignore[attr-defined]
            if not count:
                return False
            got += count
        target = urlsplit(line[1].decode())
        query = {
            name: values[0]
            for name, values in parse_qs(target.query, keep_blank_values=True).items()
        }
        bucket, _, key = unquote(target.path).lstrip("/").partition("/")
        method = line[0].decode()
        getattr(self, method.lower())(bucket, key, query, headers, body)
        return headers.get("connection", "").lower() != "close"

    def put(
        self,
        bucket: str,
        key: str,
        query: dict[str, str],
        headers: dict[str, str],
        body: memoryview,
    ) -> None:
        if "uploadId" in query:
            self.server.uploads[query["uploadId"]][int(query["partNumber"])] = body
        elif "x-amz-copy-source" in headers:
            source = unquote(headers["x-amz-copy-source"]).lstrip("/").partition("/")[2]
            self.server.objects[key] = self.server.objects[source]
            return self.answer(200, b"<CopyObjectResult><ETag>e</ETag></CopyObjectResult>")
        elif key:
            with self.server.lock:
                if headers.get("if-none-match") == "*" and key in self.server.objects:
                    return self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                self.server.objects[key] = [body]
        return self.answer(200, more={"ETag": '"e"'})

    def post(
        self,
        bucket: str,
        key: str,
        query: dict[str, str],
        headers: dict[str, str],
        body: memoryview,
    ) -> None:
        if "uploads" in query:
            number = str(len(self.server.uploads) + 1)
            self.server.uploads[number] = {}
            return self.answer(
                200, f"<R><Key>{key}</Key><UploadId>{number}</UploadId></R>".encode()
            )
        if "delete" in query:
            for name in re.findall(rb"<Key>(.*?)</Key>", bytes(body)):
                self.server.objects.pop(name.decode(), None)
            return self.answer(200, b"<DeleteResult/>")
        parts = self.server.uploads.pop(query["uploadId"])
        self.server.objects[key] = [parts[number] for number in sorted(parts)]
        return self.answer(200, f"<R><Key>{key}</Key><ETag>e</ETag></R>".encode())

    def delete(
        self,
        bucket: str,
        key: str,
        query: dict[str, str],
        headers: dict[str, str],
        body: memoryview,
    ) -> None:
        if "uploadId" in query:
            self.server.uploads.pop(query["uploadId"], None)
        else:
            self.server.objects.pop(key, None)
        self.answer(204)

    def head(
        self,
        bucket: str,
        key: str,
        query: dict[str, str],
        headers: dict[str, str],
        body: memoryview,
    ) -> None:
        self.get(bucket, key, query, headers, body, send=False)

    def get(
        self,
        bucket: str,
        key: str,
        query: dict[str, str],
        headers: dict[str, str],
        body: memoryview,
        send: bool = True,
    ) -> None:
        if not key:
            self.answer(200, self.listing(query))
        elif key not in self.server.objects:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>" if send else b"")
        else:
            self.send(key, headers.get("range", ""), send)

    def send(self, key: str, range_: str, send: bool) -> None:
        parts = self.server.objects[key]
        size = sum(len(part) for part in parts)
        more: dict[str, Any] = {
            "ETag": '"e"',
            "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
            "Accept-Ranges": "bytes",
        }
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", range_)
        start, stop = (int(found[1]), min(size, int(found[2] or size) + 1)) if found else (0, size)
        if found:
            more["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self.start(206 if found else 200, stop - start, more)
        at = 0
        for part in parts if send else ():
            self.request.sendall(part[max(0, start - at) : max(0, stop - at)])
            at += len(part)

    def listing(self, query: dict[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        if "uploads" in query:
            kind = b"ListMultipartUploadsResult"
            return b"<%b><IsTruncated>false</IsTruncated></%b>" % (kind, kind)
        keys, folders = [], set()
        for key in sorted(k for k in self.server.objects if k.startswith(prefix)):
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                size = sum(len(part) for part in self.server.objects[key])
                keys.append(
                    f"<Contents><Key>{key}</Key><Size>{size}</Size><ETag>e</ETag></Contents>"
                )
        found = [
            f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in sorted(folders)
        ]
        inside = "".join(keys + found)
        inside = f"<IsTruncated>false</IsTruncated>{inside}"
        return f"<ListBucketResult>{inside}</ListBucketResult>".encode()

    def answer(self, status: int, body: bytes = b"", more: dict[str, Any] | None = None) -> None:
        self.start(status, len(body), more or {})
        if body:
            self.request.sendall(body)

    def start(self, status: int, length: int, more: dict[str, Any]) -> None:
        lines = [
            f"HTTP/1.1 {status} X",
            f"Content-Length: {length}",
            *(f"{n}: {v}" for n, v in more.items()),
        ]
        self.request.sendall("\r\n".join([*lines, "", ""]).encode())


if __name__ == "__main__":
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()
