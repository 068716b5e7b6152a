"""The server of training islands: it owns the global parameters, and answers over HTTP."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import re
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from aiohttp import web
from torch import Tensor, nn

from ckptcore import CheckpointError, CheckpointManager, KeepLast, Storage, Value

from ..arguments import InvalidArgument
from .fragments import split_layout
from .outer import GlobalModel, OptimizerFactory, nesterov
from .rounds import Contribution, Member, Rounds, Rules
from .wire import LOOPBACK, DiLoCoError, Layout, Refused, body_pieces, checksum, read_body, refused

__all__ = ["Access", "DiLoCoServer"]

log = logging.getLogger(__name__)

MOST_JSON = 64 * 1024
START_SECONDS = 60.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Access:
    """Where the server listens, and who may talk to it.

    host, port: address (default loopback, 8512; port 0 takes a free one). token: text that every
    request must bring (default None: none, on loopback only). certificate, key: PEM files for TLS
    (default None: plain HTTP). patience: seconds without a byte of a body after which its sender
    counts as gone (default 30).
    """

    host: str = "127.0.0.1"
    port: int = 8512
    token: str | None = None
    certificate: str | None = None
    key: str | None = None
    patience: float = 30.0

    def __post_init__(self) -> None:
        if self.host in LOOPBACK:
            return
        if self.token is None:
            raise InvalidArgument(
                "token", None, f"{self.host} can be reached from outside", "give a token"
            )
        if self.certificate is None:
            log.warning("diloco: %s is served without TLS: the token can be read", self.host)

    def tls(self) -> ssl.SSLContext | None:
        """Raises OSError where a file cannot be read."""
        if self.certificate is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.certificate, self.key)
        return context


@dataclass(frozen=True)
class Published:
    """The parameters of one fragment after its round `number` - 1, as workers get them."""

    number: int
    tensors: dict[str, Tensor]


class DiLoCoServer:
    """Global parameters, the outer optimizer and the rounds, served from a thread.

    parameters: a module, or tensors by name: where the run starts.
    rules: Rules, whom rounds wait for and how long (default: one worker).
    access: Access, address, token and TLS (default: loopback).
    outer_optimizer: function that makes a torch optimizer of the parameters (default: SGD with lr
        0.7 and Nesterov's momentum 0.9).
    dtype: of the global parameters, the mean and the step (default float32; see GlobalModel).
    refuse_nonfinite: bool, refuse pseudo-gradients with NaN or infinity (default True).
    save_dir: path, URL or Storage for checkpoints (default None: none are made).
    save_every: int, outer steps between two checkpoints (default 1).
    keep: int, checkpoints that stay (default 3).
    resume: True goes on from the newest checkpoint of save_dir, if any; a number from the one after
        so many outer steps (default False: save_dir must be empty).

    Use it as a context manager, or `start()` and `stop()`. Raises InvalidArgument; in `start()`
    also OSError for an address that is taken, and CheckpointError.
    """

    def __init__(
        self,
        parameters: nn.Module | Mapping[str, Tensor],
        rules: Rules | None = None,
        access: Access | None = None,
        *,
        outer_optimizer: OptimizerFactory = nesterov,
        dtype: torch.dtype = torch.float32,
        refuse_nonfinite: bool = True,
        save_dir: str | Storage | None = None,
        save_every: int = 1,
        keep: int = 3,
        resume: bool | int = False,
    ) -> None:
        self.rules, self.access = rules or Rules(), access or Access()
        self.model = GlobalModel(parameters, outer_optimizer, dtype)
        self.refuse_nonfinite, self.save_every, self.resume = refuse_nonfinite, save_every, resume
        self.rounds = Rounds(self.rules)
        self.layouts: tuple[Layout, ...] = ()
        self.published: list[Published] = []
        self.manager = (
            None if save_dir is None else CheckpointManager(save_dir, keep=KeepLast(keep))
        )
        self.failed_saves = self.bytes_received = 0
        self.failure: BaseException | None = None
        self.address = ""
        self._reading: dict[tuple[str, int], asyncio.Task[Any]] = {}
        self._ready, self._thread = threading.Event(), threading.Thread()

    # Its life.

    def __enter__(self) -> DiLoCoServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Restore what there is, and listen; returns when the address is bound."""
        if self.manager is not None:
            self._restore(self.manager)
        self._thread = threading.Thread(target=self._run, name="diloco-server", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_SECONDS):
            raise DiLoCoError(f"the server did not start within {START_SECONDS:g} s")
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """Stop listening; what workers wait for is cut off. Raises what made the server fail."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self.wait()

    def wait(self, timeout: float | None = None) -> None:
        """Until the server has stopped. Raises what made it fail."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            return
        if self.manager is not None:
            manager, self.manager = self.manager, None
            manager.close()
        if self.failure is not None:
            raise self.failure

    def checksum(self) -> str:
        """Of the global parameters, in the dtypes of the model."""
        return checksum(self.model.snapshot(self.model.layout))

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # whoever waits for the server raises it
            self.failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop, self._changed = asyncio.Event(), asyncio.Event()
        app = web.Application(middlewares=[self._answering])
        app.add_routes(
            [
                web.post("/register", self._register),
                web.get("/parameters", self._parameters),
                web.post("/submit", self._submit),
                web.post("/heartbeat", self._heartbeat),
                web.post("/deregister", self._deregister),
                web.get("/status", self._status),
            ]
        )
        runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=1.0,
            lingering_time=self.access.patience,
            handler_cancellation=True,  # nobody waits for a round whose connection is gone
        )
        await runner.setup()
        try:
            access = self.access
            site = web.TCPSite(
                runner, access.host, access.port, ssl_context=access.tls(), backlog=1024
            )
            await site.start()
            scheme = "http" if access.certificate is None else "https"
            self.address = f"{scheme}://{access.host}:{runner.addresses[0][1]}"
            log.info("diloco: serving on %s", self.address)
            driving = asyncio.create_task(self._drive())
            stopping = asyncio.create_task(self._stop.wait())
            self._ready.set()
            await asyncio.wait([driving, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if driving.done():
                driving.result()
            driving.cancel()
        finally:
            await runner.cleanup()

    # Checkpoints.

    def _restore(self, manager: CheckpointManager) -> None:
        held = Value(None)
        state = {**self.model.components(), "rounds": held}
        if self.resume is False:
            if manager.list():
                raise InvalidArgument(
                    "save_dir", manager.root, "has checkpoints already", "resume, or name another"
                )
        elif self.resume is True:
            manager.restore(state)
        else:
            manager.load(state, self.resume)
        if held.value is not None:
            self.rounds.load_state_dict(held.value, time.monotonic())
            self._publish_all()

    def _save(self, manager: CheckpointManager, version: int, rounds: dict[str, Any]) -> None:
        state = {**self.model.components(), "rounds": Value(rounds)}
        try:
            manager.save(version, state, overwrite=True, metadata={"diloco": {"version": version}})
        except CheckpointError as error:
            self.failed_saves += 1
            log.error("diloco: outer step %d is not saved, and the run goes on: %s", version, error)

    def _publish_all(self) -> None:
        self.layouts = split_layout(self.model.layout, len(self.rounds.fragments))
        self.published = [
            Published(held.number, self.model.snapshot(layout))
            for held, layout in zip(self.rounds.fragments, self.layouts, strict=True)
        ]

    # Outer steps.

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _drive(self) -> None:
        """Make the outer steps that are due, one after another, and evict who is gone."""
        while True:
            now = time.monotonic()
            for worker in self.rounds.expire(now):
                log.warning("diloco: no sign of life of worker %s: it is out", worker)
                self._notify()
            due = [n for n, _ in enumerate(self.rounds.fragments) if self.rounds.ready(n, now)]
            for fragment in due:
                await self._step(fragment)
            if not due:
                deadlines = [self.rounds.deadline(n) for n in range(len(self.rounds.fragments))]
                soonest = min([d for d in deadlines if d > now], default=math.inf) - now
                tick = min(soonest, self.rules.heartbeat_timeout / 3)
                try:
                    async with asyncio.timeout(tick):
                        await self._changed.wait()
                except TimeoutError:
                    pass

    async def _step(self, fragment: int) -> None:
        taken = self.rounds.take(fragment)
        missing = self.rounds.fragments[fragment].expected - taken.keys()
        if missing and not self.rules.asynchronous:
            log.warning("diloco: the round goes on without %s", ", ".join(sorted(missing)))
        gradients = [contribution.gradient for contribution in taken.values()]
        await asyncio.to_thread(self.model.step, gradients)
        tensors = await asyncio.to_thread(self.model.snapshot, self.layouts[fragment])
        self.rounds.advance(fragment, taken)
        version = self.rounds.version
        if self.manager is not None and version % self.save_every == 0:
            # Before anyone gets the new parameters: what workers have is never lost.
            state = self.rounds.state_dict()
            await asyncio.to_thread(self._save, self.manager, version, state)
        self.published[fragment] = Published(self.rounds.fragments[fragment].number, tensors)
        self._notify()

    # Requests.

    @web.middleware
    async def _answering(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if self.access.token is not None:
                given = request.headers.get("Authorization", "").encode("utf-8", "replace")
                if not hmac.compare_digest(given, f"Bearer {self.access.token}".encode()):
                    raise refused(401, "unauthorized", "authentication required")
            return await handler(request)
        except Refused as error:
            headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
            body = {"error": error.reason, "detail": str(error)}
            return web.json_response(body, status=error.status, headers=headers)
        except ConnectionError:  # the worker is gone; there is nobody to answer
            return web.Response(status=503)
        except web.HTTPException as error:
            body = {"error": "bad_request", "detail": error.reason}
            return web.json_response(body, status=error.status)

    async def _json(self, request: web.Request) -> dict[str, Any]:
        if (request.content_length or 0) > MOST_JSON:
            raise refused(413, "too_large", f"at most {MOST_JSON} bytes")
        try:
            async with asyncio.timeout(self.access.patience):
                text = await request.content.read(MOST_JSON + 1)
                while len(text) <= MOST_JSON and (more := await request.content.read(MOST_JSON)):
                    text += more
            found = json.loads(text) if len(text) <= MOST_JSON else None
        except TimeoutError:
            raise refused(408, "too_slow", "the body did not come") from None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise refused(400, "bad_request", "the body is not a JSON object")
        return found

    def _member(self, worker: Any) -> Member:
        """The member of this name, who is alive."""
        member = self.rounds.members.get(worker) if isinstance(worker, str) else None
        if member is None:
            raise refused(404, "not_registered", "this worker is not registered")
        member.last_seen = time.monotonic()
        return member

    async def _register(self, request: web.Request) -> web.StreamResponse:
        said = await self._json(request)
        worker, fragments = said.get("worker"), said.get("num_fragments")
        sync_every, host = said.get("sync_every"), said.get("host", "")
        if not (
            isinstance(worker, str)
            and _NAME.fullmatch(worker)
            and isinstance(host, str)
            and len(host) < 256
            and isinstance(fragments, int)
            and isinstance(sync_every, int)
            and min(fragments, sync_every) >= 1
            and max(fragments, sync_every) < 2**31
        ):
            raise refused(400, "bad_request", "give worker, host, sync_every and num_fragments")
        if self.rounds.fragments and len(self.rounds.fragments) != fragments:
            text = f"num_fragments is {len(self.rounds.fragments)} in this run"
            raise refused(409, "other_fragments", text)
        if worker not in self.rounds.members and (
            len(self.rounds.members) >= self.rules.max_workers
        ):
            raise refused(409, "full", f"there are {self.rules.max_workers} workers already")
        if not self.rounds.fragments:
            try:
                split_layout(self.model.layout, fragments)
            except InvalidArgument as error:
                raise refused(409, "other_fragments", str(error)) from None
        beats = said.get("heartbeats", True) is True
        self.rounds.join(worker, Member(time.monotonic(), host, sync_every, beats), fragments)
        if not self.layouts:
            self._publish_all()
        log.info("diloco: worker %s is registered", worker)
        self._notify()
        dtype = str(self.model.dtype).removeprefix("torch.")
        return web.json_response({"dtype": dtype, "asynchronous": self.rules.asynchronous})

    async def _parameters(self, request: web.Request) -> web.StreamResponse:
        """All parameters, or those of one fragment."""
        worker = request.query.get("worker")
        self._member(worker)
        which = range(len(self.layouts))
        if "fragment" in request.query:
            number = self._number(request, "fragment", len(self.layouts))
            which = range(number, number + 1)
        return await self._answer(request, str(worker), which)

    def _number(self, request: web.Request, name: str, end: int) -> int:
        text = request.query.get(name, "")
        if not (text.isascii() and text.isdigit() and len(text) < 16 and int(text) < end):
            raise refused(400, "bad_request", f"{name}: a number below {end} is due")
        return int(text)

    async def _answer(self, request: web.Request, worker: str, which: range) -> web.StreamResponse:
        parts = [self.published[number] for number in which]
        tensors = {name: t for part in parts for name, t in part.tensors.items()}
        applied = [self.rounds.fragments[number].applied.get(worker, -1) for number in which]
        metadata = {
            "rounds": json.dumps([part.number for part in parts]),
            "applied": json.dumps(applied),
        }
        layout = Layout.of(tensors)
        pieces = body_pieces(layout, tensors, metadata)
        header = next(pieces)
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = len(header) + layout.nbytes
        await response.prepare(request)
        await response.write(header)
        try:
            for piece in pieces:
                async with asyncio.timeout(self.access.patience):
                    await response.write(piece)
        except TimeoutError:  # who does not read must not hold parameters of long ago
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("a worker does not read its answer") from None
        await response.write_eof()
        return response

    async def _submit(self, request: web.Request) -> web.StreamResponse:
        """Take a pseudo-gradient, and answer with the parameters of the round that comes after."""
        worker = str(request.query.get("worker"))
        self._member(worker)
        fragment = self._number(request, "fragment", len(self.layouts))
        base = self._number(request, "base", 2**48)
        names = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
        dtype = names.get(request.query.get("dtype", ""))
        if dtype is None:
            raise refused(400, "bad_request", f"dtype: one of {', '.join(names)} is due")
        if self.rounds.wanted(worker, fragment, base):
            gradient = await self._read(request, worker, fragment, dtype)
            self._member(worker)  # it may have been evicted meanwhile
            if self.rounds.wanted(worker, fragment, base):
                now = time.monotonic()
                self.rounds.add(worker, fragment, Contribution(base, gradient), now)
                self._notify()
        while self._waits(worker, fragment, base):
            if self.rounds.stopping:
                raise refused(503, "stopping", "too few workers are left: save and stop")
            await self._changed.wait()
            self._member(worker)
        return await self._answer(request, worker, range(fragment, fragment + 1))

    def _waits(self, worker: str, fragment: int, base: int) -> bool:
        held, published = self.rounds.fragments[fragment], self.published[fragment].number
        if self.rules.asynchronous:  # what a step is made of is received until it is made
            return worker in held.received or published < held.number
        return published == base

    async def _read(
        self, request: web.Request, worker: str, fragment: int, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """One body of a worker at a time: a newer one ends the reading of the one before."""
        key = worker, fragment
        if (older := self._reading.get(key)) is not None:
            older.cancel()
        layout = self.layouts[fragment].to(dtype)
        reading = self._reading[key] = asyncio.ensure_future(
            read_body(
                request.content,
                request.content_length,
                layout,
                self.access.patience,
                self.refuse_nonfinite,
            )
        )
        try:
            body = await reading
        except Refused as error:
            if error.reason == "non_finite":
                log.error("diloco: refused from worker %s: %s", worker, error)
                self.rounds.refuse(worker, fragment)
                self._notify()
            raise
        except asyncio.CancelledError:
            if not reading.cancelled():
                reading.cancel()
                raise
            raise refused(409, "replaced", "the worker sent it again") from None
        finally:
            if self._reading.get(key) is reading:
                del self._reading[key]
        self.bytes_received += layout.nbytes
        tensors: dict[str, Tensor] = body.tensors
        return tensors

    async def _heartbeat(self, request: web.Request) -> web.StreamResponse:
        said = await self._json(request)
        worker, speed = said.get("worker"), said.get("steps_per_second")
        member = self._member(worker)
        if isinstance(speed, int | float) and 0 <= speed < 1e9:
            member.steps_per_second = float(speed)
        return web.json_response(
            {
                "sync_every": self.rounds.recommended(str(worker)),
                "stop": self.rounds.stopping,
                "version": self.rounds.version,
            }
        )

    async def _deregister(self, request: web.Request) -> web.StreamResponse:
        said = await self._json(request)
        self._member(said.get("worker"))
        self.rounds.leave(said["worker"])
        self._notify()
        return web.json_response({})

    async def _status(self, request: web.Request) -> web.StreamResponse:
        digest = None
        if request.query.get("checksum"):
            tensors = {n: t for part in self.published for n, t in part.tensors.items()}
            tensors = tensors or self.model.snapshot(self.model.layout)
            digest = await asyncio.to_thread(checksum, tensors)
        return web.json_response(self.status() | {"checksum": digest})

    def status(self) -> dict[str, Any]:
        """What is going on, as JSON has it."""
        rounds, now = self.rounds, time.monotonic()
        members = [
            {
                "worker": name,
                "host": member.host,
                "last_seen_s": round(now - member.last_seen, 1),
                "steps_per_second": round(member.steps_per_second, 3),
                "sync_every": rounds.recommended(name) or member.sync_every,
                "staleness": member.staleness,
                "waits": any(name in held.received for held in rounds.fragments),
                "expected": any(name in held.expected for held in rounds.fragments),
            }
            for name, member in sorted(rounds.members.items())
        ]
        return {
            "mode": "asynchronous" if self.rules.asynchronous else "synchronous",
            "state": "stopping" if rounds.stopping else "open" if rounds.open else "running",
            "version": rounds.version,
            "rounds": [held.number for held in rounds.fragments],
            "workers": members,
            "evicted": rounds.evicted,
            "parameters": sum(spec.elements for spec in self.model.layout.specs),
            "bytes_received": self.bytes_received,
            "failed_saves": self.failed_saves,
        }
