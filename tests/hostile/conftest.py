"""A checkpoint whose files an attacker rewrites, digests included, and a process that measures what
reading it takes."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pytest
import torch

from ckptcore import (
    CheckpointError,
    CheckpointManager,
    RNGState,
    Shard,
    SharingPattern,
    StateComponent,
    open_checkpoint,
)
from ckptcore.format.digest import combined_digest, content_digest
from ckptcore.format.manifest import MANIFEST_NAME

INDEX = "index.rank00000.msgpack"
MIB = 1 << 20


def signed(body: bytes) -> bytes:
    """A manifest of these bytes (without their closing brace), with the digest that fits."""
    return body + b',\n "digest": "%s"\n}\n' % content_digest(body).encode()


@dataclass
class Crafted:
    """A committed checkpoint. After each change all digests of manifest and index are right
    again."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder.parent

    def manifest(self, change: Callable[[dict[str, Any]], Any]) -> None:
        file = self.folder / MANIFEST_NAME
        document = json.loads(file.read_bytes())
        del document["digest"]
        change(document)
        file.write_bytes(
            signed(json.dumps(document, indent=1, sort_keys=True).removesuffix("\n}").encode())
        )

    def index_bytes(self, data: bytes, name: str = INDEX) -> None:
        (self.folder / name).write_bytes(data)
        record = [len(data), content_digest(data), 0]
        self.manifest(lambda document: document["files"].update({name: record}))

    def index(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change the document of the index; what the manifest says of its tensor files follows."""
        raw = msgpack.unpackb((self.folder / INDEX).read_bytes(), strict_map_key=False)
        change(raw)
        self.index_bytes(msgpack.packb(raw))
        held: dict[str, list[tuple[int, bytes]]] = {name: [] for name in raw["files"]}
        for part in raw["components"].values():
            for row in part.get("tensors", ()):
                if row[4] in held:
                    held[row[4]].append((row[6], row[7]))
            for _, file, start, digests in part.get("pieces", ()):
                held[file].append((start, digests))
        digests = {
            name: combined_digest(
                [raw["files"][name][2], *(d for _, d in sorted(parts, key=lambda p: p[0]))]
            )
            for name, parts in held.items()
        }
        sizes = {name: raw["files"][name][0] for name in held}
        self.manifest(
            lambda d: d["files"].update({name: [sizes[name], digests[name], 0] for name in held})
        )

    def ways_in(self) -> dict[str, Callable[[], Any]]:
        """Every way to read it."""
        view = lambda: open_checkpoint(self.folder)  # noqa: E731
        return {
            "load": lambda: CheckpointManager(self.root, io_threads=1).load(live_state(), 1),
            "load without tensors": lambda: CheckpointManager(self.root, io_threads=1).load(
                {"plain": {"n": 0}}, 1, strict=False, transactional=True
            ),
            "restore": lambda: CheckpointManager(self.root, io_threads=1).restore(live_state()),
            "tensors": lambda: view().tensors(),
            "values": lambda: [view().values(key) for key in view().manifest.components],
            "read": lambda: [view().read(t.full_name).nbytes for t in view().tensors()],
            "verify": lambda: view().verify(io_threads=1),
        }


def live_state(mark: float = 0) -> list[StateComponent]:
    return [
        StateComponent(
            "plain", {"a": torch.arange(4.0) + mark, "b": torch.arange(4.0) - mark, "n": mark}
        ),
        StateComponent(
            "cut", {"w": Shard(torch.arange(6.0) * mark, (6,), (0,))}, SharingPattern.SHARDED
        ),
        StateComponent("rng", RNGState()),
    ]


@pytest.fixture
def quick_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ckptcore-test-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile") / "run"
    CheckpointManager(root, run_id="run").save(1, live_state(1))
    return root


@pytest.fixture
def crafted(saved_once: Path, quick_folder: Path) -> Crafted:
    root = quick_folder / "run"
    shutil.copytree(saved_once, root)
    return Crafted(root / "checkpoint-1")


class Ended(NamedTuple):
    """How one call ended: "value" or the error (type names of its classes), its text, and what it
    took beyond before."""

    result: Any
    error: list[str]
    text: str
    resident: int
    virtual: int
    seconds: float


def _status() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        k: int(v.split()[0]) << 10
        for k, v in (line.split(":", 1) for line in lines if line.startswith("Vm"))
    }


def measured(call: Callable[[], Any], seconds: int = 6, room: int = 4 << 30) -> Ended:
    """Make a call in a forked child that may take `room` bytes of memory more than this process,
    and `seconds` of processor time. Its result must be picklable and small; a child that dies is an
    AssertionError."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(3 * seconds)
            before = _status()
            resource.setrlimit(resource.RLIMIT_AS, (before["VmSize"] + room,) * 2)
            resource.setrlimit(resource.RLIMIT_CPU, (_cpu() + seconds, _cpu() + seconds))
            result, kinds, text = None, [], ""
            start = resource.getrusage(resource.RUSAGE_SELF)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    result = call()
            except BaseException as error:
                kinds = [cls.__name__ for cls in type(error).__mro__]
                text = (
                    str(error)
                    if isinstance(error, CheckpointError)
                    else "".join(traceback.format_exception(error))
                )
            after, end = _status(), resource.getrusage(resource.RUSAGE_SELF)
            took = end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime
            try:
                blob = pickle.dumps(result)
            except Exception:
                blob = pickle.dumps(type(result).__name__)
            grown = (after["VmHWM"] - before["VmRSS"], after["VmPeak"] - before["VmSize"])
            data = pickle.dumps(
                (blob if len(blob) < 10_000 else pickle.dumps("large"), kinds, text, *grown, took)
            )
            while data:
                data = data[os.write(writing, data) :]
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        data = stream.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, (
        f"the child ended with {status} (a signal when negative): too much time, memory or stack"
    )
    blob, kinds, text, resident, virtual, took = pickle.loads(data)
    return Ended(pickle.loads(blob), kinds, text, resident, virtual, took)


def _cpu() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return int(usage.ru_utime + usage.ru_stime) + 1


@pytest.fixture(name="measured")
def measured_fixture() -> Callable[..., Ended]:
    return measured


@pytest.fixture(name="signed")
def signed_fixture() -> Callable[[bytes], bytes]:
    return signed


@pytest.fixture(name="live_state")
def live_state_fixture() -> Callable[..., list[StateComponent]]:
    return live_state


@pytest.fixture
def bounded() -> Callable[..., dict[str, str]]:
    """bounded(crafted): each way in ends well, or in an error of our tree with a text that a person
    can read, in little time and memory. Returns the way -> the kind of error ("" where there was
    none)."""

    def check(
        crafted: Crafted, resident: int = 48 * MIB, virtual: int = 400 * MIB
    ) -> dict[str, str]:
        found, wrong = {}, []
        for way, call in crafted.ways_in().items():
            try:
                ended = measured(call)
            except AssertionError as error:
                wrong.append(f"{way}: {error}")
                continue
            found[way] = ended.error[0] if ended.error else ""
            if ended.error and "CheckpointError" not in ended.error:
                wrong.append(f"{way}: {ended.error[0]}, which is not ours:\n{ended.text[-1500:]}")
            if ended.resident > resident or ended.virtual > virtual:
                wrong.append(
                    f"{way}: took {ended.resident / MIB:.0f} MiB ({ended.virtual / MIB:.0f} MiB "
                    "of addresses)"
                )
            if len(ended.text) > 20_000 and "CheckpointError" in ended.error:
                wrong.append(f"{way}: the message has {len(ended.text):,} characters")
            if ended.seconds > 5:
                wrong.append(f"{way}: {ended.seconds:.1f} s")
        assert not wrong, "\n".join(wrong)
        return found

    return check
