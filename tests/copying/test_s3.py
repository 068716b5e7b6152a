"""Copies to, from and within an S3 server, whole and interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptcore import CheckpointView, copy_checkpoint, open_checkpoint, open_storage
from ckptcore.root import scan
from ckptcore.testing import FaultStorage, Killed


def test_there_within_and_back(s3: Any, copies: Any, sources: Path, tmp_path: Path) -> None:
    url, other = s3.new_root(), s3.new_root()
    source = sources / "a" / copies.name
    info = copy_checkpoint(source, f"{url}/{copies.name}", storage_options=s3.options)
    assert (info.url, info.step) == (f"{url}/{copies.name}", 500)
    copies.check(open_storage(url, s3.options))
    copy_checkpoint(info.url, f"{other}/{copies.name}", storage_options=s3.options)
    copies.check(open_storage(other, s3.options))
    back = copy_checkpoint(
        f"{other}/{copies.name}", tmp_path / copies.name, storage_options=s3.options, target_options={}
    )
    assert open_checkpoint(back.url).verify() == []
    copies.check(open_storage(tmp_path))


@pytest.mark.parametrize("at", [3, 12, 25, 40])
def test_killed_and_run_again(s3: Any, copies: Any, at: int) -> None:
    target = open_storage(s3.new_root(), s3.options)
    faults = FaultStorage(target)
    faults.kill(at, how="raise")
    with pytest.raises(Killed):
        copies.make(faults, threads=2)
    assert [info.status for info in scan(target)] in ([], ["partial"])
    seen: list[tuple[int, int, int]] = []
    copies.make(target, progress=lambda *counts: seen.append(counts))
    copied, kept, total = seen[-1]
    assert copied + kept == total == copies.total()
    assert kept > 0 or at < 20
    copies.check(target)
    assert CheckpointView(target, copies.name).foreign_files() == []
