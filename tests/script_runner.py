"""Runs programs in processes of their own that start in milliseconds: forks of this one, which has
imported torch.

Reads one JSON order per line, answers with one line. What a program does at its end (exit code,
traceback, functions that are registered for it) happens as in an interpreter of its own, because
that is what the child is from then on.

Only the last part is left out, where the interpreter takes its modules apart: every object of torch
is touched, which takes as long as all else together. "whole" in the order asks for it.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import sys
from typing import Any

leaves_with: list[int] = []  # the exit code, where the end is not to be the whole one


# Registered before all others, and so called after them.
@atexit.register
def leave() -> None:
    for code in leaves_with:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                return  # the interpreter has a code for it
        os._exit(code)


import torch  # noqa: E402

import ckptcore.manager  # noqa: E402
import ckptcore.testing  # noqa: E402, F401

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


def be(code: Any, ends: list[int]) -> None:
    """Run the program here; its exit code goes into `ends`."""
    try:
        exec(code, globals())
        ends[:] = [0]
    except KeyboardInterrupt:
        raise  # the interpreter ends itself by the signal
    except SystemExit as error:
        given = 0 if error.code is None else error.code
        ends[:] = [given if isinstance(given, int) else 1]
        raise
    except BaseException:
        ends[:] = [1]
        raise


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
    os.environ |= todo["environment"]
    os.chdir(todo["folder"])
    sys.argv = [todo["script"], *todo["arguments"]]
    sys.path.insert(0, os.path.dirname(todo["script"]))
    with open(todo["script"]) as script:
        code = compile(script.read(), todo["script"], "exec")
    be(code, [] if todo["whole"] else leaves_with)
