"""Everything that can save a training run while it goes on, and the synchronous saves that they are
compared with.

Used by `stall`, `cost`, `background` and `memory`. A saver is started once, saves many times, and
is stopped; only `begin` and what the guard costs are what training waits for.
"""

from __future__ import annotations

import select
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from .frame import Kind
from .ground import fsync_tree, size_text
from .savers import cores, dcp_errors, missing_package
from .training import Trainee, is_first_rank, ranks

__all__ = [
    "AsyncSaver",
    "BytesAlone",
    "Dcp",
    "DcpAsync",
    "Ours",
    "OursAsync",
    "TorchCheckpointing",
    "TorchSave",
    "savers_for",
]

DEADLINE = 120.0  # seconds that any save may take


class AsyncSaver:
    """One way to save `self.trainee` under `self.folder`. This class: what saves at once has to
    say."""

    kind: Kind = "peer"
    needs: str | None = None
    in_background = False
    checked = False  # whether `same` can tell

    def __init__(self, name: str) -> None:
        self.name = name
        self.place: Path | None = None

    def missing(self, trainee: Trainee) -> str | None:
        """Why it cannot run here."""
        return missing_package(self.needs)

    def start(self, trainee: Trainee, folder: Path) -> None:
        self.trainee, self.folder = trainee, folder
        self.folder.mkdir(parents=True, exist_ok=True)

    def prewarm(self) -> None:
        """Get ready for the first save, where it can."""

    def begin(self, step: int) -> None:
        """What the training loop calls."""
        raise NotImplementedError

    def guard(self) -> AbstractContextManager[Any]:
        """To be entered before the state is changed."""
        return nullcontext()

    def private(self) -> bool:
        """Whether the host has a copy of everything."""
        return True

    def done(self) -> bool:
        """Whether everything is written."""
        return True

    def wait(self) -> None:
        """Return when everything is written. Raises what the save failed with."""

    def same(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether what was saved last holds `tensor` under `name`."""
        raise NotImplementedError

    def clear(self) -> None:
        """Remove what was saved."""
        if self.place is not None and is_first_rank():
            shutil.rmtree(self.place, ignore_errors=True)

    def stop(self) -> None:
        """Give everything back."""


class Ours(AsyncSaver):
    """save: returns when all is durable."""

    kind: Kind = "ours"
    checked = True

    def __init__(self, name: str, staging: Literal["auto", "copy", "overlap"] = "auto") -> None:
        super().__init__(name)
        self.staging: Literal["auto", "copy", "overlap"] = staging
        self.manager: Any = None

    def start(self, trainee: Trainee, folder: Path) -> None:
        from ckptcore import CheckpointManager

        super().start(trainee, folder)
        self.manager = CheckpointManager(folder, staging=self.staging)

    def begin(self, step: int) -> None:
        self.place = self.folder / f"checkpoint-{step}"
        self.manager.save(step, self.trainee.state())

    def same(self, name: str, tensor: torch.Tensor) -> bool:
        from ckptcore import open_checkpoint

        if not is_first_rank():
            return True  # the first one looks
        with open_checkpoint(str(self.place)) as view:
            return torch.equal(torch.from_numpy(view.read(name)), tensor)

    def stop(self) -> None:
        if self.manager is not None:
            self.manager.close()
            self.manager = None


class OursAsync(Ours):
    """save_async."""

    in_background = True
    handle: Any = None

    def prewarm(self) -> None:
        self.manager.prewarm(self.trainee.state())

    def begin(self, step: int) -> None:
        self.place, self.handle = self.folder / f"checkpoint-{step}", None
        self.handle = self.manager.save_async(step, self.trainee.state())

    def private(self) -> bool:
        return self.handle is None or bool(self.handle.staged())

    def done(self) -> bool:
        return self.handle is None or bool(self.handle.done())

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.result(DEADLINE)


class BytesAlone(AsyncSaver):
    """No save: as many bytes, hashed and written by a process of low priority that has them
    already, past the page cache where that is possible. What this takes from training is the bytes'
    own cost."""

    kind: Kind = "note"
    in_background = True
    WRITER = """
import mmap, os, sys, xxhash
path, size, piece = sys.argv[1], int(sys.argv[2]), 4 << 20
os.nice(10)
data = memoryview(mmap.mmap(-1, 128 << 20))  # more than caches hold
data[:] = b"x" * len(data)
for line in iter(sys.stdin.readline, ""):
    try:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | getattr(os, "O_DIRECT", 0))
    except OSError:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for at in range(0, size, piece):
        part = data[at % len(data) :][:piece]
        xxhash.xxh3_64_digest(part)
        os.pwrite(fd, part, at)
    os.fsync(fd)
    os.close(fd)
    print("done", flush=True)
