"""Trying again where a storage is only for the moment unable: after throttling, errors of the
server, lost connections.

Everything that goes over a network fails now and then. What is worth another try is decided here,
for every client that fsspec filesystems are built on; and when to give up. Pauses are exponentially
longer, a random part of that, so that many ranks do not come back at once. The clients' own retries
are turned off where that is possible: two layers multiply, and nobody could say how long a request
takes at most.
"""

from __future__ import annotations

import asyncio
import errno
import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

RETRY_SECONDS = 60.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # at most
# A failure after so much quiet is the beginning of a new outage.
QUIET_SECONDS = 60.0

_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_CODES = frozenset(
    {
        "BadDigest",
        "BandwidthLimitExceeded",
        "ConditionalRequestConflict",
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "RequestLimitExceeded",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "XAmzContentSHA256Mismatch",
    }
)
_ERRNO = frozenset(
    getattr(errno, name, -1)
    for name in (
        "EAGAIN",
        "EBUSY",
        "ECONNABORTED",
        "ECONNREFUSED",
        "ECONNRESET",
        "EHOSTDOWN",
        "EHOSTUNREACH",
        "ENETDOWN",
        "ENETRESET",
        "ENETUNREACH",
        "EPIPE",
        "EREMOTEIO",
        "ETIMEDOUT",
    )
)
# Errors of clients that have no status: the connection was lost, or the answer cannot be made sense
# of. By module and name, so that nothing is imported for the question; subclasses count too.
_BY_NAME = frozenset(
    {
        "aiohttp.client_exceptions.ClientConnectionError",
        "aiohttp.client_exceptions.ClientPayloadError",
        "botocore.exceptions.ConnectionError",
        "botocore.exceptions.HTTPClientError",
        "botocore.exceptions.IncompleteReadError",
        "botocore.parsers.ResponseParserError",
        "http.client.HTTPException",
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
        "urllib3.exceptions.HTTPError",
        "azure.core.exceptions.ServiceRequestError",
        "azure.core.exceptions.ServiceResponseError",
    }
)


def http_code(error: BaseException) -> tuple[int | None, str | None]:
    """The HTTP status and the storage's own code for an error, from wherever its client keeps
    them."""
    for link in _chain(error):
        if _is_lost(link):
            break
        response = getattr(link, "response", None)
        if isinstance(response, dict) and "Error" in response:  # botocore
            code = response["Error"].get("Code")
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return (int(code) if status is None and str(code).isdigit() else status), code
        for name in ("status", "status_code", "code"):  # aiohttp, requests, azure, gcsfs
            status = getattr(link, name, None)
            if isinstance(status, int) and 100 <= status < 600:
                return status, None
    return None, None


def is_transient(error: BaseException) -> bool:
    """Whether the same request may well succeed later."""
    status, code = http_code(error)
    if status is not None or code is not None:
        return status in _STATUS or code in _CODES
    return any(_is_lost(link) for link in _chain(error))


def _is_lost(error: BaseException) -> bool:
    """Whether it is about the connection, and so not about the request."""
    if isinstance(error, ConnectionError | TimeoutError | asyncio.TimeoutError | EOFError):
        return True
    if isinstance(error, OSError) and error.errno in _ERRNO and error.__cause__ is None:
        return True
    return any(f"{kind.__module__}.{kind.__qualname__}" in _BY_NAME for kind in type(error).__mro__)


def _chain(error: BaseException) -> list[BaseException]:
    links = [error]
    while len(links) < 8:
        before = links[-1].__cause__ or (
            None if links[-1].__suppress_context__ else links[-1].__context__
        )
        if before is None:
            break
        links.append(before)
    return links


class Retries:
    """Retries of one storage: how many there were, and whether it has been failing for too long to
    go on.

    An operation is given up `seconds` after its first failure; at once when nothing at all has
    succeeded for that long, so that a dead storage is noticed once and not by every one of many
    operations in turn.
    """

    def __init__(self, seconds: float = RETRY_SECONDS) -> None:
        self.seconds = seconds
        self.count = 0
        self._lock = threading.Lock()
        self._failing_since: float | None = None
        self._last_failure = 0.0

    @property
    def dead(self) -> bool:
        """Nothing has succeeded for `seconds`, and the last failure was not long ago."""
        with self._lock:
            now = time.monotonic()
            return (
                self._failing_since is not None
                and now - self._failing_since >= self.seconds
                and now - self._last_failure < QUIET_SECONDS
            )

    def run(self, call: Callable[[], T]) -> T:
        """The result of `call`, tried again while its errors are transient. Raises the last
        error."""
        tries = _Tries(self)
        while True:
            with tries:
                return call()
            time.sleep(tries.pause)

    async def run_async(self, call: Callable[[], Awaitable[T]]) -> T:
        """`run` for coroutines."""
        tries = _Tries(self)
        while True:
            with tries:
                return await call()
            await asyncio.sleep(tries.pause)

    def answered(self) -> None:
        with self._lock:
            self._failing_since = None

    def failed(self, now: float) -> float:
        """Since when nothing has succeeded."""
        with self._lock:
            if self._failing_since is None or now - self._last_failure > QUIET_SECONDS:
                self._failing_since = now
            self._last_failure = now
            return self._failing_since


class _Tries:
    """Those of one operation, each a with block: the error of one that is worth another is taken,
    and `pause` says in how many seconds."""

    def __init__(self, retries: Retries) -> None:
        self.retries, self.number, self.pause = retries, 0, 0.0
        self.first_failure: float | None = None

    def __enter__(self) -> None:
        self.number += 1

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> bool:
        if not isinstance(error, Exception) or not is_transient(error):
            refused = isinstance(error, FileNotFoundError | FileExistsError | PermissionError)
            if error is None or refused or http_code(error)[0]:
                self.retries.answered()
            return False
        now = time.monotonic()
        self.first_failure = self.first_failure or now
        longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self.number - 1, 20))
        self.pause = random.uniform(FIRST_PAUSE / 10, longest)
        since = min(self.first_failure, self.retries.failed(now))
        if now - since + self.pause > self.retries.seconds:
            tries = f"{self.number} tries in {now - self.first_failure:.1f} s"
            error.add_note(f"given up after {tries if self.number > 1 else '1 try'}")
            return False
        with self.retries._lock:
            self.retries.count += 1
        return True
