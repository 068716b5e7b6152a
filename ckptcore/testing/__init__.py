"""For users who test their own storage, and for our own tests.

faults.FaultStorage: any storage, with faults at chosen operations. contract.StorageContract: what the engine asks of
a storage, as a test class to subclass (needs pytest, so it is imported by its own name only).
"""

from .faults import KILLED_EXIT_CODE, FaultStorage, Gate, Killed, Operation

__all__ = ["KILLED_EXIT_CODE", "FaultStorage", "Gate", "Killed", "Operation"]
