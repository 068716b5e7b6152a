"""Storage options are nobody's business: in no message, log, event, manifest or representation."""

import logging
import traceback

import fsspec
import pytest
import torch
from ckpt_tools.main import main
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem
from fsspec.utils import infer_storage_options

from ckptcore import (
    CheckpointError,
    CheckpointManager,
    StorageError,
    Tier,
    copy_checkpoint,
    open_checkpoint,
    open_storage,
    scan_root,
)

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


@pytest.mark.parametrize(
    "options", [{"token": SECRET}, {"client_kwargs": {"headers": [{"Authorization": SECRET}]}}]
)
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
    ours = "".join(
        record.getMessage() for record in caplog.records if record.name.startswith("ckptcore")
    )
    assert SECRET not in everything_said(caught.value) + ours + out + err + repr(events) + repr(
        info
    )
    assert SECRET.encode() not in info.manifest.encode()


class Vault(MemoryFileSystem):
    """Opens for the password in its URL, and shows what it was given when it does not."""

    protocol = "vault"
    store, pseudo_dirs, password = {}, [""], SECRET

    def __init__(self, password=None, **options):
        super().__init__(**options)
        if password != self.password:
            raise PermissionError(f"wrong password {password}")

    @staticmethod
    def _get_kwargs_from_urls(url):
        return {"password": infer_storage_options(url).get("password")}

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(
            infer_storage_options(path)["path"] if "://" in path else path
        )


fsspec.register_implementation("vault", Vault, clobber=True)


@pytest.fixture(params=["s3cr3t-of-the-url", "s3cr3t@of:the-url"])
def vault(request, monkeypatch):
    """A URL with a password in it, the URL to be shown, and what no text may have in it."""
    for name, value in (("store", {}), ("pseudo_dirs", [""]), ("password", request.param)):
        monkeypatch.setattr(Vault, name, value)
    return f"vault://me:{request.param}@host/run", "vault://me:***@host/run", "the-url"


def saved(root, **how):
    with CheckpointManager(root, **how) as ckpt:
        return [ckpt.save(step, {"m": {"a": torch.full((3,), float(step))}}) for step in (1, 2)]


def test_a_run_at_a_url_with_a_password(vault, caplog, capfd):
    url, shown, secret = vault
    caplog.set_level(logging.DEBUG)
    events = []
    infos = saved(url, on_event=events.append)
    assert [info.url for info in infos] == [f"{shown}/checkpoint-{step}" for step in (1, 2)]
    ckpt = CheckpointManager(url)
    assert ckpt.list() == infos
    for info in infos:  # what it says, it can be given
        live = {"m": {"a": torch.zeros(3)}}
        assert ckpt.load(live, info.url).step == info.step
        assert live["m"]["a"].tolist() == [info.step] * 3
    view = open_checkpoint(f"{url}/checkpoint-1")
    assert (view.url, view.verify()) == (infos[0].url, [])
    said = (
        repr(ckpt)
        + repr(ckpt.storage)
        + ckpt.root
        + repr(infos)
        + repr(events)
        + repr(view)
        + caplog.text
    )
    assert secret not in said + "".join(capfd.readouterr())
    assert not [name for name, file in Vault.store.items() if secret.encode() in file.getvalue()]


def test_failures_at_a_url_with_a_password(vault, tmp_path, monkeypatch):
    url, shown, secret = vault
    infos = saved(url)
    for ask in (
        lambda: CheckpointManager(url).load({"m": {"a": torch.zeros(3)}}, f"{url}/checkpoint-3"),
        lambda: open_checkpoint(f"{url}/checkpoint-3"),
        lambda: copy_checkpoint(f"{url}/checkpoint-3", tmp_path / "checkpoint-3"),
        lambda: copy_checkpoint(f"{url}/checkpoint-2", f"{url}/checkpoint-1"),
        lambda: copy_checkpoint(f"{url}/checkpoint-2", f"{url}/checkpoint-2"),
        lambda: CheckpointManager(tmp_path, tiers=[Tier(url), Tier(url)]),
        lambda: CheckpointManager(url, tiers=[Tier(url)]),
    ):
        with pytest.raises(CheckpointError) as caught:
            ask()
        assert shown in str(caught.value)
        assert secret not in everything_said(caught.value)
    with pytest.raises(
        StorageError, match=r"host/run/checkpoint-1: connecting failed: wrong password \*\*\*"
    ):
        open_checkpoint(infos[0].url)  # nobody knows the password of what is shown
    monkeypatch.setattr(Vault, "password", "another")
    with pytest.raises(
        StorageError, match=r"me:\*\*\*@host/run: connecting failed: wrong password \*\*\*"
    ) as caught:
        CheckpointManager(url)
    assert secret not in everything_said(caught.value)


def test_a_tier_at_a_url_with_a_password(vault, tmp_path):
    url, shown, secret = vault
    tier, events = Tier(url, every=1), []
    assert repr(tier) == f"Tier({shown!r}, every=1, keep=None)"
    saved(tmp_path / "fast", tiers=[tier], on_event=events.append)
    assert repr(tier) == f"Tier({shown!r}, every=1, keep=None)"
    assert sorted((e.step, e.root) for e in events if e.kind == "uploaded") == [
        (1, shown),
        (2, shown),
    ]
    assert secret not in repr(events)


@pytest.mark.parametrize("json", [[], ["--json"]])
def test_the_command_shows_no_password(vault, tmp_path, capsys, json):
    url, shown, secret = vault
    infos = saved(url)
    saved(tmp_path / "run")

    def ckpt(*arguments):
        code = main([str(argument) for argument in (*arguments, *json)])
        out, err = capsys.readouterr()
        assert secret not in out + err
        return code, out, err

    for command in ("ls", "inspect", "verify"):
        code, out, _ = ckpt(command, url)
        assert code == 0 and (shown in out or not json)
    for command in (["inspect"], ["inspect", "--tensors", "--verify"], ["verify"]):
        code, out, _ = ckpt(*command, f"{url}/checkpoint-1")
        assert code == 0 and (infos[0].url in out or not json)
    assert ckpt("cp", url, tmp_path / "copies")[0] == 0
    assert ckpt("cp", f"{url}/checkpoint-1", tmp_path / "copies")[0] == 0
    assert [info.step for info in scan_root(tmp_path / "copies")] == [1, 2]
    code, out, _ = ckpt("cp", tmp_path / "run", url.replace("/run", "/other"))
    assert code == 0 and shown.replace("/run", "/other/checkpoint-2") in out
    assert open_checkpoint(url.replace("/run", "/other/checkpoint-2")).verify() == []
    for wrong, complaint in (
        (["ls", f"{url}-absent"], 3),
        (["inspect", f"{url}/checkpoint-3"], 3),
        (["cp", f"{url}/checkpoint-1", f"{url}/checkpoint-2"], 1),
        (["verify", url.replace("me:", "me:no-")], 4),
    ):
        code, out, err = ckpt(*wrong)
        assert code == complaint and "vault://me:***@host/run" in out + err
    Vault.store["/run/checkpoint-2/m.safetensors"].seek(0)
    Vault.store["/run/checkpoint-2/m.safetensors"].write(b"x")
    for command in ("verify", "inspect"):
        code, out, _ = ckpt(command, url, *(["--verify"] if command == "inspect" else []))
        assert code == 1 and "digest" in out and (infos[1].url in out or not json)
