"""Roots at chained URLs, at the top of a storage, in an archive, at a web server; and texts that
have been URLs."""

import errno
import json
import os
import threading
import uuid
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from ckpt_tools.main import main
from fsspec.implementations.memory import MemoryFileSystem

from ckptcore import (
    CheckpointCoordinator,
    CheckpointManager,
    StateComponent,
    StorageError,
    Tier,
    copy_checkpoint,
    open_checkpoint,
    scan_root,
)


def state(value=-1.0):
    return {"m": {"a": torch.full((3,), float(value)), "n": value}}


@pytest.fixture(autouse=True)
def cwd(tmp_path, monkeypatch):
    """Where a URL that is taken for a path would show."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def ckpt(capsys):
    """ckpt(*arguments): the exit code of the command, what it printed, and what it complained
    of."""

    def run(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def told(ckpt):
    def run(*arguments):
        code, out, err = ckpt(*arguments, "--json")
        assert code == 0, (out, err)
        return json.loads(out)

    return run


def check_reading(root, told, options=None):
    """Steps 1 and 2 are at `root`, whole, and can be read by whatever reads."""
    manager = CheckpointManager(root, storage_options=options)
    assert [(info.step, info.status) for info in manager.list()] == [
        (1, "committed"),
        (2, "committed"),
    ]
    live = state()
    assert manager.restore(live).step == 2
    assert live["m"]["a"].tolist() == [2.0] * 3
    for step, info in enumerate(manager.list(), 1):
        report = manager.load(live := state(), info.url)
        assert (report.step, report.values["m"]["n"], live["m"]["a"].tolist()) == (
            step,
            step,
            [step] * 3,
        )
        with open_checkpoint(info.url, storage_options=options) as view:
            assert (view.name, view.url, view.verify()) == (f"checkpoint-{step}", info.url, [])
    given = [
        f"--storage-option={name}={json.dumps(value)}" for name, value in (options or {}).items()
    ]
    newest = manager.latest().url
    assert [entry["step"] for entry in told("ls", root, *given)["checkpoints"]] == [1, 2]
    for what in (root, newest):
        assert told("inspect", what, *given)["checkpoint"]["step"] == 2
        (check,) = told("verify", what, *given)["checkpoints"]
        assert (check["ok"], check["checkpoint"]["url"]) == (True, newest)


def save_two(root, **how):
    with CheckpointManager(root, **how) as manager:
        return [manager.save(step, state(step)) for step in (1, 2)]


@pytest.mark.parametrize("place", ["memory", "s3", "filecache"])
def test_b26_chained_urls_stay_urls(s3, told, tmp_path, cwd, place):
    inside = s3.new_root() if place == "s3" else f"memory://{uuid.uuid4().hex}/run"
    root = f"{'filecache' if place == 'filecache' else 'simplecache'}::{inside}"
    options = {"s3": s3.options} if place == "s3" else None
    infos = save_two(root, storage_options=options)
    assert [info.url for info in infos] == [f"{root}/checkpoint-1", f"{root}/checkpoint-2"]
    check_reading(root, told, options)
    straight = s3.options if place == "s3" else None
    assert [info.step for info in scan_root(inside, storage_options=straight)] == [1, 2]
    copy = copy_checkpoint(
        infos[1].url,
        tmp_path / "copies" / "checkpoint-2",
        storage_options=options,
        target_options={},
    )
    assert open_checkpoint(copy.url).read("m/a").tolist() == [2.0] * 3
    with CheckpointManager(root, storage_options=options) as manager:
        manager.delete(1)
        assert [info.step for info in manager.list()] == [2]
    assert list(cwd.iterdir()) == []


def test_the_top_of_a_storage(told, monkeypatch):
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    for root in ("memory://", "memory:///"):
        infos = save_two(root)
        assert [info.url for info in infos] == [f"{root}checkpoint-1", f"{root}checkpoint-2"]
        check_reading(root, told)
        with CheckpointManager(root) as manager:
            manager.delete(1)
            manager.delete(2)


def test_an_archive(ckpt, told, tmp_path, cwd):
    save_two(tmp_path / "run")
    archive = tmp_path / "r.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted((tmp_path / "run").rglob("*")):
            file.write(path, path.relative_to(tmp_path))
    root = f"zip://run::{archive}"
    assert CheckpointManager(root).latest().url == f"zip://run/checkpoint-2::{archive}"
    check_reading(root, told)
    one = f"zip://run/checkpoint-1::{archive}"
    done = (
        told("cp", root, tmp_path / "a"),
        told("cp", one, tmp_path / "b"),
        told("cp", one, "memory://from-zip/c"),
    )
    assert [(copy["source"], copy["target"]) for copy in done] == [
        (f"zip://run/checkpoint-2::{archive}", str(tmp_path / "a" / "checkpoint-2")),
        (one, str(tmp_path / "b" / "checkpoint-1")),
        (one, "memory://from-zip/c/checkpoint-1"),
    ]
    assert [info.step for place in ("a", "b") for info in scan_root(tmp_path / place)] == [2, 1]
    assert open_checkpoint("memory://from-zip/c/checkpoint-1").verify() == []
    code, out, err = ckpt("inspect", f"zip://run/checkpoint-3::{archive}")
    assert (code, out, err.count("\n")) == (
        3,
        "",
        1,
    ) and f"zip://run/checkpoint-3::{archive}" in err
    assert list(cwd.iterdir()) == []


class Quiet(SimpleHTTPRequestHandler):
    """A page of links for a folder, and whole files whatever range was asked for."""

    protocol_version = "HTTP/1.1"
    wbufsize, disable_nagle_algorithm = -1, True  # else each answer takes 40 ms

    def log_message(self, *_):
        pass


@pytest.fixture
def web(tmp_path):
    """The URL of a server for the files in tmp_path / "web"."""
    pytest.importorskip("fsspec.implementations.http", exc_type=ImportError)
    (tmp_path / "web").mkdir()
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "web"))
    ) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_web_server(web, told, tmp_path, cwd):
    save_two(tmp_path / "web" / "run")
    files = sorted(path.name for path in (tmp_path / "web" / "run").rglob("*"))
    check_reading(f"{web}/run", told)
    check_reading(f"{web}/run/", told)
    assert told("cp", f"{web}/run", tmp_path / "copies")["target"] == str(
        tmp_path / "copies" / "checkpoint-2"
    )
    with pytest.raises(StorageError) as caught:
        CheckpointManager(f"{web}/run").save(3, state(3))
    assert type(caught.value) is StorageError and f"{web}/run/checkpoint-3" in str(caught.value)
    assert sorted(path.name for path in (tmp_path / "web" / "run").rglob("*")) == files
    assert list(cwd.iterdir()) == []


def test_files_of_a_web_server_are_read_in_pieces(web, tmp_path, monkeypatch):
    """Each from an answer with all of it, when the server knows no ranges; a damaged one is
    found."""
    monkeypatch.setattr("ckptcore.storage.remote.PIECE_BYTES", 5000)
    with CheckpointManager(tmp_path / "web" / "run") as manager:
        manager.save(1, {"m": {"a": torch.arange(1500), "b": torch.ones(3)}})
    view = open_checkpoint(f"{web}/run/checkpoint-1", storage_options={"retry_deadline": 5})
    assert view.read("m/a").tolist() == list(range(1500))
    assert view.verify() == []
    assert view.storage.retries == 0
    file = tmp_path / "web" / "run" / "checkpoint-1" / "m.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert [problem.file for problem in view.verify()] == ["m.safetensors"]


EATEN = [
    (Path("s3://b/run"), "s3://b/run"),
    ("s3:/b/run", "s3://b/run"),
    ("memory:/x/run", "memory://x/run"),
    (Path("file:///x/run"), "file:///x/run"),
    (Path("zip://run::/x/r.zip"), "zip://run::/x/r.zip"),
    (Path("simplecache::s3://b/run"), "simplecache::s3://b/run"),
]


@pytest.mark.parametrize(("text", "meant"), EATEN)
def test_what_has_been_a_url_is_refused(text, meant, tmp_path, cwd):
    save_two(tmp_path / "run")
    name = os.path.join(text, "checkpoint-1")
    source, component = tmp_path / "run" / "checkpoint-1", StateComponent("m", {"a": torch.ones(3)})
    for ask, url in (
        (lambda: CheckpointManager(text), meant),
        (lambda: CheckpointManager(tmp_path / "other", tiers=[Tier(text)]), meant),
        (lambda: scan_root(text), meant),
        (lambda: open_checkpoint(text), meant),
        (lambda: CheckpointManager(tmp_path / "run").load(state(), text), meant),
        (lambda: copy_checkpoint(text, tmp_path / "copy" / "checkpoint-1"), meant),
        (lambda: copy_checkpoint(source, name), "://"),
        (lambda: CheckpointCoordinator([component]).save_checkpoint(name, step=1), "://"),
    ):
        with pytest.raises(StorageError) as caught:
            ask()
        assert caught.value.errno == errno.EINVAL
        assert url in str(caught.value)
        assert list(cwd.iterdir()) == []


@pytest.mark.parametrize(("text", "meant"), EATEN[1:3])
@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "cp", "cp to"])
def test_the_command_refuses_it_too(ckpt, text, meant, command, tmp_path, cwd):
    save_two(tmp_path / "run")
    arguments = {"cp": ["cp", text, tmp_path / "copy"], "cp to": ["cp", tmp_path / "run", text]}
    code, out, err = ckpt(*arguments.get(command, [command, text]))
    assert (code, out, err.count("\n")) == (4, "", 1), err
    assert meant in err
    assert list(cwd.iterdir()) == []


@pytest.mark.parametrize("name", ["c:/x", "my:run/x", "my:/x", "s3:run", "a::b/x", "1://x"])
def test_other_names_with_a_colon_are_local_folders(name, told, cwd):
    infos = save_two(name)
    assert [info.url for info in infos] == [
        str(cwd / name / f"checkpoint-{step}") for step in (1, 2)
    ]
    assert sorted(path.name for path in (cwd / name).iterdir()) == ["checkpoint-1", "checkpoint-2"]
    check_reading(name, told)


def test_a_file_url_may_name_this_machine(tmp_path, told, cwd):
    infos = save_two(f"file://localhost{tmp_path}/run")
    assert [info.url for info in infos] == [
        str(tmp_path / "run" / f"checkpoint-{step}") for step in (1, 2)
    ]
    check_reading(f"{tmp_path}/run", told)
    for host in ("", "localhost"):
        url = f"file://{host}{tmp_path}/run"
        assert CheckpointManager(url).latest() == infos[1]
        assert [entry["step"] for entry in told("ls", url)["checkpoints"]] == [1, 2]
        assert told("inspect", f"{url}/checkpoint-1")["checkpoint"]["step"] == 1
    assert list(cwd.iterdir()) == []
