"""One folder of a root: what it is, whose attempt marks it, how its checkpoint is withdrawn and
removed.

A checkpoint exists if and only if its manifest is there and verifies; names, times and listing
order decide nothing. Folder names only say where to look:

checkpoint-500                      a checkpoint (or, without a manifest, what became of one)
checkpoint-500-after-warmup         another one, which its manifest calls "after-warmup"
checkpoint-500.partial-<attempt>    an attempt that was not published
checkpoint-500.replaced-<attempt>   the one that an overwrite put aside; it counts while
checkpoint-500 does not
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ..arguments import shown
from ..errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    InvalidState,
    StorageError,
    UnsupportedVersion,
)
from ..format.digest import content_digest
from ..format.manifest import MANIFEST_NAME, SIZE_LIMIT, CheckpointManifest
from ..storage.base import Entry, Storage

WITHDRAWN_NAME = "checkpoint_manifest.withdrawn.json"
# In a checkpoint's folder, so that a copy of it is pinned too.
PIN_NAME = "checkpoint.pinned"
# How often a root that changes while it is looked at is looked at again.
MOST_SCANS = 300
DELETING = "a deletion that was not finished"
NOT_OURS = "not like a checkpoint of ckptcore"
UNCOMMITTED = f"no {MANIFEST_NAME}: it was never committed, or damaged"
LEFTOVER_OF_OTHERS = (
    "no checkpoint: it was deleted or never there, and somebody else's files are in its folder"
)
# Where folders cannot be renamed, an attempt is built in its final place; this object says whose it
# is until it is one.
_MARKER = re.compile(r"attempt\.([A-Za-z0-9_.-]+)\.partial")
FOLDER = re.compile(
    r"checkpoint-(0|[1-9][0-9]*)(?:-([A-Za-z0-9_.=+-]+?))?(?:\.(partial|replaced)-([A-Za-z0-9_.-]+))?"
)
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.=+-]{0,98}[A-Za-z0-9])?")
_TAKEN = re.compile(r"latest|best|auto|[0-9]+|checkpoint-.*|.*\.(partial|replaced)-.*")
# A folder with the name of a checkpoint, whose manifest calls it otherwise: a copy that somebody
# has put beside it, or nothing of ours.
FOREIGN = "foreign"
_OURS = re.compile(
    r".*\.safetensors|.*\.safetensors\.index\.json|index\.rank\d{5,}\.msgpack|upload\.[0-9a-f]+\.partial|"
    rf"{re.escape(MANIFEST_NAME)}|{re.escape(WITHDRAWN_NAME)}|{re.escape(PIN_NAME)}|{_MARKER.pattern}"
)
_INDEX = re.compile(r"index\.rank\d{5,}\.msgpack")
# What other programs call the files of their checkpoints.
_FOREIGN = tuple(
    (what, re.compile(pattern))
    for what, pattern in (
        ("a folder of torch.distributed.checkpoint", r"\.metadata|.*\.distcp"),
        (
            "a Hugging Face folder",
            r"(adapter_|pytorch_|diffusion_pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)",
        ),
        ("a folder of torch.save", r".*\.(pt|pth|bin|ckpt)"),
    )
)


@dataclass(frozen=True, slots=True)
class FolderName:
    """What the name of a folder says. label: the name that a save was given, "" for none; kind:
    "partial", "replaced", or "" for the checkpoint itself; attempt: whose that is."""

    step: int
    label: str
    kind: str
    attempt: str

    @classmethod
    def parse(cls, name: str) -> FolderName | None:
        """None for what is no name of ours."""
        match = FOLDER.fullmatch(name)
        if match is None:
            return None
        return cls(int(match[1]), match[2] or "", match[3] or "", match[4] or "")


def folder_name(step: int, label: str) -> str:
    return f"checkpoint-{step}-{label}" if label else f"checkpoint-{step}"


def checked_label(name: Any) -> str:
    """The name that a save is given; "" for None. Raises InvalidState."""
    if name is None:
        return ""
    if not isinstance(name, str) or not _LABEL.fullmatch(name):
        raise InvalidState(
            "name must be 1 to 100 ASCII letters, digits, '-', '_', '.', '=' or '+', and begin and "
            f"end with a letter or digit, not {shown(name)}: the folder is called "
            "checkpoint-<step>-<name>"
        )
    if _TAKEN.fullmatch(name):
        raise InvalidState(
            f"name cannot be {name!r}, which means something else already; the folder is called "
            "checkpoint-<step>-<name>"
        )
    return name


@dataclass(frozen=True, slots=True, repr=False)
class CheckpointInfo:
    """One entry of a root; as text it is one line.

    name: text, the folder in the root.
    url: text, its path or URL.
    status: "committed", "uncommitted" (no manifest), "damaged" (it does not verify, or a listed
        file is missing or of another size), "unsupported" (of a newer format), "unreadable" (the
        storage refuses), "partial" (an attempt, overwrite or deletion not finished) or
        "incomplete" (of node-local roots, some have it and others have not).
    step: int of the manifest; None where none was read.
    reason: text, why it is not committed; None where it is.
    manifest: CheckpointManifest; None where none was read.
    marked: bool, it is committed and the mark of the attempt still lies in it.
    pinned: bool, retention and `delete` leave it alone, whatever its status.
    abandoned: bool, the run went back behind it and saved again: never the newest or the best.
    """

    name: str
    url: str
    status: str
    step: int | None = None
    reason: str | None = None
    manifest: CheckpointManifest | None = None
    marked: bool = False
    pinned: bool = False
    abandoned: bool = False

    def __str__(self) -> str:
        facts = [self.status, f"step {self.step}"]
        if self.manifest is not None:
            count = len(self.manifest.components)
            facts.append(
                f"{count} component{'s' if count != 1 else ''}, {self.manifest.size_bytes:,} bytes"
            )
        facts += ["pinned"] if self.pinned else []
        facts += ["abandoned"] if self.abandoned else []
        facts += [self.reason] if self.reason and self.status != "committed" else []
        return f"{self.name} ({', '.join(facts)})"

    def __repr__(self) -> str:
        return f"<CheckpointInfo: {self}>"

    def __fspath__(self) -> str:
        """Its path or URL, so that it can be given wherever that can."""
        return self.url

    @property
    def sequence(self) -> int | None:
        return self.manifest.sequence if self.manifest else None

    @property
    def run_id(self) -> str | None:
        return self.manifest.run_id if self.manifest else None

    @property
    def size_bytes(self) -> int | None:
        return self.manifest.size_bytes if self.manifest else None

    @property
    def label(self) -> str:
        """The `name` that was given to the save; "" for none."""
        return self.manifest.label if self.manifest else ""

    @property
    def files(self) -> list[str]:
        """Names of the files that were given to the save as `files`."""
        return self.manifest.user_files if self.manifest else []

    @property
    def created(self) -> str | None:
        return self.manifest.created if self.manifest else None

    @property
    def metrics(self) -> dict[str, float]:
        return self.manifest.metrics if self.manifest else {}

    @property
    def order(self) -> tuple[int, int]:
        return (-1 if self.step is None else self.step, self.sequence or 0)


def is_ours(file: str) -> bool:
    """Whether a file name is one that this format gives to the files of a checkpoint."""
    return _OURS.fullmatch(file) is not None


def is_half_uploaded(file: str) -> bool:
    return re.fullmatch(r"upload\.[0-9a-f]+\.partial", file) is not None


def join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def read_manifest(storage: Storage, folder: str) -> CheckpointManifest:
    """The verified manifest of a checkpoint folder; "" is the storage's root.

    Raises CheckpointNotFound where there is none, CheckpointCorrupt, UnsupportedVersion,
    StorageError.
    """
    try:
        return _manifest_in(storage, folder, MANIFEST_NAME)
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        where = storage.at(folder)
        what = f"{where}: no checkpoint here (no {MANIFEST_NAME})"
        raise CheckpointNotFound(what, path=where) from None


def _manifest_in(storage: Storage, folder: str, file: str) -> CheckpointManifest:
    """The manifest that a file is. One that is no file is damage."""
    try:
        data = [storage.read(join(folder, file), SIZE_LIMIT)]  # popped: errors keep frames alive
    except StorageError as error:
        if error.errno not in (errno.EISDIR, errno.EINVAL):
            raise
        where = storage.at(folder)
        raise CheckpointCorrupt(str(error), path=where, file=file, kind="format") from None
    return CheckpointManifest.decode(data.pop(), storage.at(folder))


def checkpoints_in(storage: Storage, folder: str, most: int = 5) -> list[str]:
    """What looks like checkpoints in a folder that is none itself, the newest few of them, for a
    message."""
    try:
        found = [
            (parsed.step, e.name)
            for e in (storage.entries(folder) or ())
            if e.is_folder and (parsed := FolderName.parse(e.name)) and not parsed.kind
        ]
    except StorageError:
        return []
    whole = sorted(found)
    return [*(["..."] if len(whole) > most else []), *(name for _, name in whole[-most:])]


def check_files(
    storage: Storage,
    folder: str,
    manifest: CheckpointManifest,
    listed: Sequence[Entry] | None = None,
) -> set[str]:
    """The names in the folder, if all is there as it was `listed` a moment ago. Raises
    CheckpointCorrupt, naming the first file that is missing or has another size than the manifest
    says."""
    sizes = {entry.name: entry.size for entry in listed or ()}
    if listed is None or any(
        sizes.get(name) != record.size for name, record in manifest.files.items()
    ):
        sizes = {entry.name: entry.size for entry in storage.list(folder)}
    for name, record in manifest.files.items():
        if sizes.get(name) is None:
            what = "is not a file" if name in sizes else "is missing"
            raise CheckpointCorrupt(
                f"{storage.at(join(folder, name))} {what}",
                path=storage.at(folder),
                file=name,
                kind="missing",
                expected=record.size,
            )
        if sizes[name] != record.size:
            raise CheckpointCorrupt(
                f"{storage.at(join(folder, name))} has {sizes[name]} bytes, the manifest says "
                f"{record.size}",
                path=storage.at(folder),
                file=name,
                kind="size",
                expected=record.size,
                actual=sizes[name],
            )
    return set(sizes)


def step_of(name: str) -> int:
    parsed = FolderName.parse(name)
    return -1 if parsed is None else parsed.step


def still_there(storage: Storage, folder: str, manifest: CheckpointManifest | None) -> bool:
    """Whether `folder` still holds the commit of `manifest`: neither deleted nor replaced since
    that was read."""
    try:
        return manifest is not None and read_manifest(storage, folder).digest == manifest.digest
    except CheckpointNotFound:
        return False
    except (CheckpointCorrupt, UnsupportedVersion, StorageError):
        return True  # what is wrong with it is another matter


class Memory:
    """Manifests that were read, for as long as a listing shows the file as it was then."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[Entry, CheckpointManifest]] = {}

    def read(self, storage: Storage, folder: str, listed: Sequence[Entry]) -> CheckpointManifest:
        """The manifest of a folder that was `listed` before. Raises as `read_manifest` does."""
        file = next((entry for entry in listed if entry.name == MANIFEST_NAME), None)
        before, manifest = self.files.get(folder, (None, None))
        known = before is not None and file == before and file.version == before.version
        if manifest is None or not known:
            manifest = read_manifest(storage, folder)
            if file is not None and file.version is not None:
                self.files[folder] = file, manifest
        return manifest


