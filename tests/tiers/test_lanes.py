"""What a tier remembers is changed by three threads, and what it has to say is heard."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptcore.tiers.uploads as tiers
from ckptcore import CheckpointManager, StorageError, Tier
from ckptcore.catalog.catalog import Catalog
from ckptcore.catalog.folder import CheckpointInfo
from ckptcore.storage.opening import open_storage
from ckptcore.testing.processes import patience
from ckptcore.tiers.uploads import Uploads


def unreadable(storage: Any) -> Any:
    raise StorageError("the fast root does not answer", path=storage.url)


@pytest.mark.parametrize("call", ["catch_up", "committed"])
@pytest.mark.parametrize("end", ["raise_failure", "close"])
def test_a_warning_is_heard_where_nothing_is_to_be_uploaded(
    call: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = Uploads(
        open_storage(tmp_path / "fast"), [Tier(tmp_path / "slow", every=2)], "raise", 5.0
    )
    info = CheckpointInfo("checkpoint-1", "url", "committed", 1, None, None)
    with monkeypatch.context() as patched:
        patched.setattr(tiers, "scan", unreadable)
        patched.setattr(tiers._Lane, "_due", lambda *_: False)  # one that `every` leaves out
        uploads.catch_up("run", 1) if call == "catch_up" else uploads.committed(info)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if end == "raise_failure":
            uploads.raise_failure()
            uploads.raise_failure()
        uploads.close(time.monotonic() + 5 * patience())
    (heard,) = [str(warning.message) for warning in seen]
    assert "not known" in heard and str(tmp_path / "slow") in heard and "does not answer" in heard


def test_a_manager_warns_of_it_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.ones(3)}
    with CheckpointManager(tmp_path / "fast", run_id="run") as ckpt:
        ckpt.save(1, state)
    with CheckpointManager(
        tmp_path / "fast", run_id="run", tiers=[Tier(tmp_path / "slow")]
    ) as ckpt:
        with monkeypatch.context() as patched:
            patched.setattr(tiers, "scan", unreadable)
            ckpt.restore(state)
        with pytest.warns(match="does not answer"):
            ckpt.save(2, state)
        ckpt.wait()
    with CheckpointManager(tmp_path / "slow") as far:
        assert [info.step for info in far.list()] == [1, 2]


def test_three_threads_lose_nothing_and_raise_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits, restores, deletes and reports at once: each handle is collected once, and what is
    forgotten stays so."""
    count = 150
    uploads = Uploads(open_storage(tmp_path / "fast"), [Tier(tmp_path / "slow")], "raise", 20.0)
    (lane,) = uploads._lanes
    uploaded: list[str] = []
    collected: list[int] = []
    failures: list[BaseException] = []
    monkeypatch.setattr(tiers, "scan", lambda storage: [])
    monkeypatch.setattr(Catalog, "recall", lambda self: [])
    monkeypatch.setattr(Catalog, "clean_up", lambda *_, **__: None)
    monkeypatch.setattr(lane, "_replaced", lambda info: False)
    monkeypatch.setattr(lane, "_upload", lambda info, *_: uploaded.append(info.name) or info)
    monkeypatch.setattr(tiers._UploadHandle, "collect", lambda self: collected.append(id(self)))

    def repeat(work: Any) -> threading.Thread:
        def run() -> None:
            try:
                for number in range(count):
                    work(number)
            except BaseException as error:
                failures.append(error)

        return threading.Thread(target=run)

    def info(number: int) -> CheckpointInfo:
        return CheckpointInfo(f"checkpoint-{number}", "url", "committed", number, None, None)

    begun: list[int] = []
    submit = lane._background.submit
    monkeypatch.setattr(
        lane._background, "submit", lambda h, work: (begun.append(id(h)), submit(h, work))
    )
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            repeat(lambda n: uploads.committed(info(n))),
            repeat(lambda n: uploads.catch_up("run", n)),
            repeat(lambda n: (uploads.raise_failure(), uploads.held, uploads.failed)),
            repeat(lambda n: (uploads.raise_failure(), uploads.forget(f"checkpoint-{count + n}"))),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        sys.setswitchinterval(before)
    assert uploads.wait(20)
    uploads.close(time.monotonic() + 5 * patience())
    assert failures == []
    assert set(uploaded) == {f"checkpoint-{n}" for n in range(count)} and uploads.held == set()
    assert len(collected) == len(begun)


def test_what_is_deleted_while_it_is_looked_what_waits_is_not_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path / "fast", run_id="run") as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": torch.ones(3)})
    uploads = Uploads(open_storage(tmp_path / "fast"), [Tier(tmp_path / "slow")], "raise", 20.0)
    scan = tiers.scan

    def looked(storage: Any) -> Any:
        found = scan(storage)
        uploads.forget("checkpoint-1")  # by another thread, at this very moment
        return found

    monkeypatch.setattr(tiers, "scan", looked)
    uploads.catch_up("run", 2)
    assert uploads.wait(20)
    uploads.close(time.monotonic() + 5 * patience())
    assert [path.name for path in (tmp_path / "slow").glob("checkpoint-*")] == ["checkpoint-2"]
