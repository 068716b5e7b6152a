"""The checkpoints of one root: which exist, which is newest, how one is withdrawn, what leftovers
may be swept.

A checkpoint exists if and only if its manifest is there and verifies; names, times and listing
order decide nothing. Folder names only say where to look:

checkpoint-500                      a checkpoint (or, without a manifest, what became of one)
checkpoint-500.partial-<attempt>    an attempt that was not published
checkpoint-500.replaced-<attempt>   the one that an overwrite put aside; it counts while
checkpoint-500 does not
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .attempts import Attempt
from .errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    InvalidState,
    StorageError,
    UnsupportedVersion,
)
from .format.manifest import MANIFEST_NAME, SIZE_LIMIT, CheckpointManifest
from .storage.base import Entry, Storage, open_storage

__all__ = [
    "CheckpointInfo",
    "checkpoint_name",
    "checkpoints_in",
    "committed",
    "delete_checkpoint",
    "is_ours",
    "newest_run",
    "read_manifest",
    "scan",
    "scan_root",
    "still_there",
    "sweep",
]

WITHDRAWN_NAME = "checkpoint_manifest.withdrawn.json"
# In a checkpoint's folder, so that a copy of it is pinned too.
PIN_NAME = "checkpoint.pinned"
# How often a root that changes while it is looked at is looked at again.
LOOKS = 300
DELETING = "a deletion that was not finished"
NOT_OURS = "not like a checkpoint of ckptcore"
UNCOMMITTED = f"no {MANIFEST_NAME}: it was never committed, or damaged"
LEFTOVER_OF_OTHERS = (
    "no checkpoint: it was deleted or never there, and somebody else's files are in its folder"
)
# Where folders cannot be renamed, an attempt is built in its final place; this object says whose it
# is until it is one.
_MARKER = re.compile(r"attempt\.([A-Za-z0-9_.-]+)\.partial")
_FOLDER = re.compile(r"checkpoint-(0|[1-9][0-9]*)(?:\.(partial|replaced)-([A-Za-z0-9_.-]+))?")
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


Ranges = Sequence[Sequence[int]]  # [first, last] commit sequences


@dataclass(frozen=True, slots=True, repr=False)
class CheckpointInfo:
    """One entry of a root; as text it is one line. `status` is "committed", "uncommitted" (no
    manifest), "damaged" (it does not verify, or a listed file is missing or of another size),
    "unsupported" (of a newer format), "unreadable" (the storage refuses), "partial" (an attempt,
    overwrite or deletion not finished) or "elsewhere" (see ranks/nodes.py)."""

    name: str
    url: str
    status: str
    step: int | None = None
    reason: str | None = None
    manifest: CheckpointManifest | None = None
    marked: bool = False  # the commit went through, and the mark of the attempt is still there
    # Somebody asked for it to stay, whatever its status; retention and `delete` leave it alone.
    pinned: bool = False
    # The run went back behind it and saved again: never the newest or the best. See
    # `mark_abandoned`.
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
    def created(self) -> str | None:
        return self.manifest.created if self.manifest else None

    @property
    def metrics(self) -> dict[str, float]:
        return self.manifest.metrics if self.manifest else {}

    @property
    def order(self) -> tuple[int, int]:
        return (-1 if self.step is None else self.step, self.sequence or 0)


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


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
        data = storage.read(join(folder, MANIFEST_NAME), SIZE_LIMIT)
    except StorageError as error:
        if error.errno in (errno.EISDIR, errno.EINVAL):
            raise CheckpointCorrupt(
                str(error), path=storage.at(folder), file=MANIFEST_NAME, kind="format"
            ) from None
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        where = storage.at(folder)
        raise CheckpointNotFound(
            f"{where}: no checkpoint here (no {MANIFEST_NAME})", path=where
        ) from None
    return CheckpointManifest.decode(data, storage.at(folder))


def checkpoints_in(storage: Storage, folder: str, most: int = 5) -> list[str]:
    """What looks like checkpoints in a folder that is none itself, the newest few of them, for a
    message."""
    try:
        found = [
            match
            for e in entries_in(storage, folder)
            if e.is_folder and (match := _FOLDER.fullmatch(e.name))
        ]
    except StorageError:
        return []
    whole = sorted((int(match[1]), match[0]) for match in found if match[2] is None)
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


def scan(
    storage: Storage, *, sure: bool = False, known: Iterable[CheckpointInfo] = ()
) -> list[CheckpointInfo]:
    """Every checkpoint-like entry, ordered by (step, commit sequence). A root that does not exist
    has none.

    Somebody else may save and delete meanwhile, and a listing may take its time: an entry that is
    gone, or on its way out, when it is looked at proves that the listing is out of date, so the
    root is listed again until nothing new is in it.
    sure: list it a second time where none is committed, for callers that conclude something from
    that.
    known: committed checkpoints that are taken as they are where their names are still there,
    without reading them again. Raises StorageError, also where the root changes faster than it can
    be looked at.
    """
    found = {info.name: info for info in known if info.status == "committed"}
    before: set[str] = set()
    lost_before: set[str] = set()
    for again in range(LOOKS):
        listed = _checkpoint_folders(storage)
        found = {name: info for name, info in found.items() if name in listed}
        new = [name for name in listed if name not in found]
        for name in sorted(new, key=_newest_first):  # these are the first that others replace
            info = _look(storage, name, listed[name])
            if info is not None:
                found[name] = info
        lost = listed.keys() - found.keys()
        fading = [name for name in new if name in found and found[name].reason == DELETING]
        if again == 0:
            none = not any(info.status == "committed" for info in found.values())
            settled = not (lost or fading or (sure and none))
        else:
            settled = not (lost or fading) or (listed.keys() <= before and lost <= lost_before)
        if settled:
            return _in_order(found)
        before, lost_before = set(listed), lost
    newest = max(
        (info.order for info in found.values() if info.status == "committed"), default=None
    )
    if newest is None or any(_step_of(name) >= newest[0] for name in lost_before):
        what = (
            f"{storage.url} changes faster than it can be looked at: after {LOOKS} looks its "
            "newest checkpoint is not known"
        )
        raise StorageError(what, path=storage.url, errno=errno.EAGAIN)
    return _in_order(found)


def _checkpoint_folders(storage: Storage) -> dict[str, Sequence[Entry] | None]:
    try:
        folders = storage.list_folders("checkpoint-")
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        return {}
    return {name: listed for name, listed in folders.items() if _FOLDER.fullmatch(name)}


def _step_of(name: str) -> int:
    match = _FOLDER.fullmatch(name)
    return -1 if match is None else int(match.group(1))


def _newest_first(name: str) -> tuple[int, str]:
    return -_step_of(name), name


def _in_order(found: dict[str, CheckpointInfo]) -> list[CheckpointInfo]:
    whole = {name for name, info in found.items() if info.status == "committed"}
    result = []
    for info in found.values():
        base = info.name.partition(".replaced-")[0]
        if base != info.name and base in whole:
            info = CheckpointInfo(
                info.name,
                info.url,
                "partial",
                info.step,
                "left over from an overwrite",
                info.manifest,
            )
        result.append(info)
    return mark_abandoned(sorted(result, key=lambda info: (*info.order, info.name)))


def with_commit(infos: Iterable[CheckpointInfo], saved: CheckpointInfo) -> list[CheckpointInfo]:
    """The entries of `scan` when `saved` has come to them, or has taken the place of one."""
    return _in_order({**{info.name: info for info in infos}, saved.name: saved})


def mark_abandoned(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """The same with `abandoned` set: what the run had gone back behind, by the last commit of
    it."""
    infos = list(infos)
    last = {
        run: left_by_last(infos, run) for run in {info.run_id for info in infos if info.manifest}
    }
    result = []
    for info in infos:
        left = info.manifest is not None and within(info.manifest.sequence, last[info.run_id])
        result.append(info if info.abandoned == left else replace(info, abandoned=left))
    return result


def left_by_last(infos: Iterable[CheckpointInfo], run_id: str | None) -> Ranges:
    """The commit sequences that a run had abandoned when it committed last."""
    counted = [
        i
        for i in infos
        if i.manifest and i.run_id == run_id and i.status in ("committed", "damaged")
    ]
    last = max(counted, key=lambda info: info.sequence or 0, default=None)
    return last.manifest.abandoned if last and last.manifest else []


def within(sequence: int, ranges: Ranges) -> bool:
    return any(first <= sequence <= last for first, last in ranges)


def left_by_going_back(origin: int, before: Ranges, last: int) -> list[list[int]]:
    """What a run has abandoned that goes on from the commit `origin`, which itself had abandoned
    `before`, when there are commits up to `last`. Others that are made later are of another job."""
    ranges = [[first, min(end, origin)] for first, end in before if first <= origin]
    return merged([*ranges, [origin + 1, last]] if last > origin else ranges)


def merged(ranges: Ranges) -> list[list[int]]:
    """The same sequences in as few ranges as can be, in order."""
    result: list[list[int]] = []
    for first, last in sorted(map(tuple, ranges)):
        if result and first <= result[-1][1] + 1:
            result[-1][1] = max(result[-1][1], last)
        else:
            result.append([first, last])
    return result


def still_there(storage: Storage, folder: str, manifest: CheckpointManifest | None) -> bool:
    """Whether `folder` still holds the commit of `manifest`: neither deleted nor replaced since
    that was read."""
    try:
        return manifest is not None and read_manifest(storage, folder).digest == manifest.digest
    except CheckpointNotFound:
        return False
    except (CheckpointCorrupt, UnsupportedVersion, StorageError):
        return True  # what is wrong with it is another matter


def _look(
    storage: Storage, name: str, listed: Sequence[Entry] | None = None
) -> CheckpointInfo | None:
    """What an entry of a root is; None when it is gone, or another one by now."""
    match = _FOLDER.fullmatch(name)
    assert match is not None
    step, kind, url = int(match.group(1)), match.group(2), storage.at(name)
    if kind == "partial":
        return CheckpointInfo(name, url, "partial", step, "an attempt that was not published")
    manifest = None
    try:
        manifest = read_manifest(storage, name)
        names = check_files(storage, name, manifest, listed)
    except CheckpointNotFound:
        return _without_manifest(storage, name, step)
    except (CheckpointCorrupt, UnsupportedVersion, StorageError) as error:
        if manifest is not None and not still_there(storage, name, manifest):
            return None  # its files went after its manifest: a deletion, no damage
        return _unusable(storage, name, manifest, step, error)
    marked = any(_MARKER.fullmatch(found) for found in names)
    return CheckpointInfo(
        name, url, "committed", manifest.step, None, manifest, marked, PIN_NAME in names
    )


def _is_readable(storage: Storage, path: str) -> bool:
    try:
        storage.open(path).close()
    except StorageError:
        return False
    return True


def _without_manifest(storage: Storage, name: str, step: int) -> CheckpointInfo | None:
    url = storage.at(name)
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
    if WITHDRAWN_NAME in names or names <= {PIN_NAME}:
        return CheckpointInfo(name, url, "partial", step, DELETING)
    status, reason = _what_it_holds(names)
    return CheckpointInfo(name, url, status, step, reason, pinned=PIN_NAME in names)


def _what_it_holds(names: set[str]) -> tuple[str, str]:
    """Status and reason of a folder without a manifest, by the names in it."""
    others = sorted(name for name in names if not is_ours(name))
    if any(_INDEX.fullmatch(name) for name in names):
        return "uncommitted", UNCOMMITTED
    for what, pattern in _FOREIGN:
        if found := sorted(name for name in names if pattern.fullmatch(name)):
            return (
                "uncommitted",
                f"no {MANIFEST_NAME}, but {found[0]}: it looks like {what}, {NOT_OURS}",
            )
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


def scan_root(
    url: str | os.PathLike[str], storage_options: dict[str, Any] | None = None
) -> list[CheckpointInfo]:
    """`scan` of the root at `url`. Raises CheckpointNotFound when there is no such folder,
    StorageError."""
    storage = open_storage(url, storage_options)
    try:
        storage.list()
    except StorageError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise CheckpointNotFound(f"{storage.url}: no such folder", path=storage.url) from None
        raise
    return scan(storage, sure=True)


def newest_run(infos: Iterable[CheckpointInfo]) -> str | None:
    """The run that committed last in this root, by commit sequence; also when what it committed is
    damaged now."""
    last = max(
        (i for i in infos if i.manifest), key=lambda i: (i.sequence or 0, *i.order), default=None
    )
    return last.run_id if last else None


def committed(infos: Iterable[CheckpointInfo], run_id: str | None) -> list[CheckpointInfo]:
    """The committed checkpoints of one run that it has not abandoned, oldest first; of all runs
    with None."""
    return [
        i
        for i in infos
        if i.status == "committed" and not i.abandoned and run_id in (None, i.run_id)
    ]


def mark_name(attempt: str) -> str:
    return f"attempt.{attempt}.partial"


def attempts_among(entries: Iterable[Entry]) -> list[str]:
    """Whose attempts are in a folder, by their marks. A folder with the name of a mark is none of
    ours."""
    marks = [_MARKER.fullmatch(entry.name) for entry in entries if not entry.is_folder]
    return [mark.group(1) for mark in marks if mark]


def entries_in(storage: Storage, folder: str) -> list[Entry]:
    """What lies in a folder; nothing in one that is gone."""
    try:
        return storage.list(folder)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        return []


def mark_attempt(storage: Storage, folder: str, attempt: str) -> None:
    """Say in `folder`, which it makes, that what is there is an attempt, until the marks are
    removed."""
    try:
        storage.make_folder(folder)
        storage.write(join(folder, mark_name(attempt)), b"")
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        # While it was empty it looked like what an interrupted deletion leaves, and another job has
        # swept it.
        storage.make_folder(folder)
        storage.write(join(folder, mark_name(attempt)), b"")


def unmark_attempts(storage: Storage, folder: str) -> None:
    for attempt in attempts_among(entries_in(storage, folder)):
        storage.remove(join(folder, mark_name(attempt)))


def pin_checkpoint(storage: Storage, folder: str) -> None:
    """Mark a checkpoint as one that stays. Raises CheckpointNotFound when it was deleted meanwhile,
    StorageError."""
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
    if any(entry.name == PIN_NAME for entry in entries_in(storage, folder)):
        raise InvalidState(f"{storage.at(folder)} is pinned; unpin it before it is deleted")
    _withdraw(storage, folder)
    _finish_deletion(storage, folder)


def _withdraw(storage: Storage, folder: str) -> None:
    try:
        storage.rename(join(folder, MANIFEST_NAME), join(folder, WITHDRAWN_NAME))
        storage.sync_folder(folder)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise


def _finish_deletion(storage: Storage, folder: str) -> None:
    """The rest of a deletion. Touches no manifest that counts, whatever another job has put there
    meanwhile."""
    storage.remove(join(folder, PIN_NAME))
    try:
        manifest = CheckpointManifest.decode(
            storage.read(join(folder, WITHDRAWN_NAME), SIZE_LIMIT), storage.at(folder)
        )
    except StorageError as error:
        if error.errno in (
            errno.EISDIR,
            errno.EINVAL,
        ):  # no file, so no manifest: what is ours goes by its name
            raise CheckpointCorrupt(
                str(error), path=storage.at(folder), file=WITHDRAWN_NAME, kind="format"
            ) from None
        if error.errno != errno.ENOENT:
            raise
    else:
        # That one says what is left to do, and goes last.
        storage.remove_all(
            [join(folder, name) for name in manifest.files.keys() - {WITHDRAWN_NAME}]
        )
        if not storage.atomic_rename:
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
        _finish_deletion(storage, folder)
    except CheckpointCorrupt:
        pass
    remove_attempt(storage, folder)


def remove_attempt(storage: Storage, folder: str, *, keep_marks: bool = False) -> None:
    """Remove an attempt that was never published: our files in it, the manifest first and marks
    last, then the folder.

    keep_marks: ranks may go on writing there for a while; by the mark a later `sweep` knows whose
    their files are.
    """
    names = [
        entry.name
        for entry in entries_in(storage, folder)
        if not entry.is_folder and is_ours(entry.name)
    ]
    marks = [name for name in names if _MARKER.fullmatch(name)]
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


def sweep(
    storage: Storage, infos: Iterable[CheckpointInfo], run_id: str, tell: Callable[[str], None]
) -> list[str]:
    """Finish deletions and overwrites that were interrupted, and remove attempts that are provably
    abandoned.

    Returns the names removed. What cannot be removed is told, and no error.
    """
    swept = []
    for info in infos:
        match = _FOLDER.fullmatch(info.name)
        if match is None or (
            info.status != "partial" and match.group(2) != "replaced" and not info.marked
        ):
            continue
        kind, attempt = match.group(2), match.group(3)
        if (info.reason or "").startswith(LEFTOVER_OF_OTHERS):
            continue
        try:
            if info.marked and kind is None:
                unmark_attempts(storage, info.name)
                continue
            if info.status == "committed":
                # An overwrite died between its two renames: what it put aside takes its place
                # again.
                if Attempt.parse(attempt).is_abandoned(run_id):
                    storage.rename(info.name, info.name.partition(".replaced-")[0])
                    storage.sync_folder("")
                continue
            if kind == "replaced":
                remove_checkpoint_folder(storage, info.name)
            else:
                attempts = [attempt] if kind else attempts_among(entries_in(storage, info.name))
                if not all(Attempt.parse(attempt).is_abandoned(run_id) for attempt in attempts):
                    continue
                # Looked at after the marks: what another job has committed since the scan is no
                # leftover.
                there = _look(storage, info.name)
                if there is None or there.status != "partial":
                    continue
                try:
                    (remove_attempt if attempts else _finish_deletion)(storage, info.name)
                except (
                    CheckpointCorrupt
                ):  # of the withdrawn manifest: what is left goes by its name
                    remove_attempt(storage, info.name)
            swept.append(info.name)
        except (StorageError, CheckpointCorrupt) as error:
            tell(f"could not remove leftovers {info.url}: {error}")
    return swept
