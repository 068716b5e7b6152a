"""How the scenarios of kill_points.py and rank_kill_points.py save: at once, or in the background
of a training.

In the background the state changes from the return of `save_async` on, until the save is over or
the process dies.
"""

import threading
import time

import torch

from ckptcore import CheckpointManager, SaveEvent, SaveHandle, Shard, StateComponent
from ckptcore.testing import FaultStorage
from ckptcore.testing.processes import patience

# By rank and step: whether the state was changed after `save_async` returned.
trained: dict[tuple[int, int], threading.Event] = {}
# By rank, of each save: how many operations its storage had seen when `save_async` returned, and at
# the end of the save.
in_training: list[list[list[int]]] = [[] for _ in range(4)]


def held(event: SaveEvent) -> None:
    """For `on_event`: the background goes no further than its copy of the state until training has
    gone on."""
    if event.kind == "staged":
        trained[event.rank, event.step].wait(60 * patience())


def train(value) -> None:
    """Change in place all that a state holds, numbers and texts as well."""
    if isinstance(value, StateComponent):
        train(value.stateful)
    elif isinstance(value, Shard):
        train(value.tensor)
    elif isinstance(value, torch.Tensor):
        value.add_(1)
    else:
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if isinstance(item, int | float):
                value[key] = item + 1
            elif isinstance(item, str):
                value[key] = "changed"
            else:
                train(item)


def asked(manager: CheckpointManager) -> int:
    """Operations that the storage of those who may die has seen."""
    return manager.storage.count() if isinstance(manager.storage, FaultStorage) else 0


def begin(manager: CheckpointManager, step: int, state, **how) -> SaveHandle:
    """Start to save in the background, and train on before it does anything there."""
    rank = manager.comm.rank
    trained[rank, step] = threading.Event()
    handle = manager.save_async(step, state, **how)
    in_training[rank].append([asked(manager), 0])
    train(state)
    trained[rank, step].set()
    return handle


def save_and_train(manager: CheckpointManager, step: int, state, **how) -> None:
    """Train on until the save in the background has ended."""
    handle = begin(manager, step, state, **how)
    give_up = time.monotonic() + 60 * patience()
    while not handle.wait(0.001) and time.monotonic() < give_up:
        train(state)
    handle.result(0)
    in_training[manager.comm.rank][-1][1] = asked(manager)


# How a scenario saves. "async" is for the kinds that end a process: where only a thread dies
# instead ("memory", and "rank-..." of rank_kill_points.py) other threads of what should be dead
# would live on.
SAVES = {"sync": CheckpointManager.save, "async": save_and_train}
chosen = {"save": "sync"}


def saved(manager: CheckpointManager, step: int, state, **how) -> None:
    SAVES[chosen["save"]](manager, step, state, **how)
