"""A training island: it trains by itself, and syncs with the others every so many steps."""

from __future__ import annotations

import copy
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..arguments import Arguments, InvalidArgument
from ..arguments.kinds import Count, Flag, Natural, Number, Positive, Text
from .client import Answer, Client, Target, wire_dtype
from .fragments import split_layout
from .outer import named_parameters
from .wire import DiLoCoError, Layout, Refused, ServerUnreachable, checksum

__all__ = ["DiLoCoWorker", "WorkerOptions"]

log = logging.getLogger(__name__)

NOT_REGISTERED, NOT_FINITE, STOPPING = 404, 422, 503


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(Arguments):
    """How a worker syncs.

    sync_every: int, local optimizer steps between two syncs of a parameter (default 500).
    worker_id: text, its name (default "": made up; give one to resume). bf16_comm: bool, send
    pseudo-gradients as bf16 (default True; False: in the dtype of the server). timeout: seconds
    for one sync (default 600). dylu: bool, follow the server's advice on sync_every (default
    False). heartbeat_interval: seconds between signs of life (default 30; 0: none, and never
    evicted). num_fragments: int, parts in which the parameters are sent in the background, one
    every sync_every / num_fragments steps (default 1: all at once, training waits).
    max_sync_retries: int (default 3). backoff: seconds before the first retry, twice as many
    before each further one (default 2).
    """

    sync_every: Count = 500
    worker_id: Text = ""
    bf16_comm: Flag = True
    timeout: Positive = 600.0
    dylu: Flag = False
    heartbeat_interval: Number = 30.0
    num_fragments: Count = 1
    max_sync_retries: Natural = 3
    backoff: Number = 2.0

    def conflicts(self) -> Iterator[InvalidArgument]:
        if self.num_fragments > self.sync_every:
            reason, instead = f"more than sync_every={self.sync_every}", "give fewer fragments"
            yield self.fault("num_fragments", reason, f"{instead}, or more steps")


@dataclass
class Progress:
    """How far a worker has come: what of it a checkpoint has."""

    worker_id: str
    sync_every: int
    local_step: int = 0  # since the last send
    next_fragment: int = 0
    sync_count: int = 0
    total_sync_time: float = 0.0
    sync_retries: int = 0
    reconnections: int = 0
    dylu_adjustments: int = 0
    fragment_syncs: int = 0


@dataclass
class InFlight:
    """A fragment that was sent, or is awaited: `gradient` None where it has counted already."""

    fragment: int
    base: int
    gradient: dict[str, Tensor] | None
    future: Future[Answer] | None = None


