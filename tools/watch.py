"""`ckpt watch`: the checkpoints of a root as they are committed, with the seconds that each
phase took.

JSON: one document a line; docs/cli.md. Exit code: 0; 1 where the last thing seen was a failure.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from json import dumps
from typing import Any

from ckptcore import CheckpointInfo, StorageError, masked_url, open_storage

from .failures import BAD, GOOD
from .lookup import normal, scan
from .render import Report, metrics, printable, seconds, size, strict
from .subject import Options

Seen = dict[str, tuple[str, str]]


def watch(
    url: str,
    options: Options,
    interval: float,
    timeout: float | None,
    events: int | None,
    as_json: bool,
    schema: int,
) -> Report:
    """Print what happens in the root `url`, first its newest checkpoint, until `events` things have
    happened or `timeout` seconds have passed."""
    url = normal(url)
    last: dict[str, Any] | None = None
    for number, event in enumerate(happenings(url, options, interval, timeout), 1):
        if as_json:
            line = dumps(strict({"schema": schema, **event}), allow_nan=False)
        else:
            line = printable(text_of(event))
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        last = event
        if events is not None and number >= events:
            break
    bad = last is not None and last["event"] in ("damaged", "unreachable")
    return Report({}, [], BAD if bad else GOOD)


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
                for name in before.keys() - now.keys():
                    yield {**_event("deleted", None, None, None, url), "name": name}
            before = now
        if end is not None and time.monotonic() + interval > end:
            return
        time.sleep(interval)


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
    """What is new. At first the newest that is committed, and what is not."""
    committed = [info for info in infos if info.status == "committed"]
    for info in infos:
        if before is None:
            if info.status == "committed" and info is not committed[-1]:
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
    timings = dict(info.manifest.timings) if info and info.manifest else {}
    took = sum(timings.values())
    steps = None
    if event == "committed" and info and last and last.run_id == info.run_id:
        steps = (info.step or 0) - (last.step or 0)
    return {
        "event": event,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "root": masked_url(url),
        "name": info.name if info else None,
        "step": info.step if info else None,
        "steps_since": steps,
        "run_id": info.run_id if info else None,
        "size_bytes": info.size_bytes if info else None,
        "seconds": round(took, 6) if timings else None,
        "bytes_per_second": round((info.size_bytes or 0) / took) if took and info else None,
        "timings": timings,
        "metrics": dict(info.metrics) if info else {},
        "reason": reason,
    }


def text_of(event: dict[str, Any]) -> str:
    words = [event["time"][11:19], event["event"]]
    if event["name"]:
        words.append(event["name"])
    if event["event"] == "committed":
        if event["steps_since"]:
            words.append(f"+{event['steps_since']} steps")
        words.append(size(event["size_bytes"]))
        if event["seconds"]:
            rate = size(event["bytes_per_second"])
            words.append(f"in {event['seconds']:.3g} s ({rate}/s): {seconds(event['timings'])}")
        if event["metrics"]:
            words.append(metrics(event["metrics"]))
    elif event["reason"]:
        words.append(f": {event['reason']}")
    return "  ".join(words)
