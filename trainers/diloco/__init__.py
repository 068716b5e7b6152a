"""DiLoCo: islands that train by themselves, and meet on a server every few hundred steps.

`server` owns the global parameters (`rounds`: who takes part and what counts; `outer`: the outer
step), `worker` is an island (`client`: its connection), `callback` one inside a trainer; `wire` is
what travels between them, `command` what the command line has of it. Names are imported when they
are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .callback import DiLoCoCallback as DiLoCoCallback
    from .outer import DelayedNesterov as DelayedNesterov
    from .rounds import Rules as Rules
    from .server import Access as Access
    from .server import DiLoCoServer as DiLoCoServer
    from .wire import DiLoCoError as DiLoCoError
    from .wire import Refused as Refused
    from .wire import ServerUnreachable as ServerUnreachable
    from .worker import DiLoCoWorker as DiLoCoWorker
    from .worker import WorkerOptions as WorkerOptions

_HOMES = {
    "Access": "server",
    "DelayedNesterov": "outer",
    "DiLoCoCallback": "callback",
    "DiLoCoError": "wire",
    "DiLoCoServer": "server",
    "DiLoCoWorker": "worker",
    "Refused": "wire",
    "Rules": "rounds",
    "ServerUnreachable": "wire",
    "WorkerOptions": "worker",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
