"""What the server answers to bodies that are wrong, and to crowds: an error with a name, and never
more memory than was due."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import resource
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from ckpt_trainers.diloco import Access, DiLoCoServer, Refused, Rules, ServerUnreachable
from ckpt_trainers.diloco.client import Target, server_status
from ckpt_trainers.diloco.outer import named_parameters
from ckpt_trainers.diloco.wire import Layout, body_pieces
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from .islands import Island, Net, serve, trained, until

TENSORS = {n: torch.full_like(p, 0.01).detach() for n, p in named_parameters(Net()).items()}
BODY = b"".join(body_pieces(Layout.of(TENSORS), TENSORS, {}))
WORKER = {"worker": "a", "sync_every": 4, "num_fragments": 1, "heartbeats": False}
SUBMIT = "/submit?worker=a&fragment=0&base=0&dtype=float32"


@pytest.fixture
def server() -> Iterator[DiLoCoServer]:
    with serve(access=Access(port=0, token="secret", patience=0.3), rules=Rules(2)) as found:
        assert ask(found, "POST", "/register", json.dumps(WORKER).encode())[0] == 200
        yield found
        assert ask(found, "GET", "/status")[0] == 200, "it serves on"


def ask(
    server: DiLoCoServer, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, Any]:
    """(Status, JSON) of what the server says to bytes over a socket."""
    host, port = server.address.removeprefix("http://").split(":")
    lines = {"Host": host, "Authorization": "Bearer secret", "Content-Length": str(len(body))}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(f"{method} {path} HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode())
        try:
            connection.sendall(body)
        except OSError:
            pass  # it has answered, and listens no more
        found = b""
        while piece := connection.recv(65536):
            found += piece
    head_, _, text = found.partition(b"\r\n\r\n")
    return int(head_.split()[1]), json.loads(text) if text[:1] == b"{" else None


@pytest.mark.parametrize("token", ["", "Bearer wrong", "Bearer secret2", "Basic secret", "\xff"])
@pytest.mark.parametrize("path", ["/register", SUBMIT, "/heartbeat", "/deregister", "/nowhere"])
def test_without_the_token(server: DiLoCoServer, token: str, path: str) -> None:
    status, said = ask(server, "POST", path, BODY, Authorization=token)
    assert (status, said) == (401, {"error": "unauthorized", "detail": "authentication required"})
    assert server.rounds.fragments[0].received == {}


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        (SUBMIT.replace("worker=a", "worker=b"), 404, "not_registered"),
        (SUBMIT.replace("worker=a&", ""), 404, "not_registered"),
        (SUBMIT.replace("fragment=0", "fragment=1"), 400, "bad_request"),
        (SUBMIT.replace("fragment=0", "fragment=-1"), 400, "bad_request"),
        (SUBMIT.replace("base=0", "base=x"), 400, "bad_request"),
        (SUBMIT.replace("base=0", f"base={10**30}"), 400, "bad_request"),
        (SUBMIT.replace("float32", "int8"), 400, "bad_request"),
        (SUBMIT.replace("float32", "float64"), 400, "other_tensors"),
        ("/nowhere", 404, "bad_request"),
    ],
)
def test_wrong_words(server: DiLoCoServer, path: str, status: int, reason: str) -> None:
    found, said = ask(server, "POST", path, BODY)
    assert (found, said["error"]) == (status, reason)


def test_wrong_methods(server: DiLoCoServer) -> None:
    assert ask(server, "GET", "/submit")[0] == 405
    assert ask(server, "DELETE", "/status")[0] == 405


def changed(**changes: Any) -> bytes:
    tensors = {**TENSORS, **changes}
    return b"".join(body_pieces(Layout.of(tensors), tensors, {}))


NAN = torch.full((8,), float("nan"))


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (struct.pack("<Q", 2**60) + BODY[8:], 400, "bad_body"),
        (BODY + b"more", 413, "wrong_length"),
        (BODY[:-4], 413, "wrong_length"),
        (BODY[:4], 400, "cut"),
        (b"", 400, "cut"),
        (b"\x80\x04\x95" + BODY, 400, "bad_body"),  # as a pickle begins
        (changed(**{"enter.bias": torch.ones(9)}), 400, "other_tensors"),
        (changed(**{"enter.weight": torch.ones(4, 8)}), 400, "other_tensors"),
        (changed(more=torch.ones(1)), 400, "other_tensors"),
        (changed(**{"enter.bias": NAN}), 422, "non_finite"),
    ],
)
def test_wrong_bodies(server: DiLoCoServer, body: bytes, status: int, reason: str) -> None:
    found, said = ask(server, "POST", SUBMIT, body)
    assert (found, said["error"]) == (status, reason)
    if status in (413, 422) or "tensors" in reason:
        assert len(said["detail"]) < 1000
    assert server.rounds.fragments[0].received == {}


def test_a_length_that_never_comes(server: DiLoCoServer) -> None:
    """Of 2^60 bytes, and of one byte more than there is: the memory that is taken is the model's."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert ask(server, "POST", SUBMIT, BODY, Content_Length=str(2**60))[0] == 413
    status, said = ask(server, "POST", SUBMIT, BODY[:-1], Content_Length=str(len(BODY)))
    assert (status, said["error"]) == (408, "too_slow")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024


