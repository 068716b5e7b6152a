"""A trainer as a training island."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ..arguments import InvalidArgument
from ..callbacks.protocol import TrainerCallback, TrainerControl, TrainerState
from .worker import DiLoCoWorker, WorkerOptions

__all__ = ["DiLoCoCallback"]

log = logging.getLogger(__name__)

YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
REFUSED = {
    "fsdp2": "FSDP2 splits the parameters over ranks",
    "pipeline": "a pipeline splits the model over ranks",
}


class DiLoCoCallback(TrainerCallback):
    """Lets a trainer train as one island of several; see DiLoCoWorker.

    server_addr: "host:port" or URL (default: DILOCO_SERVER in the environment; "": inactive).
    sync_every, worker_id, bf16_comm, dylu, heartbeat_interval, num_fragments: as in WorkerOptions
    (default: DILOCO_SYNC_EVERY and so on in the environment). timeout, max_sync_retries: as in
    WorkerOptions. token: text (default: DILOCO_TOKEN). ca_file: PEM file (default:
    DILOCO_CA_FILE).

    On several ranks under DDP rank 0 talks to the server, and the others take its parameters. A
    trainer that splits the model, or steps in the backward pass, is refused when it is built. A
    sync happens within the optimizer's step, so none overlaps the capture of a checkpoint. A
    resumed run goes on exactly where the server is in the same round, or one further with this
    worker's part; else the server's parameters replace those of the checkpoint.
    """

    def __init__(
        self,
        server_addr: str | None = None,
        sync_every: int | None = None,
        worker_id: str | None = None,
        bf16_comm: bool | None = None,
        dylu: bool | None = None,
        heartbeat_interval: float | None = None,
        num_fragments: int | None = None,
        timeout: float = 600.0,
        max_sync_retries: int = 3,
        token: str | None = None,
        ca_file: str | None = None,
    ) -> None:
        self.server_addr = _given("server_addr", server_addr, "DILOCO_SERVER", "")
        self.options = WorkerOptions(
            sync_every=_given("sync_every", sync_every, "DILOCO_SYNC_EVERY", 500),
            worker_id=_given("worker_id", worker_id, "DILOCO_WORKER_ID", ""),
            bf16_comm=_given("bf16_comm", bf16_comm, "DILOCO_BF16_COMM", True),
            dylu=_given("dylu", dylu, "DILOCO_DYLU", False),
            heartbeat_interval=_given(
                "heartbeat_interval", heartbeat_interval, "DILOCO_HEARTBEAT_INTERVAL", 30.0
            ),
            num_fragments=_given("num_fragments", num_fragments, "DILOCO_NUM_FRAGMENTS", 1),
            timeout=timeout,
            max_sync_retries=max_sync_retries,
        )
        self.token = token
        self.ca_file = _given("ca_file", ca_file, "DILOCO_CA_FILE", "") or None
        self.worker: DiLoCoWorker | None = None
        self._held: dict[str, Any] = {}

    @property
    def active(self) -> bool:
        """Whether there is a server to sync with."""
        return bool(self.server_addr)

    def on_init_end(self, args: Any, trainer: Any = None, **kwargs: Any) -> None:
        if not self.active:
            return
        kind = getattr(trainer, "kind", None)
        reason = REFUSED.get(kind or "")
        if getattr(args, "fuse_optim_with_backward", False):
            reason = "with fuse_optim_with_backward there is no step to sync after"
        if getattr(getattr(args, "post_local_sgd", None), "enabled", False):
            reason = "with post_local_sgd the ranks of an island differ between averages"
        if reason is not None:
            instead = "train an island in one process or by DDP, without these"
            raise InvalidArgument("DiLoCoCallback", kind, reason, instead)

    def on_train_begin(
        self, model: Any = None, optimizer: Any = None, trainer: Any = None, **kwargs: Any
    ) -> None:
        if not self.active:
            return
        if model is None or optimizer is None:
            log.error("DiLoCoCallback is off: there is no model or no optimizer to sync")
            return
        several = getattr(trainer, "world_size", 1) > 1
        self.worker = DiLoCoWorker(
            model,
            getattr(optimizer, "optimizer", optimizer),  # Accelerate's wrapper holds the real one
            self.server_addr,
            self.options,
            token=self.token,
            ca_file=self.ca_file,
            group=dist.group.WORLD if several else None,
        )
        self.worker.start(self._held)

    def on_step_end(self, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.worker is not None and self.worker.should_stop:
            log.warning("the DiLoCo server has too few workers left: the run is saved and stops")
            control.should_save = control.should_training_stop = True

    def on_log_step(self, logs: dict[str, Any], **kwargs: Any) -> None:
        if self.worker is not None and self.worker.leads:
            logs.update(self.worker.sync_metrics)

    def on_train_end(self, **kwargs: Any) -> None:
        self._leave(wait=True)

    def close(self) -> None:
        """Leave the server, and wait for nobody."""
        self._leave(wait=False)

    def _leave(self, wait: bool) -> None:
        if self.worker is not None:
            self._held = self.worker.state_dict()
            worker, self.worker = self.worker, None
            worker.stop(wait)

    def reset(self) -> None:
        """A run that starts from its beginning takes the global parameters."""
        self._held = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._held) if self.worker is None else self.worker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._held = dict(state)


def _given(name: str, value: Any, variable: str, default: Any) -> Any:
    """An argument, else the environment's, in the type of the default."""
    text = os.environ.get(variable)
    if value is not None or text is None:
        return default if value is None else value
    if isinstance(default, bool):
        if text.lower() not in YES + NO:
            raise InvalidArgument(variable, text, f"{name} is yes or no", "give true or false")
        return text.lower() in YES
    try:
        return type(default)(text)
    except ValueError:
        kind = type(default).__name__
        raise InvalidArgument(variable, text, f"{name} is no {kind}", f"give a {kind}") from None
