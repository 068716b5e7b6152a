"""B26: a URL stays a URL through a whole run and the command line, and local paths may be called
anything."""

import json
import sys
import uuid
from pathlib import Path

import fsspec
import pytest
import torch
from ckpt_tools.main import main
from fsspec.implementations.local import LocalFileSystem

from ckptcore import (
    CheckpointManager,
    KeepLast,
    StorageError,
    open_checkpoint,
    open_storage,
    scan_root,
)


class Elsewhere(LocalFileSystem):
    """A folder of this machine that nobody takes for a local one."""

    protocol = "elsewhere"
    local_file = False


fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)


def state(value=-1.0):
    return {"m": {"a": torch.full((3,), float(value)), "n": value}}


def told(capsys, *arguments):
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


@pytest.fixture(params=["memory", "s3", "elsewhere", "file", "local path"])
def place(request, tmp_path, s3, monkeypatch):
    """A root without its last slash, and the options for it."""
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    name = f"bucket-{uuid.uuid4().hex}"
    if request.param == "s3":
        yield f"s3://{s3.bucket}/{name}/run", s3.options
    elif request.param == "local path":
        yield str(tmp_path / name / "run"), None
    elif request.param == "memory":
        yield f"memory://{name}/run", None
    else:
        yield f"{request.param}://{tmp_path}/{name}/run", None
    assert list(cwd.iterdir()) == []
    assert not [path for path in tmp_path.rglob("*") if ":" in path.name]


@pytest.mark.parametrize("form", ["{}", "{}/", "{}//", "double"])
def test_b26_a_run_at_a_url_stays_at_that_url(place, form, capsys):
    root, options = place
    head, _, tail = root.rpartition("/")
    url = f"{head}//{tail}" if form == "double" else form.format(root)
    scheme = url.partition("://")[0] if "://" in url and not url.startswith("file:") else None
    how = {"storage_options": options}
    with CheckpointManager(url, run_id="run", **how) as ckpt:
        for step in (1, 2, 3):
            info = ckpt.save(step, state(step))
            assert scheme is None or info.url.startswith(f"{scheme}://")
            assert info.url.endswith(f"/checkpoint-{step}")
        assert [info.step for info in ckpt.list()] == [1, 2, 3]
        assert ckpt.latest().step == 3
    with CheckpointManager(url, keep=KeepLast(1), **how) as ckpt:  # as a job that was started again
        live = state()
        assert ckpt.restore(live, "latest").step == 3
        assert live["m"]["a"].tolist() == [3.0] * 3
        ckpt.save(4, state(4))
        assert [info.step for info in ckpt.list()] == [4]
        newest = ckpt.latest().url
        assert ckpt.load(state(), newest).step == 4  # what it says, it can be given
    # However it is written, it is the same place.
    assert [info.name for info in scan_root(root, options)] == ["checkpoint-4"]
    assert open_checkpoint(f"{root}/checkpoint-4", **how).read("m/a").tolist() == [4.0] * 3
    given = [
        f"--storage-option={name}={json.dumps(value)}" for name, value in (options or {}).items()
    ]
    found = told(capsys, "inspect", f"{root}/checkpoint-4", "--json", *given)["checkpoint"]
    assert (found["step"], found["status"]) == (4, "committed")
    assert scheme is None or found["url"].startswith(f"{scheme}://")
    assert [
        entry["step"] for entry in told(capsys, "ls", url, "--json", *given)["checkpoints"]
    ] == [4]
    with CheckpointManager(url, **how) as ckpt:
        ckpt.delete(4)
        assert ckpt.restore(state()).fresh


@pytest.mark.parametrize(
    "name", ["with space", "ünïcödé 日本語", "a[1-3]b", "100%", "per%20cent", "it's", "#1", "-dash"]
)
@pytest.mark.parametrize("scheme", ["", "elsewhere://"])
def test_a_root_may_be_called_anything(tmp_path, name, scheme):
    root = f"{scheme}{tmp_path}/{name}/run"
    with CheckpointManager(root, keep=KeepLast(1)) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step))
        live = state()
        assert ckpt.restore(live).step == 2
        assert live["m"]["a"].tolist() == [2.0] * 3
    assert [path.name for path in (tmp_path / name / "run").iterdir()] == ["checkpoint-2"]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_home_and_links(tmp_path, monkeypatch):
    home, disk = tmp_path / "home", tmp_path / "disk"
    home.mkdir()
    disk.mkdir()
    (home / "runs").symlink_to(disk)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("~/runs/a") as ckpt:
        ckpt.save(1, state(1))
        assert ckpt.root == str(home / "runs" / "a")
    assert [path.name for path in (disk / "a").iterdir()] == ["checkpoint-1"]
    assert CheckpointManager(Path("~/runs/a")).latest().step == 1
    assert CheckpointManager(f"file://{disk}/a").latest().step == 1
    assert not (tmp_path / "~").exists()


def test_a_bucket_that_is_not_there_is_no_fresh_start(s3):
    ckpt = CheckpointManager(f"s3://no-bucket-{uuid.uuid4().hex}/run", storage_options=s3.options)
    with pytest.raises(StorageError, match="there is no bucket"):
        ckpt.restore(state())
    with pytest.raises(StorageError, match="there is no bucket"):
        open_checkpoint(f"{ckpt.root}/checkpoint-1", s3.options)


@pytest.mark.parametrize("url", ["s3://", "s3:///"])
def test_a_url_without_a_bucket_is_refused_when_it_is_opened(url):
    with pytest.raises(StorageError, match="names no bucket; pass s3://bucket/folder"):
        CheckpointManager(url)


def test_two_colons_in_a_file_url_are_of_the_name(tmp_path):
    """It is no chain: another root, which has nothing, was restored from."""
    root = tmp_path / "a::b"
    with CheckpointManager(root) as ckpt:
        ckpt.save(3, state(3))
        assert ckpt.load(state(), f"file://{root}/checkpoint-3").step == 3
    assert CheckpointManager(f"file://{root}").restore(state()).step == 3


def test_a_folder_that_is_not_rooted(s3):
    """Keys that only begin alike are another root's."""
    root = s3.new_root()
    open_storage(f"{root}-2", s3.options).write("checkpoint-9/file", b"1")
    with CheckpointManager(root, storage_options=s3.options) as ckpt:
        assert ckpt.restore(state()).fresh
        ckpt.save(1, state(1))
        ckpt.delete(1)
    assert open_storage(f"{root}-2", s3.options).read("checkpoint-9/file") == b"1"


def test_a_url_whose_client_is_not_installed_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "ckptcore.storage.s3", raising=False)
    for module in ("aiohttp.abc", "aiohttp.payload", "s3fs"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(
        StorageError, match=r"s3://user:\*\*\*@bucket/run: no filesystem .*[Ii]nstall s3fs"
    ):
        open_storage("s3://user:password@bucket/run")