def test_a_length_that_is_not_said(server: DiLoCoServer) -> None:
    status, said = ask(
        server,
        "POST",
        SUBMIT,
        b"5\r\nhello\r\n0\r\n\r\n",
        Content_Length="",
        Transfer_Encoding="chunked",
    )
    assert (status, said["error"]) == (411, "no_length")


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"[]",
        b"5",
        b"{",
        b"\xff",
        b"[" * 60000,
        b"{}" + b" " * 70000,
        json.dumps({**WORKER, "worker": 5}).encode(),
        json.dumps({**WORKER, "worker": "../a"}).encode(),
        json.dumps({**WORKER, "worker": "a" * 200}).encode(),
        json.dumps({**WORKER, "sync_every": 0}).encode(),
        json.dumps({**WORKER, "sync_every": 1.5}).encode(),
        json.dumps({**WORKER, "num_fragments": 2**40}).encode(),
        json.dumps({**WORKER, "host": "h" * 1000}).encode(),
    ],
)
def test_wrong_registrations(server: DiLoCoServer, said: bytes) -> None:
    status, answer = ask(server, "POST", "/register", said)
    assert status in (400, 413) and answer["error"] in ("bad_request", "too_large")
    assert list(server.rounds.members) == ["a"]


def test_numbers_in_heartbeats(server: DiLoCoServer) -> None:
    for speed in ("NaN", "1e999", "-1", '"fast"', "null"):
        body = f'{{"worker": "a", "steps_per_second": {speed}}}'.encode()
        assert ask(server, "POST", "/heartbeat", body)[0] == 200
    assert server.rounds.members["a"].steps_per_second == 0.0


def test_no_more_workers_than_are_allowed() -> None:
    with serve(rules=Rules(max_workers=2)) as server:
        for name in "ab":
            body = json.dumps({**WORKER, "worker": name}).encode()
            assert ask(server, "POST", "/register", body)[0] == 200
        status, said = ask(
            server, "POST", "/register", json.dumps({**WORKER, "worker": "c"}).encode()
        )
        assert (status, said["error"]) == (409, "full")


