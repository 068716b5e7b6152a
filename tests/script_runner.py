"""Runs programs in processes of their own that start in milliseconds: forks of this one, which has
imported torch.

Reads one JSON order per line, answers with one line. What a program does at its end (exit code,
traceback, functions that are registered for it) happens as in an interpreter of its own, because
that is what the child is from then on.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
from typing import Any

import torch

import ckptcore.manager
import ckptcore.testing  # noqa: F401

torch.set_num_threads(1)


def serve() -> dict[str, Any] | None:
    """Returns in the children alone, with what each has to do."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return dict(order)
        pidfd = os.pidfd_open(pid)
        ended, _, _ = select.select([pidfd], [], [], order["timeout"])
        os.close(pidfd)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        answers.write(json.dumps(code if ended else None) + "\n")
        answers.flush()
    return None


# What was imported stays: programs neither search it for garbage nor copy its pages for that, at
# their end least of all.
gc.collect()
gc.freeze()
todo = serve()
if todo is not None:
    os.setpgid(0, 0)
    for number, name, flags in (
        (0, "/dev/null", os.O_RDONLY),
        (1, todo["out"], os.O_WRONLY),
        (2, todo["err"], os.O_WRONLY),
    ):
        os.dup2(os.open(name, flags), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [todo["script"], *todo["arguments"]]
    with open(todo["script"]) as script:
        code = compile(script.read(), todo["script"], "exec")
    exec(code, globals())
