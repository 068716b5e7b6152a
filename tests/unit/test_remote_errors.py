"""What a remote filesystem's client raises comes out as a StorageError of ours."""

from __future__ import annotations

import errno
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckptcore import CheckpointManager, StorageError, open_storage


class EndpointGone(Exception):
    """Like the errors of network clients: no OSError."""


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (EndpointGone, errno.EREMOTEIO),
        (ValueError, errno.EREMOTEIO),
        (ConnectionResetError, errno.ECONNRESET),
    ],
)
def test_errors_of_clients_are_storage_errors(
    kind: type[Exception], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as EIO, which says of a local disk that what lies there is damaged."""
    storage = open_storage("memory://remote-errors", {"retry_deadline": 0.2})

    def fails(*_: object, **__: object) -> None:
        raise kind("gone")

    monkeypatch.setattr(type(storage.fs), "ls", fails)
    with pytest.raises(StorageError, match="gone") as caught:
        storage.list()
    assert caught.value.path == "" and isinstance(caught.value.__cause__, OSError)
    assert caught.value.errno == number
    with pytest.raises(StorageError, match="gone"), CheckpointManager(storage) as ckpt:
        ckpt.save(1, {"m": {"x": 1}})


class Unreachable(MemoryFileSystem):  # type: ignore[misc]
    """Logs in when it is made, as clients of FTP and SFTP do; the first `times` times it fails."""

    protocol = "unreachable"
    error: ClassVar[Exception] = EndpointGone()
    times: ClassVar[float] = 0
    made: ClassVar[int] = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        type(self).made += 1
        if self.made <= self.times:
            raise self.error


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> type[Unreachable]:
    fsspec.register_implementation("unreachable", Unreachable, clobber=True)
    monkeypatch.setattr(Unreachable, "made", 0)
    monkeypatch.setattr(Unreachable, "times", float("inf"))
    monkeypatch.setattr(Unreachable, "store", {})
    return Unreachable


REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


def test_a_client_that_cannot_connect_is_tried_again_until_the_deadline(
    unreachable: type[Unreachable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unreachable, "error", REFUSED)
    with pytest.raises(StorageError, match=r"Connection refused .*given up after") as caught:
        CheckpointManager("unreachable://host/run", storage_options={"retry_deadline": 0.3})
    assert type(caught.value) is StorageError
    assert (caught.value.errno, caught.value.path) == (errno.ECONNREFUSED, "")
    assert "unreachable://host/run: connecting failed" in str(caught.value)
    assert unreachable.made > 1
    monkeypatch.setattr(unreachable, "made", 0)
    monkeypatch.setattr(unreachable, "times", 2)
    with CheckpointManager(
        "unreachable://host/run", storage_options={"retry_deadline": 30}
    ) as ckpt:
        assert (unreachable.made, ckpt.storage.retries) == (3, 2)  # type: ignore[attr-defined]
        ckpt.save(1, {"m": {"x": 1}})
        assert [info.url for info in ckpt.list()] == ["unreachable://host/run/checkpoint-1"]


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (EndpointGone("login failed"), errno.EREMOTEIO),
        (PermissionError("login failed"), errno.EACCES),
        (OSError(errno.ENOTCONN, "login failed"), errno.ENOTCONN),
    ],
)
def test_a_client_that_is_refused_is_asked_once(
    unreachable: type[Unreachable], monkeypatch: pytest.MonkeyPatch, error: Exception, number: int
) -> None:
    monkeypatch.setattr(unreachable, "error", error)
    with pytest.raises(
        StorageError, match=r"unreachable://host/run: connecting failed: .*login failed"
    ) as caught:
        CheckpointManager("unreachable://host/run")
    assert type(caught.value) is StorageError
    assert (caught.value.errno, unreachable.made) == (number, 1)
