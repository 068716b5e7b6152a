"""Copies to, from and within an S3 server, whole and interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptcore import CheckpointView, copy_checkpoint, open_checkpoint, open_storage
from ckptcore.catalog.catalog import scan
from ckptcore.storage.s3 import S3Storage
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
        f"{other}/{copies.name}",
        tmp_path / copies.name,
        storage_options=s3.options,
        target_options={},
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


def uploads(s3: Any, root: str) -> list[str]:
    """Keys below a root that somebody has begun to upload in parts."""
    prefix = root.removeprefix(f"s3://{s3.bucket}/") + "/"
    found = s3.client().list_multipart_uploads(Bucket=s3.bucket, Prefix=prefix).get("Uploads", [])
    return sorted(upload["Key"].removeprefix(prefix) for upload in found)


def begin(s3: Any, root: str, *names: str) -> None:
    client = s3.client()
    for name in names:
        client.create_multipart_upload(
            Bucket=s3.bucket, Key=f"{root}/{name}".removeprefix(f"s3://{s3.bucket}/")
        )


def test_what_a_killed_copy_has_begun_to_upload_is_given_up(
    s3: Any, copies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = s3.new_root()
    target, name = open_storage(root, s3.options), copies.name
    faults = FaultStorage(target)
    faults.kill(12, how="raise")
    with pytest.raises(Killed):
        copies.make(faults, threads=1)
    lost = [
        f"{name}/{file}"
        for file in ("model.safetensors", "own.rank00000.safetensors", "own.rank00002.safetensors")
    ]
    others = [f"{name}0/model.safetensors", "checkpoint-5/model.safetensors"]
    begin(s3, root, lost[0], *lost, *others)
    assert uploads(s3, root) == sorted([lost[0], *lost, *others])

    # The server of these tests tells of all at once, where others tell of a thousand.
    whole, pages = S3Storage._request, []

    def in_pages(self: S3Storage, method: str, **how: Any) -> Any:
        after = how.pop("KeyMarker", ""), how.pop("UploadIdMarker", "")
        found = whole(self, method, **how)
        if method == "list_multipart_uploads":
            pages.append(after)
            rest = sorted(
                (upload["Key"], upload["UploadId"]) for upload in found.get("Uploads", [])
            )
            rest = [upload for upload in rest if upload > after]
            found["Uploads"] = [{"Key": key, "UploadId": number} for key, number in rest[:3]]
            found["IsTruncated"] = len(rest) > 3
            if rest:
                found["NextKeyMarker"], found["NextUploadIdMarker"] = rest[:3][-1]
        return found

    monkeypatch.setattr(S3Storage, "_request", in_pages)
    copies.make(target)
    copies.check(target)
    assert uploads(s3, root) == sorted(others)
    assert len(pages) == 2
