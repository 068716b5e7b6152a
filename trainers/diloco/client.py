"""A worker's connection to the server: requests in a thread of its own, heartbeats among them."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import torch
from torch import Tensor

from .wire import (
    DTYPES,
    LOOPBACK,
    Layout,
    Refused,
    ServerUnreachable,
    asynchronous,
    body_pieces,
    read_body,
    refused,
)

__all__ = ["Answer", "Client", "server_status"]

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_SECONDS = 10.0
CONTROL_SECONDS = 30.0
CONTROL_RETRIES = 3
CONTROL_PAUSE = 1.0
MOST_ERROR = 64 * 1024


@dataclass(frozen=True)
class Answer:
    """Parameters from the server.

    rounds: of each fragment that was asked for. applied: the base of this worker's last
    contribution to each, -1 where there is none.
    """

    tensors: dict[str, Tensor]
    rounds: list[int]
    applied: list[int]


@dataclass(frozen=True)
class Target:
    """The server as a worker knows it.

    address: "host:port", or a URL. token: the server's. ca_file: PEM file of certificates to trust
    (default None: the system's).
    """

    address: str
    token: str | None = None
    ca_file: str | None = None

    @property
    def url(self) -> str:
        scheme = "http" if self.ca_file is None else "https"
        url = self.address if "://" in self.address else f"{scheme}://{self.address}"
        return url.rstrip("/")

    def session(self, timeout: float) -> aiohttp.ClientSession:
        """A session in the running loop."""
        context = None if self.ca_file is None else ssl.create_default_context(cafile=self.ca_file)
        host = self.url.split("://")[1].rsplit(":", 1)[0].strip("[]")
        if self.token and self.url.startswith("http://") and host not in LOOPBACK:
            log.warning("diloco: the token is sent to %s without TLS", host)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context if context is not None else True),
            headers={"Authorization": f"Bearer {self.token}"} if self.token else {},
            timeout=aiohttp.ClientTimeout(timeout, sock_connect=CONNECT_SECONDS),
        )


class Client:
    """Requests of one worker.

    target: Target, the server. worker: its name. layout: Layout of the model. timeout: seconds for
    a sync, in which the server waits for the other workers.
    """

    def __init__(self, target: Target, worker: str, layout: Layout, timeout: float) -> None:
        self.target, self.worker, self.layout, self.timeout = target, worker, layout, timeout
        self.bytes_sent = self.bytes_received = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="diloco-client", daemon=True)
        self._thread.start()
        self._session: aiohttp.ClientSession = self._wait(self._open(), CONTROL_SECONDS)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _open(self) -> aiohttp.ClientSession:
        return self.target.session(self.timeout)

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        future = self._begin(work)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End heartbeats and connections."""
        if self._thread.is_alive():
            self._wait(self._end(), CONTROL_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CONTROL_SECONDS)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._session.close()

    # What a worker asks for.

    def register(self, **facts: Any) -> dict[str, Any]:
        """Register, or again; returns what the server said of itself."""
        said = {"worker": self.worker, "host": socket.gethostname(), **facts}
        return self._wait(self._control("/register", said), self.timeout)

    def deregister(self) -> None:
        self._wait(self._json("/deregister", {"worker": self.worker}), self.timeout)

    def parameters(self) -> Answer:
        """All global parameters."""
        return self._wait(self._tensors("GET", "/parameters", {}, self.layout), self.timeout)

    def begin_parameters(self, fragment: int, layout: Layout) -> Future[Answer]:
        """Begin to fetch those of one fragment."""
        return self._begin(self._tensors("GET", "/parameters", {"fragment": fragment}, layout))

    def begin_submit(
        self, fragment: int, base: int, layout: Layout, gradient: Mapping[str, Tensor]
    ) -> Future[Answer]:
        """Begin to send a pseudo-gradient; the result is what the round made of it."""
        dtype = next(iter(gradient.values())).dtype
        said = {"fragment": fragment, "base": base, "dtype": str(dtype).removeprefix("torch.")}
        return self._begin(self._tensors("POST", "/submit", said, layout, gradient))

    def begin_heartbeats(
        self,
        interval: float,
        speed: Callable[[], float],
        heard: Callable[[dict[str, Any]], None],
        facts: Mapping[str, Any],
    ) -> None:
        """Send a sign of life every `interval` seconds, and pass on the answers.

        A worker that the server has forgotten registers again: it is expected from the next round
        on.
        """
        self._begin(self._beat(interval, speed, heard, facts))

    async def _beat(
        self,
        interval: float,
        speed: Callable[[], float],
        heard: Callable[[dict[str, Any]], None],
        facts: Mapping[str, Any],
    ) -> None:
        while True:
            await asyncio.sleep(interval)
            said = {"worker": self.worker, "steps_per_second": speed()}
            try:
                heard(await self._json("/heartbeat", said))
            except Refused as error:
                log.warning("diloco: %s", error)
                if error.status == 404:
                    again = {"worker": self.worker, "host": socket.gethostname(), **facts}
                    try:
                        await self._json("/register", again)
                    except (Refused, ServerUnreachable) as also:
                        log.warning("diloco: %s", also)
            except ServerUnreachable as error:
                log.warning("diloco: no heartbeat: %s", error)

    # How it is asked.

    async def _control(self, path: str, said: Mapping[str, Any]) -> dict[str, Any]:
        """A request that is tried again where no answer comes."""
        for last in [False] * CONTROL_RETRIES + [True]:
            try:
                return await self._json(path, said)
            except ServerUnreachable:
                if last:
                    raise
            await asyncio.sleep(CONTROL_PAUSE)
        raise AssertionError

    async def _json(self, path: str, said: Mapping[str, Any]) -> dict[str, Any]:
        limit = aiohttp.ClientTimeout(CONTROL_SECONDS, sock_connect=CONNECT_SECONDS)
        try:
            async with self._session.post(
                self.target.url + path, json=said, timeout=limit, allow_redirects=False
            ) as response:
                return await _answer_of(response)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from None

    async def _tensors(
        self,
        method: str,
        path: str,
        said: Mapping[str, Any],
        layout: Layout,
        gradient: Mapping[str, Tensor] | None = None,
    ) -> Answer:
        params = {"worker": self.worker, **{name: str(value) for name, value in said.items()}}
        body, headers, length = None, {}, 0
        if gradient is not None:
            sent = Layout.of(gradient)
            pieces = body_pieces(sent, gradient, {})
            length = len(sent.header({})) + sent.nbytes
            body, headers = asynchronous(pieces), {"Content-Length": str(length)}
        try:
            async with self._session.request(
                method,
                self.target.url + path,
                params=params,
                data=body,
                headers=headers,
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    await _answer_of(response)
                size = response.content_length
                found = await read_body(response.content, size, layout, self.timeout)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from None
        self.bytes_sent += length
        self.bytes_received += size or 0
        rounds, applied = (json.loads(found.metadata[name]) for name in ("rounds", "applied"))
        return Answer(found.tensors, rounds, applied)

    def _unreachable(self, error: BaseException) -> ServerUnreachable:
        reason = str(error) or type(error).__name__
        return ServerUnreachable(f"no answer from the server at {self.target.url}: {reason}")


async def _answer_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The JSON of an answer, of bounded length; raises Refused for any other status than 200."""
    text = await response.content.read(MOST_ERROR)
    while len(text) < MOST_ERROR and (more := await response.content.read(MOST_ERROR)):
        text += more
    try:
        found = json.loads(text)
        assert isinstance(found, dict)
    except (ValueError, RecursionError, AssertionError):
        found = {"error": "bad_answer", "detail": "the answer is no JSON object"}
        raise refused(response.status, "bad_answer", str(found["detail"])) from None
    if response.status != 200:
        reason, detail = str(found.get("error"))[:100], str(found.get("detail"))[:1000]
        raise refused(response.status, reason, f"the server says no ({response.status}): {detail}")
    return found


def server_status(target: Target, with_checksum: bool = False, timeout: float = 30.0) -> Any:
    """What a server says of itself. Raises ServerUnreachable and Refused."""

    async def ask() -> dict[str, Any]:
        params = {"checksum": "1"} if with_checksum else {}
        async with (
            target.session(timeout) as session,
            session.get(f"{target.url}/status", params=params) as response,
        ):
            return await _answer_of(response)

    try:
        return asyncio.run(ask())
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise ServerUnreachable(f"no answer from the server at {target.url}: {reason}") from None


def wire_dtype(bf16: bool, server: str) -> torch.dtype:
    """What pseudo-gradients are sent in: bf16, or what the server computes in."""
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    if server not in known:
        raise refused(200, "bad_answer", f"the server computes in {server[:100]!r}")
    return torch.bfloat16 if bf16 else known[server]