def inspect_folder(
    storage: Storage, name: str, listed: Sequence[Entry] | None = None, memory: Memory | None = None
) -> CheckpointInfo | None:
    """What an entry of a root is; None when it is gone, or another one by now."""
    parsed = FolderName.parse(name)
    assert parsed is not None
    step, url = parsed.step, storage.at(name)
    if parsed.kind == "partial":
        return CheckpointInfo(name, url, "partial", step, "an attempt that was not published")
    manifest = None
    try:
        if memory is not None and listed is None:
            with suppress(StorageError):  # what that is, the manifest tells
                listed = storage.list(name)
        if memory is None or listed is None:
            manifest = read_manifest(storage, name)
        else:
            manifest = memory.read(storage, name, listed)
        names = check_files(storage, name, manifest, listed)
    except CheckpointNotFound:
        return _without_manifest(storage, name, parsed)
    except (CheckpointCorrupt, UnsupportedVersion, StorageError) as error:
        if manifest is not None and not still_there(storage, name, manifest):
            return None  # its files went after its manifest: a deletion, no damage
        return _unusable(storage, name, manifest, step, error)
    marked = any(_MARKER.fullmatch(found) for found in names)
    status = FOREIGN if parsed.label not in ("", manifest.label) else "committed"
    return CheckpointInfo(
        name, url, status, manifest.step, None, manifest, marked, PIN_NAME in names
    )


