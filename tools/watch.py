"""`ckpt watch`: the checkpoints of a root as they are committed, with the seconds that each
phase took."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from json import dumps
from textwrap import wrap
from typing import Any

import click

from ckptcore import CheckpointInfo, StorageError, masked_url, open_storage, restore_candidates

from . import facts
from .cli import LOCATION, SCHEMA, command, number
from .failures import BAD, GOOD, not_found
from .lookup import Options, normal, scan
from .render import NARROW, Report, Screen, for_programs, metrics, printable, seconds, size, strict

Listing = dict[str, tuple[str, str]]  # status, and digest of the manifest, by name
GONE = "what it was built in is gone, and no checkpoint of it is there: the save failed"
NOTHING = "there is no checkpoint yet"
COLOURS = {"committed": "green", "writing": "cyan", "deleted": "yellow", "waiting": "yellow"}
FAILURES = ("damaged", "failed", "unreachable")


@command("ckpt watch runs/a", "ckpt watch s3://bucket/run --interval 30 --json")
@click.argument("root", type=LOCATION)
@number("--interval", 0.01, "Seconds between looks.", default=2.0)
@number("--timeout", 0.0, "Seconds after which it ends.")
@number("--events", 1, "How many events to wait for.")
def watch_command(
    root: str, interval: float, timeout: float | None, events: int | None, options: Options
) -> Report:
    """Follow a run: a line for each checkpoint that is committed in ROOT, with the seconds of each
    phase of the save, and for each that is begun, deleted or damaged. Until Ctrl-C.

    Exits with 1 where the last event was a failure."""
    if not root:
        raise not_found("the path is empty", path=root)
    url, last, screen = normal(root), "", Screen.of(sys.stdout)
    for seen, event in enumerate(events_of(url, options, interval, timeout), 1):
        if for_programs():
            line = dumps(strict({"schema": SCHEMA, **event}), allow_nan=False)
        else:
            line = text_of(event, screen)
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        last = event["event"]
        if events is not None and seen >= events:
            break
    return Report({}, [], BAD if last in FAILURES else GOOD)


def events_of(
    url: str, options: Options, interval: float, timeout: float | None
) -> Iterator[dict[str, Any]]:
    """As they are seen. The root may not be there yet."""
    end = None if timeout is None else time.monotonic() + timeout
    names: Any = None
    before: Listing | None = None
    last: CheckpointInfo | None = None
    unreachable = ""
    while True:
        infos = None
        try:
            listed = listing(url, options)
            # The manifests are read again only when something is new in the listing.
            infos = scan(url, options) if listed != names or None in listed.values() else None
            names, unreachable = listed, ""
        except StorageError as error:
            if str(error) != unreachable:
                unreachable = str(error)
                yield _event(url, "unreachable", reason=unreachable)
        if infos is not None:
            now = {i.name: (i.status, i.manifest.digest if i.manifest else "") for i in infos}
            if before is None and not infos:
                yield _event(url, "waiting", reason=NOTHING)
            for event, info in changes(before, now, infos):
                yield _event(url, event, info, last, info.reason)
                last = info if event == "committed" else last
            for name in sorted((before or {}).keys() - now.keys()):
                if became := gone(name, (before or {})[name][0], now):
                    why = GONE if became == "failed" else None
                    yield _event(url, became, reason=why) | {"name": name}
            before = now
        if end is not None and time.monotonic() + interval > end:
            return
        time.sleep(interval)


def listing(url: str, options: Options) -> dict[str, Any]:
    """Names and sizes by folder; None where the storage cannot say them."""
    try:
        found = open_storage(url, options).list_folders("checkpoint-")
    except StorageError as error:
        if error.errno != 2:
            raise
        return {}
    return {name: e and [(entry.name, entry.size) for entry in e] for name, e in found.items()}


def gone(name: str, status: str, now: Listing) -> str | None:
    """What it means that `name` is there no more; None: it has become a checkpoint."""
    if status != "partial":
        return "deleted"
    became = now.get(name.partition(".partial-")[0])
    return None if became is not None and became[0] == "committed" else "failed"


def changes(
    before: Listing | None, now: Listing, infos: list[CheckpointInfo]
) -> Iterator[tuple[str, CheckpointInfo]]:
    """What is new. At first what `restore` would take, and what is not committed."""
    usable = (info for info in restore_candidates(infos) if info.status == "committed")
    latest = next(usable, None)
    for info in infos:
        if before is None:
            if info.status == "committed" and info is not latest:
                continue
        elif before.get(info.name) == now[info.name]:
            continue
        yield {"committed": "committed", "partial": "writing"}.get(info.status, "damaged"), info


def _event(
    url: str,
    event: str,
    info: CheckpointInfo | None = None,
    last: CheckpointInfo | None = None,
    reason: str | None = None,
) -> dict[str, Any]:
    manifest = info.manifest if info else None
    timings = dict(manifest.timings) if manifest else {}
    took = sum(timings.values())
    steps = None
    if event == "committed" and info and last and last.run_id == info.run_id:
        steps = (info.step or 0) - (last.step or 0)
    return {
        "event": event,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "root": masked_url(url),
        **{name: getattr(info, name, None) for name in ("name", "step", "run_id", "size_bytes")},
        "steps_since": steps,
        "seconds": round(took, 6) if timings else None,
        "bytes_per_second": round((info.size_bytes or 0) / took) if took and info else None,
        "timings": timings,
        "slowest": facts.slowest(manifest) if manifest else {},
        "metrics": dict(info.metrics) if info else {},
        "reason": reason,
    }


def text_of(event: dict[str, Any], screen: Screen) -> str:
    """One line, which goes on below where the terminal ends. Of the phases of a save those that
    took a hundredth of it, and of the slowest ranks those that were a twentieth of it later than
    rank 0."""
    kind, took, phases = event["event"], event["seconds"], event["timings"]
    words = [(event["name"] or "").partition(".partial-")[0]]
    if kind == "committed":
        words.append(f"+{event['steps_since']} steps" if event["steps_since"] else "")
        words.append(size(event["size_bytes"]))
        if took:
            words[-1] += f" in {took:.3g} s, {size(event['bytes_per_second'])}/s"
            words.append(seconds({n: value for n, value in phases.items() if value >= took / 100}))
            late = [
                f"{phase} {found['seconds']:.3g}s on rank {found['rank']}"
                for phase, found in event["slowest"].items()
                if found["rank"] and found["seconds"] > phases.get(phase, 0.0) + took / 20
            ]
            words.append(f"slowest: {', '.join(late)}" if late else "")
        words.append(metrics(event["metrics"]))
    elif kind != "writing":
        words.append(event["reason"] or "")
    text = f"{event['time'][11:19]}  {screen.styled(f'{kind:9}', COLOURS.get(kind, 'red'))}"
    indent = column = len("00:00:00  committed")
    for word in map(printable, filter(None, words)):
        column += 2 + len(word)
        if screen.width and column > screen.width:
            room = max(NARROW, screen.width - indent - 2)
            lines = wrap(word, room, break_long_words=False, break_on_hyphens=False) or [""]
            text += "".join(f"\n{' ' * indent}  {line}" for line in lines)
            column = indent + 2 + len(lines[-1])
        else:
            text += f"  {word}"
    return text