def test_the_newer_of_two_bodies_of_a_worker_is_read(server: DiLoCoServer) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    head = f"POST {SUBMIT} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer secret\r\n"
    with socket.create_connection((host, int(port)), 10) as first:
        first.sendall(f"{head}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY[:100])
        until(lambda: ("a", 0) in server._reading)
        with socket.create_connection((host, int(port)), 10) as second:
            second.sendall(f"{head}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY)
            assert b"409" in first.recv(1000)
            until(lambda: "a" in server.rounds.fragments[0].received)


def test_who_does_not_read_its_answer() -> None:
    """It is cut off, so that it does not hold parameters of long ago."""
    with DiLoCoServer({"w": torch.zeros(1 << 23)}, access=Access(port=0, patience=0.3)) as server:
        assert ask(server, "POST", "/register", json.dumps(WORKER).encode())[0] == 200
        host, port = server.address.removeprefix("http://").split(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(10)
            connection.connect((host, int(port)))
            connection.sendall(b"GET /parameters?worker=a HTTP/1.1\r\nHost: h\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            until(lambda: handlers(server, "start") == 0)  # aiohttp: one for a connection
            found = 0
            while piece := connection.recv(1 << 20):
                found += len(piece)
            assert found < 1 << 25


def test_who_is_gone_waits_no_longer(server: DiLoCoServer) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    head = f"POST {SUBMIT} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer secret\r\n"
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(f"{head}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY)
        until(lambda: "a" in server.rounds.fragments[0].received)
        assert handlers(server, "_submit") == 1
    until(lambda: handlers(server, "_submit") == 0)


def handlers(server: DiLoCoServer, name: str) -> int:
    """Requests that are in this function of the server."""

    def names(coroutine: Any) -> Iterator[str]:
        while coroutine is not None:
            yield getattr(coroutine, "__name__", "")
            coroutine = getattr(coroutine, "cr_await", None)

    tasks = asyncio.all_tasks(server._loop)
    return sum(name in names(task.get_coro()) for task in tasks)


@pytest.mark.parametrize("number", [200, pytest.param(1000, marks=pytest.mark.stress)])
def test_a_crowd(number: int) -> None:
    """Connections that say nothing, that have no token, and that ask: a worker trains meanwhile."""
    rules, access = Rules(), Access(port=0, token="secret", patience=0.3)
    with serve(rules=rules, access=access) as server:
        host, port = server.address.removeprefix("http://").split(":")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        silent = [socket.create_connection((host, int(port)), 10) for _ in range(number // 2)]
        for number_, connection in enumerate(silent):
            if number_ % 2:
                connection.sendall(b"POST /submit HTTP/1.1\r\nHost: h\r\nContent-Length: 99999\r\n")

        async def crowd() -> set[int]:
            async def one(session: aiohttp.ClientSession, path: str, token: str) -> int:
                headers = {"Authorization": f"Bearer {token}"}
                async with session.post(server.address + path, data=BODY, headers=headers) as said:
                    assert "error" in await said.json()
                    return said.status

            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(60)
            ) as session:
                paths = [("/register", "no"), (SUBMIT, "secret"), ("/heartbeat", "secret")]
                some = [one(session, *paths[n % 3]) for n in range(number // 2)]
                return set(await asyncio.gather(*some))

        assert asyncio.run(crowd()) == {400, 401, 404}
        began = time.monotonic()
        assert trained(server, 1, "a", 8, sync_every=4, token="secret").step == 8
        assert time.monotonic() - began < 20
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(f"{number} connections: {grown / 1024:.0f} MiB more")
        assert grown < 200 * 1024
        for connection in silent:
            connection.close()


# TLS.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    found = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(found.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return str(folder / "cert.pem"), str(folder / "key.pem")


def test_over_tls(certificate: tuple[str, str]) -> None:
    access = Access(port=0, token="secret", certificate=certificate[0], key=certificate[1])
    with serve(access=access) as server:
        assert server.address.startswith("https://")
        trust: dict[str, Any] = {"token": "secret", "ca_file": certificate[0]}
        island = Island()
        with island.worker(server, sync_every=2, **trust) as worker:
            island.train(4)
            assert worker.rounds == [2]
        address = server.address.removeprefix("https://")
        assert server_status(Target(address, "secret", certificate[0]))["version"] == 2
        for wrong in (Target(server.address, "secret"), Target(address, "secret")):
            with pytest.raises((ServerUnreachable, Refused)):
                server_status(wrong)


def test_a_certificate_that_is_not_there(tmp_path: Path) -> None:
    access = Access(port=0, certificate=str(tmp_path / "none.pem"))
    with pytest.raises(FileNotFoundError):
        serve(access=access).start()


def test_an_address_that_is_taken() -> None:
    with serve() as server, pytest.raises(OSError, match="address already in use"):
        serve(access=Access(port=int(server.address.rsplit(":", 1)[1]))).start()