def _is_readable(storage: Storage, path: str) -> bool:
    try:
        storage.open(path).close()
    except StorageError:
        return False
    return True


def _without_manifest(storage: Storage, name: str, parsed: FolderName) -> CheckpointInfo | None:
    url, step = storage.at(name), parsed.step
    try:
        entries = storage.list(name)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return None
        return CheckpointInfo(name, url, "damaged", step, str(error))
    names = {entry.name for entry in entries}
    if MANIFEST_NAME in names and _is_readable(storage, join(name, MANIFEST_NAME)):
        return None  # it was put there between the two looks
    if attempts_among(entries):
        return CheckpointInfo(name, url, "partial", step, "an attempt that was not finished")
    if parsed.label and not any(map(is_ours, names)):
        return CheckpointInfo(name, url, FOREIGN, step)
    if WITHDRAWN_NAME in names or names <= {PIN_NAME}:
        return CheckpointInfo(name, url, "partial", step, DELETING)
    status, reason = _status_by_names(names)
    return CheckpointInfo(name, url, status, step, reason, pinned=PIN_NAME in names)


def foreign_format(storage: Storage, folder: str) -> tuple[str, str] | None:
    """(what another library calls such a folder, the file that says so), for a message; None where
    it is nothing that is known."""
    try:
        listed = {entry.name for entry in (storage.entries(folder) or ())}
    except StorageError:
        return None
    return _foreign_in(listed)


