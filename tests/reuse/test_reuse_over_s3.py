"""`CheckpointManager(reuse=True)` on a real S3 server: the server copies what has not changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ckptcore
from ckptcore import CheckpointManager
from ckptcore.storage import s3 as s3_module
from tests.reuse.test_reuse import BASE, Tuned, values


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(request, name of the file) of all that is sent."""
    found: list[tuple[str, str]] = []
    send = s3_module.S3Storage.ask

    async def ask(self: Any, method: str, sender: Any = None, **parameters: Any) -> Any:
        found.append((method, str(parameters.get("Key", "")).rpartition("/")[2]))
        return await send(self, method, sender, **parameters)

    monkeypatch.setattr(s3_module.S3Storage, "ask", ask)
    return found


def saved_twice(s3: Any, change: Any = lambda model: model.step()) -> tuple[str, Any]:
    url, options = s3.new_root(), s3.options
    model = Tuned(1.0)
    with CheckpointManager(url, reuse=True, storage_options=options) as ckpt:
        ckpt.save(1, {"model": model})
        change(model)
        ckpt.save(2, {"model": model})
    return url, options


def restored(url: str, options: Any) -> Tuned:
    model = Tuned(-1.0)
    with CheckpointManager(url, storage_options=options) as ckpt:
        assert ckpt.restore({"model": model}).step == 2
        assert ckpt.verify(2) == []
        assert ckpt.verify(1) == []
    return model


def test_the_server_copies_what_has_not_changed(s3: Any, asked: list[tuple[str, str]]) -> None:
    url, options = saved_twice(s3)
    assert [name for method, name in asked if method == "copy_object"] == [BASE]
    assert [name for method, name in asked if method == "put_object"].count(BASE) == 1
    assert values(restored(url, options)) == [1.0, 2.0, 4.0, 4.0, 5.0, 6.0]


def test_a_large_object_is_copied_in_parts(
    s3: Any, asked: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "COPIED_AT_ONCE", 5 << 20)

    def larger(self: Any, number: float = 0.0) -> None:
        torch.nn.Module.__init__(self)
        self.base = torch.nn.Parameter(torch.full((3 << 20,), number), requires_grad=False)
        self.head = torch.nn.Parameter(torch.full((4,), number))

    monkeypatch.setattr(Tuned, "__init__", larger)
    monkeypatch.setattr(Tuned, "step", lambda self: self.head.data.add_(1))
    url, options = saved_twice(s3)
    assert [method for method, _ in asked].count("upload_part_copy") == 3  # 12 MiB in 5, 5 and 2
    assert values(restored(url, options)) == [1.0, 2.0]


def test_an_object_that_somebody_replaced_is_written_anew(
    s3: Any, asked: list[tuple[str, str]]
) -> None:
    url, options, model = s3.new_root(), s3.options, Tuned(1.0)
    with CheckpointManager(url, reuse=True, storage_options=options) as ckpt:
        ckpt.save(1, {"model": model})
        key = f"{url.split('/', 3)[3]}/checkpoint-1/{BASE}"
        s3.client().put_object(Bucket=s3.bucket, Key=key, Body=b"something else")
        ckpt.save(2, {"model": model})
        assert ckpt.verify(2) == []
        assert [problem.file for problem in ckpt.verify(1)] == [BASE]
    assert [name for method, name in asked if method == "put_object"].count(BASE) == 2
    assert ckptcore.scan_root(url, storage_options=options)[-1].status == "committed"
