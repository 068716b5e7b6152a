"""What a remote filesystem's client raises comes out as a StorageError of ours."""

from __future__ import annotations

import errno

import pytest

from ckptcore import CheckpointManager, StorageError, open_storage


class EndpointGone(Exception):
    """Like the errors of network clients: no OSError."""


@pytest.mark.parametrize(
    ("kind", "number"),
    [(EndpointGone, errno.EREMOTEIO), (ValueError, errno.EREMOTEIO), (ConnectionResetError, errno.ECONNRESET)],
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