def _foreign_in(names: set[str]) -> tuple[str, str] | None:
    for kind, pattern in _FOREIGN:
        if found := sorted(name for name in names if pattern.fullmatch(name)):
            return kind, found[0]
    return None


def _status_by_names(names: set[str]) -> tuple[str, str]:
    """Status and reason of a folder without a manifest, by the names in it."""
    others = sorted(name for name in names if not is_ours(name))
    if any(_INDEX.fullmatch(name) for name in names):
        return "uncommitted", UNCOMMITTED
    if foreign := _foreign_in(names):
        kind, file = foreign
        return "uncommitted", f"no {MANIFEST_NAME}, but {file}: it looks like {kind}, {NOT_OURS}"
    if len(others) == len(names):
        return "partial", f"{LEFTOVER_OF_OTHERS} ({others[0]})"
    return "uncommitted", UNCOMMITTED


def _unusable(
    storage: Storage,
    name: str,
    manifest: CheckpointManifest | None,
    step: int,
    error: CheckpointError,
) -> CheckpointInfo:
    url = storage.at(name)
    try:
        entries = storage.list(name)
    except StorageError:
        entries = []
    if isinstance(error, CheckpointCorrupt) and manifest is None and attempts_among(entries):
        return CheckpointInfo(name, url, "partial", step, "an attempt that was not finished")
    pinned = any(entry.name == PIN_NAME for entry in entries)
    status = "damaged"
    if isinstance(error, UnsupportedVersion):
        status = "unsupported"
    elif isinstance(error, StorageError) and error.errno not in (
        errno.EIO,
        errno.EISDIR,
        errno.EINVAL,
    ):
        status = "unreadable"
    step = manifest.step if manifest else step
    return CheckpointInfo(name, url, status, step, str(error), manifest, pinned=pinned)


@cache
def _machine() -> str:
    """8 hex digits for this boot of this machine and its process ids (containers number theirs
    afresh)."""
    parts = [socket.gethostname()]
    if os.path.exists("/proc/sys/kernel/random/boot_id"):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    if os.path.exists("/proc/self/ns/pid"):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return content_digest("|".join(parts).encode())[:8]


