"""For users who test their own storage, and for our own tests.

faults.FaultStorage: any storage, with faults at chosen operations. power.VolatileStorage: any
storage, on a machine that loses power. contract.StorageContract: what the engine asks of a storage,
as a test class to subclass (needs pytest, so it is imported by its own name only). ranks.run_ranks:
threads that are the ranks of one job. processes.RankProcesses: processes that are.
"""

from .faults import FaultStorage, Gate, Operation
from .killed import KILLED_EXIT_CODE, Killed
from .power import Unsynced, VolatileStorage
from .processes import RankCrashed, RankProcesses, RanksDied
from .ranks import run_ranks

__all__ = [
    "KILLED_EXIT_CODE",
    "FaultStorage",
    "Gate",
    "Killed",
    "Operation",
    "RankCrashed",
    "RankProcesses",
    "RanksDied",
    "Unsynced",
    "VolatileStorage",
    "run_ranks",
]
