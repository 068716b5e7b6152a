"""Telling a running job to save, to stop or to abort."""

from __future__ import annotations

import logging
import os
import platform
import queue
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..arguments.exactness import plain
from .jobs import Endpoint, check_job_id
from .protocol import TrainerCallback, TrainerControl, TrainerState

try:
    from .control_server import ControlServer, bound_socket
except ImportError:  # aiohttp, an extra
    ControlServer = None  # type: ignore[assignment, misc]

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")

# What a command asks for. Of several, an abort wins: a trainer looks at that flag first.
COMMANDS = {
    "graceful_stop": ("should_training_stop",),
    "save_checkpoint": ("should_save",),
    "save_and_stop": ("should_save", "should_training_stop"),
    "abort": ("should_training_stop", "should_abort_without_save"),
}


class TrainerControlCallback(TrainerCallback):
    """Listens on rank 0 for commands, of `ckpt-train control` or any HTTP client, from the
    beginning of training to its end.

    A command is a flag on rank 0, as any callback may set one: all ranks agree on it at the next
    step boundary, and again between an evaluation and the save after it. A server that cannot
    start is a warning, and training goes on without it.

    job_id: letters, digits, ".", "_", "-" (default job_<time>_<host>_<pid>).
    port: to listen on (default None: the first free one of 8900 to 8999).
    enable_http: None (default) and True: where aiohttp is installed; False: no server.
    host: address to bind (default 127.0.0.1). Others than loopback can be reached from outside.
    auth_token: that requests must bear (default: a random one of 64 hexadecimal digits).
    disable_auth: ask for no token (default False).

    Raises InvalidArgument for a job_id that is no name of a folder.
    """

    def __init__(
        self,
        job_id: str | None = None,
        port: int | None = None,
        enable_http: bool | None = None,
        host: str | None = None,
        auth_token: str | None = None,
        disable_auth: bool = False,
    ) -> None:
        default = f"job_{int(time.time())}_{platform.node()}_{os.getpid()}"
        self.job_id = check_job_id(default if job_id is None else job_id)
        self.port, self.host = port, host or "127.0.0.1"
        self.enable_http, self.disable_auth = enable_http, disable_auth
        self._token = auth_token
        self._commands: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._server: ControlServer | None = None
        self._endpoint: Endpoint | None = None
        self._state = TrainerState()
        self._metrics: dict[str, Any] = {}
        self._status = "finished"

    @property
    def endpoint(self) -> Endpoint | None:
        """Where it listens, on rank 0 while training runs."""
        return self._endpoint

    # The server.

    def on_train_begin(
        self, args: Any, state: TrainerState, trainer: Any = None, **kwargs: Any
    ) -> None:
        self.close()
        self._state, self._metrics, self._status = state, {}, "running"
        if not state.is_world_process_zero or self.enable_http is False:
            return
        if ControlServer is None:
            log.warning(
                "%s takes no commands: aiohttp is not installed (pip install ckptcore[control])",
                self.name,
            )
            return
        try:
            self._start(args, trainer)
        except OSError as error:
            log.warning("%s takes no commands: its server did not start: %s", self.name, error)
            self.close()

    def _start(self, args: Any, trainer: Any) -> None:
        token = None if self.disable_auth else self._token or secrets.token_hex(32)
        listens = bound_socket(self.host, self.port)
        try:
            host, port = listens.getsockname()[:2]
            endpoint = Endpoint(
                job_id=self.job_id,
                host=host,
                port=port,
                pid=os.getpid(),
                hostname=platform.node(),
                started_at=time.time(),
                output_dir=_absolute(getattr(args, "output_dir", None)),
                logging_dir=_absolute(getattr(trainer, "logging_dir", None)),
                run_name=getattr(args, "run_name", None),
            )
            endpoint.announce(token)
        except BaseException:
            listens.close()
            raise
        self._endpoint = endpoint
        self._server = ControlServer(
            listens, self.job_id, token, COMMANDS, self._commands.put, self._describe
        )
        log.info("job %s takes commands at %s", self.job_id, endpoint.url)
        if self.host not in LOOPBACK:
            log.warning("%s: %s:%d can be reached from outside", self.name, host, port)
        if self.disable_auth:
            log.warning("%s: %s:%d asks for no token", self.name, host, port)

    def _describe(self) -> dict[str, Any]:
        """In the server's thread."""
        state = self._state
        progress = {
            "global_step": state.global_step,
            "epoch": state.epoch,
            "max_steps": state.max_steps,
        }
        return {**self._metrics, **progress, "status": self._status}

    def close(self) -> None:
        """Stop listening. Commands that nobody has obeyed are dropped."""
        self._status = "finished"
        if self._endpoint is not None:
            self._endpoint.withdraw()
            self._endpoint = None
        if self._server is not None:
            self._server.close()
            self._server = None
        if left := self._drain():
            log.warning("%s: training has ended; dropped: %s", self.name, ", ".join(left))

    def on_train_end(self, **kwargs: Any) -> None:
        self.close()

    # The commands.

    def _drain(self) -> list[str]:
        found = []
        while not self._commands.empty():
            found.append(self._commands.get())
        return found

    def _obey(self, args: Any, control: TrainerControl) -> None:
        for command in self._drain():
            log.info("%s: %s was asked for", self.name, command)
            flags = COMMANDS[command]
            for flag in flags:
                if hasattr(control, flag):
                    setattr(control, flag, True)
                else:
                    log.warning("%s: this trainer knows no %s", self.name, flag)
            if "should_save" in flags and args.load_best_model_at_end:
                control.should_evaluate |= args.eval_strategy != "no"
            if "should_training_stop" in flags:
                self._status = "stopping"

    def on_step_end(self, args: Any, control: TrainerControl, **kwargs: Any) -> None:
        self._obey(args, control)

    on_epoch_end = on_evaluate = on_step_end

    def on_log(
        self, args: Any, control: TrainerControl, logs: Mapping[str, Any], **kwargs: Any
    ) -> None:
        if self._endpoint is not None:
            self._metrics = plain(dict(logs), not_finite=None)
        self._obey(args, control)


def _absolute(path: Any) -> str | None:
    return None if path is None else str(Path(path).absolute())