class DiLoCoWorker:
    """Lets a model be trained by an optimizer as one of several islands. Use it as a context
    manager around the training loop, or `start()` and `stop()`.

    It hooks the optimizer's steps; every `sync_every` of them it sends what the parameters have
    moved since the last sync, and takes the new global ones. With several fragments one of them
    travels in the background while training goes on. Parameters change in the thread that calls
    `optimizer.step()` only, and with `lock` held: save them from another thread with that lock.

    model: module, or a DDP wrapper of one; its trained parameters are shared, buffers are not.
    optimizer: the local optimizer.
    server_addr: "host:port" or URL of the server.
    options: WorkerOptions, or its fields by name.
    token: text (default None: the environment's DILOCO_TOKEN).
    ca_file: PEM file of certificates to trust, for TLS (default None).
    group: process group of the ranks that train this island together by DDP: rank 0 talks, the
        others take its parameters (default None: one process).

    Raises InvalidArgument, and DiLoCoError for parameters that no server can have; `start()` raises
    ServerUnreachable and Refused; a step raises Refused where the server will not have diverged
    parameters. What else goes wrong in a sync is tried again, then left out.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        server_addr: str,
        options: WorkerOptions | None = None,
        *,
        token: str | None = None,
        ca_file: str | None = None,
        group: Any = None,
        **named: Any,
    ) -> None:
        self.options = options or WorkerOptions(**named)
        self.parameters = named_parameters(model)
        if split := [n for n, p in self.parameters.items() if isinstance(p, DTensor)]:
            raise DiLoCoError(
                f"parameter {split[0]} is split over ranks: an island is one process or one DDP "
                "group, not FSDP2 and not a pipeline"
            )
        if any(p.is_meta for p in self.parameters.values()):
            raise DiLoCoError("the model has no values: a pipeline's shell cannot be an island")
        self.layout = Layout.of(self.parameters)
        self.layouts = split_layout(self.layout, self.options.num_fragments)
        self.optimizer, self.group = optimizer, group
        self.target = Target(server_addr, token or os.environ.get("DILOCO_TOKEN"), ca_file)
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64]
        name = self.options.worker_id or f"on-{host}-{uuid.uuid4().hex[:8]}"
        self.progress = Progress(name, self.options.sync_every)
        self.lock = threading.RLock()
        self.should_stop = False  # the server wants the run to be saved and stopped
        self.last_sync_s = 0.0
        self.base: dict[str, Tensor] = {}  # the parameters that each fragment started from
        self.rounds = [0] * len(self.layouts)
        self.counted: set[int] = set()  # fragments whose round has this worker's part already
        self._in_flight: InFlight | None = None
        self._client: Client | None = None
        self._hook: Any = None
        self._advice: int | None = None
        self._dtype = torch.float32
        self._steps, self._since, self._speed = 0, time.monotonic(), 0.0

    @property
    def leads(self) -> bool:
        """Whether this process talks to the server."""
        return self.group is None or dist.get_rank(self.group) == 0

    @property
    def worker_id(self) -> str:
        return self.progress.worker_id

    @property
    def sync_every(self) -> int:
        return self.progress.sync_every

    @property
    def interval(self) -> int:
        """Steps between two sends."""
        return max(1, self.progress.sync_every // len(self.layouts))

    # Its life.

    def __enter__(self) -> DiLoCoWorker:
        self.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop(wait=kind is None)

    def start(self, state: Mapping[str, Any] | None = None) -> None:
        """Register, take the global parameters, and hook the optimizer.

        state: what `state_dict()` gave, with the parameters of the same moment in the model. Where
        the server is in the same round, or has just ended it with this worker's part, training
        goes on exactly; else the global parameters replace those of the model.
        """
        if state:
            self._load(state)
        error: BaseException | None = None
        if self.leads:
            try:
                self._connect()
                self._join(state)
            except BaseException as failure:
                error = failure
        try:
            self._share(range(len(self.layouts)), error)
        except BaseException:
            self._close()
            raise
        self._hook = self.optimizer.register_step_post_hook(self._after_step)
        self._since = time.monotonic()

    def stop(self, wait: bool = True) -> None:
        """Wait for a fragment that is on its way, deregister, and let go of the optimizer.

        wait: bool, else the fragment is dropped (default True).
        """
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._client is None:
            return
        try:
            if wait and self._in_flight is not None and self._in_flight.future is not None:
                self._in_flight.future.exception(self.options.timeout)
            self._client.deregister()
        except (DiLoCoError, FutureTimeout) as error:
            log.warning("diloco: worker %s left without a word: %s", self.worker_id, error)
        finally:
            self._close()

    def _close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            client.close()

    def _facts(self) -> dict[str, Any]:
        options = self.options
        return {
            "sync_every": options.sync_every,
            "num_fragments": len(self.layouts),
            "heartbeats": options.heartbeat_interval > 0,
        }

    def _connect(self) -> None:
        client = Client(self.target, self.worker_id, self.layout, self.options.timeout)
        self._client = client
        said = client.register(**self._facts())
        self._dtype = wire_dtype(False, str(said.get("dtype")))
        if self.options.heartbeat_interval > 0:
            client.begin_heartbeats(
                self.options.heartbeat_interval, self.speed, self._heard, self._facts()
            )

    def _join(self, state: Mapping[str, Any] | None) -> None:
        """Go on in the rounds that the state is of, or take the global parameters."""
        assert self._client is not None
        answer = self._client.parameters()
        current = [mine == now for mine, now in zip(self.rounds, answer.rounds, strict=True)]
        counted = [
            mine == applied == now - 1
            for mine, applied, now in zip(self.rounds, answer.applied, answer.rounds, strict=True)
        ]
        if state and all(a or b for a, b in zip(current, counted, strict=True)):
            for number, layout in enumerate(self.layouts):
                if current[number]:
                    self._take_base(layout, answer.tensors)
            self.counted = {number for number, yes in enumerate(counted) if yes}
            if self._in_flight is not None:
                self._send_again(self._in_flight)
            return
        if state:
            log.warning(
                "diloco: the server is in round %s and worker %s was in %s: the global parameters "
                "replace those of the checkpoint",
                answer.rounds,
                self.worker_id,
                self.rounds,
            )
        self.progress.local_step = self.progress.next_fragment = 0
        self._in_flight, self.counted, self.rounds = None, set(), answer.rounds
        self._adopt(self.layout, answer.tensors)

    # Steps and syncs.

    def _after_step(self, *_: object) -> None:
        self._steps += 1
        self.progress.local_step += 1
        if self.progress.local_step >= self.interval:
            with self.lock:
                self.sync()

    def sync(self) -> None:
        """Send what is due, and take what has come; with one fragment both at once, and training
        waits."""
        began = time.monotonic()
        self._speed = self._steps / max(began - self._since, 1e-9)
        progress, landed = self.progress, -1
        progress.local_step, several = 0, len(self.layouts) > 1
        error: BaseException | None = None
        if self.leads:
            try:
                landed = self._land() if several else -1
                self._send(progress.next_fragment)
                landed = landed if several else self._land()
            except BaseException as failure:
                error = failure
        progress.next_fragment = (progress.next_fragment + 1) % len(self.layouts)
        if self._advice is not None and self.options.dylu and progress.next_fragment == 0:
            progress.dylu_adjustments += progress.sync_every != self._advice
            progress.sync_every = max(self._advice, len(self.layouts))
        self._share(range(landed, landed + 1) if landed >= 0 else range(0), error)
        self._steps, self._since = 0, time.monotonic()
        self.last_sync_s = self._since - began
        progress.total_sync_time += self.last_sync_s

    def _send(self, fragment: int) -> None:
        """Begin to send what a fragment has moved; what counted already is only fetched."""
        assert self._in_flight is None
        layout, gradient = self.layouts[fragment], None
        if fragment not in self.counted:
            wire = wire_dtype(self.options.bf16_comm, str(self._dtype).removeprefix("torch."))
            gradient = {
                spec.name: (
                    self.base[spec.name].to(self._dtype)
                    - self.parameters[spec.name].detach().to("cpu", self._dtype)
                ).to(wire)
                for spec in layout.specs
            }
        self._in_flight = InFlight(fragment, self.rounds[fragment], gradient)
        self._send_again(self._in_flight)

    def _send_again(self, sent: InFlight) -> None:
        assert self._client is not None
        layout = self.layouts[sent.fragment]
        if sent.gradient is None:
            sent.future = self._client.begin_parameters(sent.fragment, layout)
        else:
            sent.future = self._client.begin_submit(sent.fragment, sent.base, layout, sent.gradient)

    def _land(self) -> int:
        """Wait for the fragment that is on its way, and take it: its number, or -1 for none."""
        sent = self._in_flight
        if sent is None:
            return -1
        answer = self._answer(sent)
        self._in_flight = None
        if answer is None:
            return -1
        (number,), (applied,) = answer.rounds, answer.applied
        if sent.gradient is not None and applied != sent.base:
            log.warning("diloco: round %d went without worker %s", sent.base, self.worker_id)
        self.rounds[sent.fragment] = number
        self.counted.discard(sent.fragment)
        self._adopt(self.layouts[sent.fragment], answer.tensors)
        self.progress.fragment_syncs += len(self.layouts) > 1
        self.progress.sync_count += 1
        return sent.fragment

    def _answer(self, sent: InFlight) -> Answer | None:
        """The answer to what was sent, after retries; None where the round is to be left out.

        A retry sends the same pseudo-gradient again: it counts once, also where the answer alone
        was lost.
        """
        assert self._client is not None
        options, client = self.options, self._client
        for attempt in range(options.max_sync_retries + 1):
            try:
                if attempt:
                    client.register(**self._facts())
                    self.progress.reconnections += 1
                    self._send_again(sent)
                assert sent.future is not None
                return sent.future.result(options.timeout)
            except Refused as error:
                if error.status == NOT_FINITE:
                    raise
                if error.status == STOPPING:
                    log.error("diloco: %s", error)
                    self.should_stop = True
                    return None
                failure: Exception = error
            except (ServerUnreachable, FutureTimeout) as error:
                failure = error
            log.warning(
                "diloco: sync %d of worker %s failed, attempt %d: %s",
                sent.base,
                self.worker_id,
                attempt + 1,
                str(failure) or type(failure).__name__,
            )
            if attempt < options.max_sync_retries:
                self.progress.sync_retries += 1
                lost = isinstance(failure, Refused) and failure.status == NOT_REGISTERED
                time.sleep(0.0 if lost else options.backoff * 2**attempt)
        log.error("diloco: the round is left out, and training goes on")
        return None

    # Parameters.

    @torch.no_grad()
    def _adopt(self, layout: Layout, tensors: Mapping[str, Tensor]) -> None:
        """Let these be the model's parameters, and those that it starts from."""
        for spec in layout.specs:
            self.parameters[spec.name].copy_(tensors[spec.name])
        self._take_base(layout, tensors)

    def _take_base(self, layout: Layout, tensors: Mapping[str, Tensor]) -> None:
        for spec in layout.specs:
            self.base[spec.name] = tensors[spec.name].to(spec.dtype)

    @torch.no_grad()
    def _share(self, fragments: range, error: BaseException | None) -> None:
        """Let all ranks of the island have rank 0's parameters of these fragments and its numbers,
        or its failure."""
        if self.group is not None:
            device = next(iter(self.parameters.values())).device
            p = self.progress
            numbers = [error is not None, self.should_stop, p.sync_every, p.local_step]
            numbers += [p.next_fragment, fragments.start, fragments.stop]
            told = torch.tensor([int(n) for n in numbers], dtype=torch.int64, device=device)
            dist.broadcast(told, group_src=0, group=self.group)
            failed, stop, p.sync_every, p.local_step, p.next_fragment, begin, end = told.tolist()
            self.should_stop = bool(stop)
            if failed and error is None:
                raise DiLoCoError("rank 0 of this island could not sync: see its error")
            for fragment in range(begin, end) if not failed else ():
                for spec in self.layouts[fragment].specs:
                    dist.broadcast(self.parameters[spec.name], group_src=0, group=self.group)
        if error is not None:
            raise error

    def checksum(self) -> str:
        """Of the global parameters that this worker started from."""
        return checksum(self.base)

    # Heartbeats.

    def speed(self) -> float:
        """Steps a second, without syncs."""
        now = time.monotonic()
        return self._speed or self._steps / max(now - self._since, 1e-9)

    def _heard(self, said: dict[str, Any]) -> None:
        advice = said.get("sync_every")
        if isinstance(advice, int) and advice >= 1:
            self._advice = advice
        if said.get("stop") is True:
            self.should_stop = True

    # State and figures.

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs besides the model and its optimizer; a fragment on its way
        included."""
        with self.lock:
            sent = self._in_flight
            return {
                **vars(self.progress),
                "rounds": list(self.rounds),
                "in_flight": None
                if sent is None
                else {
                    "fragment": sent.fragment,
                    "base": sent.base,
                    "gradient": copy.copy(sent.gradient),
                },
            }

    def _load(self, state: Mapping[str, Any]) -> None:
        mine = self.progress
        kept = {"worker_id"} if self.options.worker_id else set()
        kept |= set() if self.options.dylu else {"sync_every"}
        for name in {entry.name for entry in fields(Progress)} - kept:
            setattr(mine, name, state[name])
        same = len(state["rounds"]) == len(self.rounds)
        self.rounds = list(state["rounds"]) if same else [-1] * len(self.rounds)
        sent = state["in_flight"] if same else None
        self._in_flight = (
            None if sent is None else InFlight(sent["fragment"], sent["base"], sent["gradient"])
        )

    @property
    def sync_metrics(self) -> dict[str, float]:
        """What the loggers get."""
        p, client = self.progress, self._client
        return {
            "diloco/sync_count": p.sync_count,
            "diloco/sync_every": p.sync_every,
            "diloco/round": max(self.rounds),
            "diloco/sync_s": self.last_sync_s,
            "diloco/total_sync_s": p.total_sync_time,
            "diloco/sync_retries": p.sync_retries,
            "diloco/reconnections": p.reconnections,
            "diloco/dylu_adjustments": p.dylu_adjustments,
            "diloco/fragment_syncs": p.fragment_syncs,
            "diloco/bytes_sent": 0 if client is None else client.bytes_sent,
            "diloco/bytes_received": 0 if client is None else client.bytes_received,
        }
