"""A job's commands and status over HTTP, served by a thread beside training."""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from aiohttp import web

from .jobs import announced_jobs

log = logging.getLogger(__name__)
# What strangers send to the port is no event of the run.
quiet = logging.getLogger(f"{__name__}.http")
quiet.setLevel(logging.CRITICAL)

FIRST_PORT, LAST_PORT = 8900, 8999
MOST_BYTES = 64 * 1024  # of a request's body
PATIENCE = 10.0  # seconds for a request's body to arrive
GOODBYE = 1.0  # seconds that connections which are open at the end get

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def bound_socket(host: str, port: int | None) -> socket.socket:
    """A socket that listens; port None: the first free one from FIRST_PORT. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if port is not None:
        return socket.create_server((host, port), family=family)
    for candidate in range(FIRST_PORT, LAST_PORT + 1):
        try:
            return socket.create_server((host, candidate), family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"no free port from {FIRST_PORT} to {LAST_PORT} on {host}")


class ControlServer:
    """Answers at a socket until it is closed. What it is asked to do it hands on and does not do.

    job_id: of the job whose routes these are. token: that every request must bear; None asks for
    none. commands: the names that are known. submit: called with a command, in the server's thread.
    status: gives what a job says of itself, in the same thread.
    """

    def __init__(
        self,
        listens: socket.socket,
        job_id: str,
        token: str | None,
        commands: Collection[str],
        submit: Callable[[str], None],
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self.job_id, self.commands, self.submit, self.status = job_id, commands, submit, status
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._listens = listens
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="job control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more; returns within seconds."""
        with suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(5 * GOODBYE)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._answer])
        app.router.add_get("/jobs", self._jobs)
        app.router.add_get("/jobs/{job_id}/status", self._status)
        app.router.add_post("/jobs/{job_id}/control", self._control)
        # Clients poll often: no access log.
        runner = web.AppRunner(app, access_log=None, logger=quiet, shutdown_timeout=GOODBYE)
        await runner.setup()
        try:
            await web.SockSite(runner, self._listens).start()
            await self._ending.wait()
        finally:
            await runner.cleanup()
            self._listens.close()

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Who may not ask learns nothing else, and every answer is JSON."""
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if self._expected is not None and not hmac.compare_digest(given, self._expected):
            how = {"WWW-Authenticate": 'Bearer realm="trainer"'}
            said = {"detail": "authentication required"}
            return web.json_response(said, status=401, headers=how)
        try:
            if request.match_info.get("job_id", self.job_id) != self.job_id:
                raise web.HTTPNotFound(text="no such job here")
            return await handler(request)
        except web.HTTPException as error:
            allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            return web.json_response({"error": error.text}, status=error.status, headers=allowed)
        except Exception as error:
            log.exception("a request to %s failed", request.path)
            return web.json_response({"error": type(error).__name__}, status=500)

    async def _jobs(self, _: web.Request) -> web.Response:
        return web.json_response({"jobs": [asdict(j) for j in announced_jobs() if j.is_alive()]})

    async def _status(self, _: web.Request) -> web.Response:
        answer = {**self.status(), "job_id": self.job_id, "timestamp": time.time()}
        text = json.dumps(answer, allow_nan=False)
        return web.Response(text=text, content_type="application/json")

    async def _control(self, request: web.Request) -> web.Response:
        try:
            body = json.loads(await asyncio.wait_for(request.read(), PATIENCE))
        except TimeoutError:
            raise web.HTTPRequestTimeout(text="the body did not arrive in time") from None
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict) or not isinstance(body.get("data", {}), dict):
            raise web.HTTPBadRequest(text='give {"command": "...", "data": {...} (optional)}')
        command = body.get("command")
        if not isinstance(command, str) or command not in self.commands:
            answer = {"error": f"Unknown command: {command!s:.100}"}
            return web.json_response({**answer, "valid_commands": list(self.commands)}, status=400)
        self.submit(command)
        text = f"Command {command} queued for execution"
        found = {"status": "acknowledged", "command": command, "timestamp": time.time()}
        return web.json_response({**found, "message": text})
