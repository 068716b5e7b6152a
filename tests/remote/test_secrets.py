"""Storage options are nobody's business: in no message, log, event, manifest or representation."""

import logging
import traceback

import fsspec
import pytest
import torch
from fsspec.spec import AbstractFileSystem

from ckptcore import CheckpointManager, StorageError, open_storage

SECRET = "s3cr3t-of-the-storage"


class Talkative(AbstractFileSystem):
    """Says in its errors all that it was told."""

    protocol = "talkative"

    def __init__(self, token="", client_kwargs=None, **options):
        super().__init__(**options)
        self.told = f"{token} {client_kwargs}"
        if options.get("refuse"):
            raise ValueError(f"what is {self.told}?")

    def ls(self, path, detail=True, **kwargs):
        raise PermissionError(f"denied to {self.told}")

    info = ls


fsspec.register_implementation("talkative", Talkative, clobber=True)


def everything_said(error):
    return "".join(traceback.format_exception(error)) + repr(error) + str(vars(error))


@pytest.mark.parametrize("options", [{"token": SECRET}, {"client_kwargs": {"headers": [{"Authorization": SECRET}]}}])
def test_an_error_of_a_filesystem_that_repeats_them(options):
    ckpt = CheckpointManager("talkative://bucket/run", storage_options=options)
    with pytest.raises(StorageError, match=r"denied to .*\*\*\*") as caught:
        ckpt.list()
    assert SECRET not in everything_said(caught.value)
    assert SECRET not in repr(ckpt) + repr(ckpt.storage) + ckpt.root
    with pytest.raises(StorageError, match="no filesystem for this URL") as caught:
        CheckpointManager("talkative://bucket/run", storage_options={**options, "refuse": True})
    assert SECRET not in everything_said(caught.value)


def test_a_password_in_the_url():
    storage = open_storage(f"talkative://me:{SECRET}@host/run")
    assert storage.url == "talkative://me:***@host/run"
    with pytest.raises(StorageError) as caught:
        storage.list("checkpoint-1")
    assert SECRET not in everything_said(caught.value)


def test_a_run_and_its_failures(s3, proxy, through, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    events = []
    options = through(retry_deadline=0.2, secret=SECRET)
    ckpt = CheckpointManager(s3.new_root(), storage_options=options, on_event=events.append)
    info = ckpt.save(1, {"m": {"a": torch.ones(3)}})
    proxy.rate, proxy.kinds = 1.0, ("503",)
    with pytest.raises(StorageError) as caught:
        ckpt.save(2, {"m": {"a": torch.ones(3)}})
    out, err = capfd.readouterr()
    ours = "".join(record.getMessage() for record in caplog.records if record.name.startswith("ckptcore"))
    assert SECRET not in everything_said(caught.value) + ours + out + err + repr(events) + repr(info)
    assert SECRET.encode() not in info.manifest.encode()
