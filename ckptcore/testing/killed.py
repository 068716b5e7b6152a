"""What stands for a death that cannot be had."""

from __future__ import annotations

__all__ = ["KILLED_EXIT_CODE", "Killed"]

KILLED_EXIT_CODE = 137  # what a shell reports of a process that SIGKILL ended


class Killed(BaseException):
    """Stands for the death of the process where a real one cannot be had: a rank that is a thread,
    or a storage that lives in this process.

    Not an Exception, so that no error handling of the code under test takes it for a failure it can
    deal with. Every later operation of the storage that raised it raises it too, because a dead
    process cleans nothing up; and the virtual rank that it ends (`run_ranks`) says goodbye to
    nobody.
    """