"""

    def start(self, trainee: Trainee, folder: Path) -> None:
        super().start(trainee, folder)
        command = [sys.executable, "-c", self.WRITER, str(folder / "bytes"), str(trainee.nbytes)]
        self.writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.writing = False

    def begin(self, step: int) -> None:
        assert self.writer.stdin is not None
        self.writer.stdin.write(b"\n")
        self.writer.stdin.flush()
        self.writing = True

    def done(self) -> bool:
        return not self.writing or bool(select.select([self.writer.stdout], [], [], 0)[0])

    def wait(self) -> None:
        assert self.writer.stdout is not None
        if self.writing and self.writer.stdout.readline() != b"done\n":
            raise OSError(f"the process that writes has ended with code {self.writer.wait()}")
        self.writing = False

    def clear(self) -> None:
        (self.folder / "bytes").unlink(missing_ok=True)

    def stop(self) -> None:
        self.writer.kill()
        self.writer.wait()


class TorchSave(AsyncSaver):
    """torch.save, then fsync."""

    def begin(self, step: int) -> None:
        self.place = self.folder / str(step)
        self.place.mkdir()
        torch.save(self.trainee.plain(), self.place / "state.pt")
        fsync_tree(self.place)


class Dcp(AsyncSaver):
    """dcp.save with its defaults; it fsyncs its files."""

    def begin(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        self.place = self.folder / str(step)
        with dcp_errors():
            dcp.save(self.trainee.plain(), checkpoint_id=self.place, no_dist=ranks() == 1)


class DcpAsync(AsyncSaver):
    """dcp.async_save. options: those of a stager that is kept from save to save (None: its default,
    a new one for each save); threads: that write one file each (0: its default)."""

    in_background = True
    staging: Future[Any] | None = None
    writing: Future[Any] | None = None
    stager: Any = None

    def __init__(self, name: str, options: dict[str, bool] | None = None, threads: int = 0) -> None:
        super().__init__(name)
        self.options, self.threads = options, threads

    def start(self, trainee: Trainee, folder: Path) -> None:
        super().start(trainee, folder)
        # Its threads warn after our call of it has ended.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        # Its threads talk while training does, so that a group which is training's own deadlocks.
        self.group = dist.new_group(backend="gloo") if ranks() > 1 else None
        if self.options is not None:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            self.stager = DefaultStager(StagingOptions(**self.options))

    def begin(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        self.place = self.folder / str(step)
        self.staging = self.writing = None
        how: dict[str, Any] = {}
        if self.stager is not None:
            how["async_stager"] = self.stager
        if self.threads:
            how["storage_writer"] = dcp.FileSystemWriter(self.place, thread_count=self.threads)
        else:
            how["checkpoint_id"] = self.place
        with dcp_errors():
            answer = dcp.async_save(self.trainee.plain(), process_group=self.group, **how)
        if isinstance(answer, Future):
            self.writing = answer
        else:
            self.staging, self.writing = answer.staging_completion, answer.upload_completion

    @contextmanager
    def guard(self) -> Iterator[None]:
        if self.staging is not None:
            with dcp_errors():
                self.staging.result(DEADLINE)
        yield

    def private(self) -> bool:
        return self.staging is None or self.staging.done()

    def done(self) -> bool:
        return self.writing is None or self.writing.done()

    def wait(self) -> None:
        if self.writing is not None:
            with dcp_errors():
                self.writing.result(DEADLINE)

    def stop(self) -> None:
        if self.stager is not None:
            self.stager.close()
            self.stager = None


class TorchCheckpointing(AsyncSaver):
    """torch_checkpointing's async manager. It stages into shared memory in a thread, and another
    process writes."""

    needs = "torch_checkpointing"
    in_background = True
    writing: Future[Any] | None = None
    manager: Any = None

    def missing(self, trainee: Trainee) -> str | None:
        absent = super().missing(trainee)
        shared = Path("/dev/shm")
        if (
            absent is None
            and shared.is_dir()
            and (free := shutil.disk_usage(shared).free) < 1.1 * trainee.nbytes
        ):
            # It would be killed by a signal when it touches what is not there.
            return (
                f"needs {size_text(trainee.nbytes)} of shared memory; /dev/shm has "
                f"{size_text(free)}"
            )
        return absent

    def start(self, trainee: Trainee, folder: Path) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().start(trainee, folder)
        config = CheckpointManager.Config.with_async_save()
        config.storage_config = LocalFileSystemStorageConfig(
            use_direct_io=False
        )  # its default fails with EINVAL
        config.save.process_config.subprocess_init_timeout_secs = int(DEADLINE)
        self.manager = config.build()
        process = getattr(self.manager._saver, "_checkpoint_process", None)
        if (
            process is not None
        ):  # a job is minutes old at its first save; its process is there by then
            process.wait_for_init()

    def prewarm(self) -> None:
        self.manager.prewarm_staging(self.trainee.plain())

    def begin(self, step: int) -> None:
        self.place, self.writing = self.folder / str(step), None
        self.writing = self.manager.save(str(self.place), self.trainee.plain())

    def guard(self) -> AbstractContextManager[Any]:
        lock: AbstractContextManager[Any] = self.manager.lock()
        return lock

    def private(self) -> bool:
        return self.writing is None or self.manager._staging_future.done()

    def done(self) -> bool:
        return self.writing is None or self.writing.done()

    def wait(self) -> None:
        if self.writing is not None:
            self.writing.result(DEADLINE)

    def stop(self) -> None:
        if self.manager is not None:
            self.manager.close()
            self.manager = None


def savers_for(device: str) -> dict[str, Callable[[], AsyncSaver]]:
    """By a short name: everything that makes sense on `device`, in the order of the tables."""
    stagings = ("copy",) if device == "cpu" else ("copy", "overlap", "auto")
    kept = {
        "use_pinned_memory": False,
        "use_shared_memory": False,
        "use_async_staging": False,
        "use_non_blocking_copy": False,
    }
    found: dict[str, Callable[[], AsyncSaver]] = {
        "torch": lambda: TorchSave("torch.save + fsync"),
        "dcp": lambda: Dcp("dcp.save"),
        "dcp-async": lambda: DcpAsync("dcp.async_save, default"),
        "dcp-kept": lambda: DcpAsync(
            f"dcp.async_save, kept stager, {cores()} threads", kept, cores()
        ),
    }
    if device != "cpu":
        found["dcp-pinned"] = lambda: DcpAsync(
            "dcp.async_save, pinned + async stager",
            {
                **kept,
                "use_pinned_memory": True,
                "use_async_staging": True,
                "use_non_blocking_copy": True,
            },
        )
    found["tc"] = lambda: TorchCheckpointing("torch_checkpointing async")
    found["ours"] = lambda: Ours("ckptcore save")
    for staging in stagings:
        name = "ckptcore save_async" if device == "cpu" else f'ckptcore save_async, "{staging}"'
        # type: ignore[misc]
        found[f"ours-{staging}"] = lambda name=name, staging=staging: OursAsync(name, staging)
    return found
