"""`ckpt watch`: the checkpoints of a root as they are committed, with the seconds that each
phase took."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from json import dumps
from typing import Any

import click

from ckptcore import CheckpointInfo, StorageError, masked_url, open_storage, restore_candidates

from . import facts
from .cli import LOCATION, SCHEMA, command
from .failures import BAD, GOOD, not_found
from .lookup import normal, scan
from .output import coloured, for_programs
from .render import Report, metrics, printable, seconds, size, strict
from .subject import Options

Seen = dict[str, tuple[str, str]]


@command("ckpt watch runs/a", "ckpt watch s3://bucket/run --interval 30 --json")
@click.argument("root", type=LOCATION)
@click.option(
    "--interval",
    type=click.FloatRange(0.01),
    default=2.0,
    help="Seconds between looks (default 2).",
)
@click.option("--timeout", type=click.FloatRange(0), help="Seconds after which it ends.")
@click.option("--events", type=click.IntRange(1), help="How many events to wait for.")
def watch_command(
    root: str, interval: float, timeout: float | None, events: int | None, options: Options
) -> Report:
    """Follow a run: a line for each checkpoint that is committed in ROOT, with the seconds of each
    phase of the save, and for each that is begun, deleted or damaged. Until Ctrl-C.

    Exits with 1 where the last event was a failure."""
    if not root:
        raise not_found("the path is empty", path=root)
    url, last = normal(root), ""
    for number, event in enumerate(happenings(url, options, interval, timeout), 1):
        if for_programs():
            line = dumps(strict({"schema": SCHEMA, **event}), allow_nan=False)
        else:
            line = text_of(event)
        click.echo(line, color=coloured(sys.stdout))
        last = event["event"]
        if events is not None and number >= events:
            break
    return Report({}, [], BAD if last in ("damaged", "failed", "unreachable") else GOOD)


def happenings(
    url: str, options: Options, interval: float, timeout: float | None
) -> Iterator[dict[str, Any]]:
    """Events as they are seen. The root may not be there yet."""
    end = None if timeout is None else time.monotonic() + timeout
    names: Any = None
    before: Seen | None = None
    last: CheckpointInfo | None = None
    unreachable = ""
    while True:
        try:
            storage = open_storage(url, options)
            listed = {
                name: None if entries is None else [(e.name, e.size) for e in entries]
                for name, entries in folders(storage).items()
            }
            # The manifests are read again only when something is new in the listing.
            infos = scan(url, options) if listed != names or None in listed.values() else None
            names, unreachable = listed, ""
        except StorageError as error:
            infos = None
            if str(error) != unreachable:
                unreachable = str(error)
                yield _event("unreachable", None, None, unreachable, url)
        if infos is not None:
            now = {info.name: (info.status, _digest(info)) for info in infos}
            for event, info in changes(before, now, infos):
                yield _event(event, info, last, info.reason, url)
                last = info if event == "committed" else last
            if before is not None:
                for name in sorted(before.keys() - now.keys()):
                    if became := gone(name, before[name][0], now):
                        why = GONE if became == "failed" else None
                        yield {**_event(became, None, None, why, url), "name": name}
            before = now
        if end is not None and time.monotonic() + interval > end:
            return
        time.sleep(interval)


GONE = "what it was built in is gone, and no checkpoint of it is there: the save failed"


def gone(name: str, status: str, now: Seen) -> str | None:
    """What it means that `name` is there no more; None: it has become a checkpoint."""
    if status != "partial":
        return "deleted"
    became = now.get(name.partition(".partial-")[0])
    return None if became is not None and became[0] == "committed" else "failed"


def folders(storage: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] = storage.list_folders("checkpoint-")
    except StorageError as error:
        if error.errno != 2:
            raise
        return {}
    return found


def _digest(info: CheckpointInfo) -> str:
    return info.manifest.digest if info.manifest else ""


def changes(
    before: Seen | None, now: Seen, infos: list[CheckpointInfo]
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
    event: str,
    info: CheckpointInfo | None,
    last: CheckpointInfo | None,
    reason: str | None,
    url: str,
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


def _late(event: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Phases that took another rank than rank 0 a twentieth of the save longer."""
    took, timings = event["seconds"], event["timings"]
    return [
        (phase, found)
        for phase, found in event["slowest"].items()
        if found["rank"] and found["seconds"] > timings.get(phase, 0.0) + took / 20
    ]


COLOURS = {"committed": "green", "writing": "cyan", "deleted": "yellow"}


def text_of(event: dict[str, Any]) -> str:
    """One line; of the phases of a save those that took a hundredth of it."""
    kind, took = event["event"], event["seconds"]
    name = printable((event["name"] or "").partition(".partial-")[0])
    words = [event["time"][11:19], click.style(f"{kind:9}", COLOURS.get(kind, "red")), name]
    if kind == "committed":
        words.append(f"+{event['steps_since']} steps" if event["steps_since"] else "")
        words.append(size(event["size_bytes"]))
        if took:
            phases = {n: value for n, value in event["timings"].items() if value >= took / 100}
            words[-1] += f" in {took:.3g} s, {size(event['bytes_per_second'])}/s"
            words.append(printable(seconds(phases)))
            late = [f"{n} {s['seconds']:.3g}s on rank {s['rank']}" for n, s in _late(event)]
            words.append(printable(f"slowest: {', '.join(late)}" if late else ""))
        words.append(printable(metrics(event["metrics"]) if event["metrics"] else ""))
    elif kind != "writing":
        words.append(printable(event["reason"] or ""))
    return "  ".join(filter(None, words))