def _started(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; "0" where the system does not tell; None
    when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else fields[19]
    except (OSError, IndexError):
        if os.path.exists("/proc/self/stat"):
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return "0"


@lru_cache(maxsize=64)
def _run(run_id: str) -> str:
    """8 hex digits for a run. The id may be one that another program has written."""
    return content_digest(run_id.encode("utf-8", "surrogatepass"))[:8]


_numbers = itertools.count(1)
_in_flight: set[str] = set()


@contextmanager
def in_flight(attempt: str) -> Iterator[None]:
    """While it lasts, this process does not take the attempt for abandoned."""
    _in_flight.add(attempt)
    try:
        yield
    finally:
        _in_flight.discard(attempt)


@dataclass(frozen=True, slots=True)
class Attempt:
    """Who tries to write a checkpoint: run, machine and process, so that leftovers can be told from
    work in progress."""

    run: str
    machine: str
    pid: int
    started: str
    number: int

    @classmethod
    def new(cls, run_id: str) -> Attempt:
        pid = os.getpid()
        run = _run(run_id)
        return cls(run, _machine(), pid, _started(pid) or "0", next(_numbers))

    @classmethod
    def parse(cls, text: str) -> Attempt:
        parts = text.split("-")
        if len(parts) != 5 or not (parts[2].isdecimal() and parts[4].isdecimal()):
            return cls("", "", 0, "", 0)
        return cls(parts[0], parts[1], int(parts[2]), parts[3], int(parts[4]))

    def __str__(self) -> str:
        return f"{self.run}-{self.machine}-{self.pid}-{self.started}-{self.number}"

    def is_abandoned(self, run_id: str) -> bool:
        """True when nobody can still be writing: its process is gone, or is this one and has moved
        on; from another machine, only when it belongs to this very run, which has one job at a
        time."""
        if self.machine != _machine():
            return self.run == _run(run_id)
        if self.pid == os.getpid() and self.started == (_started(self.pid) or "0"):
            return str(self) not in _in_flight
        return _started(self.pid) != self.started


def mark_name(attempt: str) -> str:
    return f"attempt.{attempt}.partial"


def attempts_among(entries: Iterable[Entry] | None) -> list[str]:
    """Whose attempts are in a folder, by their marks; nobody's in one that is gone. A folder with
    the name of a mark is none of ours."""
    marks = [_MARKER.fullmatch(entry.name) for entry in entries or () if not entry.is_folder]
    return [mark.group(1) for mark in marks if mark]


def mark_attempt(
    storage: Storage, folder: str, attempt: str, user_files: Sequence[str] = ()
) -> None:
    """Say in `folder`, which it makes, that what is there is an attempt, until the marks are
    removed. user_files: names that the attempt gives to files beside those of the format."""
    for again in (False, True):
        try:
            storage.make_folder(folder)
            storage.write(join(folder, mark_name(attempt)), "\n".join(user_files).encode())
            return
        except StorageError as error:
            # While it was empty it looked like what an interrupted deletion leaves, and another job
            # may have swept it.
            if error.errno != errno.ENOENT or again:
                raise


def user_files_in(storage: Storage, folder: str, entries: Iterable[Entry]) -> set[str]:
    """The names that the attempts and the checkpoint in a folder have for files of the user."""
    listed, named = [*entries], set()
    for attempt in attempts_among(listed):
        mark = next(entry for entry in listed if entry.name == mark_name(attempt))
        if mark.size:
            with suppress(StorageError, UnicodeDecodeError):
                text = storage.read(join(folder, mark.name), SIZE_LIMIT).decode()
                named.update(text.split("\n"))
    there = {entry.name for entry in listed}
    for file in (MANIFEST_NAME, WITHDRAWN_NAME):
        if file in there:
            with suppress(StorageError, CheckpointCorrupt, UnsupportedVersion):
                named.update(_manifest_in(storage, folder, file).user_files)
    return named & {entry.name for entry in listed if not entry.is_folder}


def unmark_attempts(storage: Storage, folder: str) -> None:
    for attempt in attempts_among(storage.entries(folder)):
        storage.remove(join(folder, mark_name(attempt)))


def pin_checkpoint(storage: Storage, folder: str) -> None:
    """Keep retention from deleting a checkpoint. Raises CheckpointNotFound when it was deleted
    meanwhile, StorageError."""
    made = True
    try:
        storage.write(join(folder, PIN_NAME), b"")
        storage.sync_folder(folder)
    except StorageError as error:
        if error.errno not in (errno.EEXIST, errno.ENOENT):
            raise
        made = error.errno != errno.EEXIST
    try:
        read_manifest(storage, folder)
    except CheckpointNotFound:
        if made:  # one that was there says that somebody wants what is left
            storage.remove(join(folder, PIN_NAME))
            remove_if_empty(storage, folder)
        raise


def unpin_checkpoint(storage: Storage, folder: str) -> None:
    storage.remove(join(folder, PIN_NAME))
    storage.sync_folder(folder)


def delete_checkpoint(storage: Storage, folder: str) -> None:
    """Withdraw the manifest, then remove the files that it names, then the folder if nothing
    foreign is in it.

    Killed anywhere, it leaves the checkpoint whole or a folder that `sweep` finishes. Raises
    InvalidState when it is pinned by now, StorageError, CheckpointCorrupt when the manifest cannot
    say which files are the checkpoint's.
    """
    if any(entry.name == PIN_NAME for entry in (storage.entries(folder) or ())):
        raise InvalidState(f"{storage.at(folder)} is pinned; unpin it before it is deleted")
    _withdraw(storage, folder)
    finish_deletion(storage, folder)


def delete_for_good(storage: Storage, folder: str) -> None:
    """Delete a checkpoint, and before it what overwrites have put aside and could not remove: that
    counts as soon as the checkpoint has gone, and would come back. Raises what `delete_checkpoint`
    raises."""
    root, _, name = folder.rpartition("/")
    for entry in storage.entries(root) or ():
        if entry.name.startswith(f"{name}.replaced-"):
            remove_checkpoint_folder(storage, join(root, entry.name))
    delete_checkpoint(storage, folder)


def _withdraw(storage: Storage, folder: str) -> None:
    try:
        storage.rename(join(folder, MANIFEST_NAME), join(folder, WITHDRAWN_NAME))
        storage.sync_folder(folder)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise


def finish_deletion(storage: Storage, folder: str) -> None:
    """The rest of a deletion. Touches no manifest that counts, whatever another job has put there
    meanwhile."""
    storage.remove(join(folder, PIN_NAME))
    try:
        manifest = _manifest_in(storage, folder, WITHDRAWN_NAME)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
    else:
        # That one says what is left to do, and goes last.
        storage.remove_all(
            [join(folder, name) for name in manifest.files.keys() - {WITHDRAWN_NAME}]
        )
        unmark_attempts(storage, folder)
        try:  # before what says which files are to go is gone: nobody would finish the deletion
            storage.sync_folder(folder)
        except StorageError as error:
            if error.errno != errno.ENOENT:  # somebody else has finished it
                raise
        storage.remove(join(folder, WITHDRAWN_NAME))
    remove_if_empty(storage, folder)


def remove_checkpoint_folder(storage: Storage, folder: str) -> None:
    """Remove a folder that no longer counts: by its manifest where that verifies, then what is left
    and named like ours."""
    try:
        _withdraw(storage, folder)
        finish_deletion(storage, folder)
    except CheckpointCorrupt:
        pass
    remove_attempt(storage, folder)


def remove_attempt(storage: Storage, folder: str, *, keep_marks: bool = False) -> None:
    """Remove an attempt that was never published: our files in it, the manifest first and marks
    last, then the folder.

    keep_marks: ranks may go on writing there for a while; by the mark a later `sweep` knows whose
    their files are.
    """
    entries = storage.entries(folder) or ()
    names = [entry.name for entry in entries if not entry.is_folder and is_ours(entry.name)]
    marks = [name for name in names if _MARKER.fullmatch(name)]
    of_user = sorted(user_files_in(storage, folder, entries))
    if marks:
        names += of_user
    else:  # what says that they are ours goes after them
        storage.remove_all([join(folder, name) for name in of_user])
    if MANIFEST_NAME in names:
        storage.remove(join(folder, MANIFEST_NAME))
    storage.remove_all(
        [join(folder, name) for name in sorted({*names}.difference(marks, [MANIFEST_NAME]))]
    )
    # Without the mark, what is still there would count as a checkpoint that lost its manifest.
    storage.remove_all([] if keep_marks else [join(folder, name) for name in marks])
    remove_if_empty(storage, folder)


def remove_if_empty(storage: Storage, folder: str) -> None:
    try:
        storage.remove_folder(folder)
    except StorageError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def new_attempt(run_id: str) -> str:
    """This process tries once more to write a checkpoint of the run."""
    return str(Attempt.new(run_id))
