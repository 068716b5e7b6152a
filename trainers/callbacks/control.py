"""Telling a running job to save, to stop or to abort."""

from __future__ import annotations

import logging
import os
import platform
import queue
import secrets
import time
from pathlib import Path
from typing import Any

from ..arguments.exactness import plain
from .jobs import Endpoint, check_job_id
from .protocol import Logs, TrainerCallback, TrainerControl, TrainerState

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

    endpoint: Endpoint | None = None  # where it listens, on rank 0 while training runs
    _server: ControlServer | None = None

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
        self.port, self.host, self.enable_http = port, host or "127.0.0.1", enable_http
        self.disable_auth, self._token = disable_auth, auth_token
        self._commands: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._state, self._metrics, self._status = TrainerState(), dict[str, Any](), "finished"

    # The server.

    def on_train_begin(self, args: Any, state: TrainerState, trainer: Any = None, **_: Any) -> None:
        self.close()
        self._state, self._metrics, self._status = state, {}, "running"
        if not state.is_world_process_zero or self.enable_http is False:
            return
        if ControlServer is None:
            why = "aiohttp is not installed (pip install ckptcore[control])"
            log.warning("%s takes no commands: %s", self.name, why)
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
            output_dir = _absolute(getattr(args, "output_dir", None))
            logging_dir = _absolute(getattr(trainer, "logging_dir", None))
            run_name = getattr(args, "run_name", None)
            here, folders = (os.getpid(), platform.node(), time.time()), (output_dir, logging_dir)
            endpoint = Endpoint(self.job_id, host, port, *here, *folders, run_name)
            endpoint.announce(token)
        except BaseException:
            listens.close()
            raise
        self.endpoint = endpoint
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
        progress = {n: getattr(self._state, n) for n in ("global_step", "epoch", "max_steps")}
        return {**self._metrics, **progress, "status": self._status}

    def close(self) -> None:
        """Stop listening. Commands that nobody has obeyed are dropped."""
        self._status = "finished"
        if self.endpoint is not None:
            self.endpoint.withdraw()
        if self._server is not None:
            self._server.close()
        self.endpoint = self._server = None
        if left := self._drain():
            log.warning("%s: training has ended; dropped: %s", self.name, ", ".join(left))

    def on_train_end(self, **_: Any) -> None:
        self.close()

    # The commands.

    def _drain(self) -> list[str]:
        found = []
        while not self._commands.empty():
            found.append(self._commands.get())
        return found

    def on_step_end(self, args: Any, control: TrainerControl, **_: Any) -> None:
        """Obey what was asked for."""
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

    on_epoch_end = on_evaluate = on_step_end

    def on_log(self, args: Any, control: TrainerControl, logs: Logs, **_: Any) -> None:
        if self.endpoint is not None:
            self._metrics = plain(dict(logs), not_finite=None)
        self.on_step_end(args, control)


def _absolute(path: Any) -> str | None:
    return None if path is None else str(Path(path).absolute())
