"""Every exit code, one line on stderr for each error, and the same as JSON."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckptcore import CheckpointManifest, open_checkpoint
from ckptcore.testing.processes import patience

from .conftest import Ckpt, save_run


def one_line(err: str) -> str:
    assert err.startswith("ckpt: ") and err.count("\n") == 1 and err.endswith("\n"), err
    return err


def test_alone_it_shows_the_help(ckpt: Ckpt) -> None:
    done = ckpt()
    assert (done.code, done.err) == (2, "") and done.out == ckpt("--help").out
    assert ckpt("--json").document["error"]["kind"] == "usage"


def test_it_runs_as_a_module(ckpt: Ckpt, root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tools", "ls", str(root)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, ckpt("ls", root).out)


@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
def test_not_found_is_3_and_says_what_is_there(
    ckpt: Ckpt, root: Path, tmp_path: Path, command: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").touch()
    (root / "checkpoint-10" / "notes.txt").touch()
    expected = {
        tmp_path / "absent": "no such file or folder",
        tmp_path / "empty": "the folder is empty",
        tmp_path / "other": "no checkpoint at",
        root / "checkpoint-10" / "notes.txt": "not a folder",
        root / "checkpoint-10" / "model.safetensors" / "deeper": "no such file or folder",
    }
    for path, message in expected.items():
        done = ckpt(command, path)
        assert done.code == 3, path
        assert message in one_line(done.err) and str(path) in done.err
        assert done.out == ""
        told = ckpt(command, path, "--json")
        assert told.code == 3 and told.err == ""
        error = told.document["error"]
        assert (error["kind"], error["exit_code"], error["path"]) == ("not_found", 3, str(path))
        assert message in error["message"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["ls"],
        ["inspect"],
        ["verify"],
        ["ls", "a", "b"],
        ["ls", "--nonsense", "a"],
        ["ls", "a", "--storage-option"],
        ["ls", "a", "--storage-option", "novalue"],
        ["ls", "a", "--storage-option", "=x"],
        ["inspect", "a", "--values"],
    ],
    ids=" ".join,
)
def test_usage_is_2(ckpt: Ckpt, arguments: list[str]) -> None:
    done = ckpt(*arguments)
    assert done.code == 2 and done.out == ""
    one_line(done.err)
    told = ckpt("--json", *arguments)
    assert told.code == 2 and told.err == ""
    assert told.document["error"]["kind"] == "usage"


def test_a_newer_format_version_is_1_and_says_so(ckpt: Ckpt, root: Path) -> None:
    folder = root / "checkpoint-30"
    with open_checkpoint(folder) as view:
        manifest: CheckpointManifest = view.manifest
    manifest.format_version = "2.0"
    (folder / "checkpoint_manifest.json").write_bytes(manifest.encode())
    for command in (["inspect"], ["verify"]):
        done = ckpt(*command, folder)
        assert done.code == 1
        message = one_line(done.err)
        assert "2.0" in message and "newer" in message and str(folder) in message
        error = ckpt(*command, folder, "--json").document["error"]
        assert (error["kind"], error["found"], error["exit_code"]) == (
            "unsupported_version",
            "2.0",
            1,
        )
    assert "newer" in ckpt("ls", root).out
    everything = ckpt("verify", root, "--all", "--json")
    assert everything.code == 1
    assert [c["ok"] for c in everything.document["checkpoints"]] == [True, True, False]


# ---------------------------------------------------------------- storage


class Locked(MemoryFileSystem):  # type: ignore[misc]
    """A filesystem that refuses what `secret` finds in a path, and remembers its options."""

    protocol = "locked"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    secret: ClassVar[str] = "secret"
    seen: ClassVar[dict[str, Any]] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__()
        Locked.seen = options

    def check(self, path: str) -> None:
        if self.secret in path:
            raise PermissionError(errno.EACCES, "Permission denied", path)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self.check(path)
        return super().ls(path, detail, **options)

    def info(self, path: str, **options: Any) -> Any:
        self.check(path)
        return super().info(path, **options)


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("locked", Locked, clobber=True)
    monkeypatch.setattr(Locked, "store", {})
    monkeypatch.setattr(Locked, "pseudo_dirs", [""])


@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
def test_a_storage_that_refuses_is_4(ckpt: Ckpt, locked: None, command: str) -> None:
    done = ckpt(command, "locked://secret/runs")
    assert done.code == 4 and done.out == ""
    message = one_line(done.err)
    assert "Permission denied" in message and "locked://secret/runs" in message
    told = ckpt(command, "locked://secret/runs", "--json")
    assert told.code == 4
    assert told.document["error"]["kind"] == "storage" and told.document["error"]["exit_code"] == 4


def test_errors_of_storage_clients_are_4(
    ckpt: Ckpt, locked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BotoCoreError(Exception):
        """botocore's errors are no OSErrors."""

    def unreachable(*_: Any, **__: Any) -> None:
        raise BotoCoreError("Could not connect to the endpoint URL")

    client = SimpleNamespace(BotoCoreError=BotoCoreError, ClientError=BotoCoreError)
    monkeypatch.setitem(sys.modules, "botocore.exceptions", client)
    monkeypatch.setattr(Locked, "info", unreachable)
    monkeypatch.setattr(Locked, "ls", unreachable)
    for command in ("ls", "inspect", "verify"):
        done = ckpt(command, "locked://bucket/run")
        assert done.code == 4 and "Could not connect" in one_line(done.err)


class Unreachable(MemoryFileSystem):  # type: ignore[misc]
    """Fails when it is made, as clients do that log in at once."""

    protocol = "unreachable"
    error: ClassVar[Exception] = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    def __init__(self, **options: Any) -> None:
        raise self.error


@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
def test_clients_that_cannot_connect_are_4(
    ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    fsspec.register_implementation("unreachable", Unreachable, clobber=True)
    arguments = command, "unreachable://host/run", "--storage-option", "retry_deadline=0.1"
    done = ckpt(*arguments)
    assert (done.code, done.out) == (4, "")
    assert "unreachable://host/run" in one_line(done.err) and "Connection refused" in done.err
    assert ckpt(*arguments, "--json").document["error"]["exit_code"] == 4
    monkeypatch.setattr(Unreachable, "error", type("LoginFailed", (Exception,), {})("wrong key"))
    done = ckpt(*arguments)
    assert (done.code, done.out) == (4, "")
    assert "LoginFailed: wrong key" in one_line(done.err)


def test_an_unknown_kind_of_storage_is_4(ckpt: Ckpt) -> None:
    done = ckpt("ls", "nosuchscheme://bucket/run")
    assert done.code == 4 and "nosuchscheme" in one_line(done.err)


def test_files_that_may_not_be_read_are_4(
    ckpt: Ckpt, locked: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_run("locked://runs", (10, 20), run_id="far")
    monkeypatch.setattr(Locked, "secret", "checkpoint-20/model.safetensors")
    assert ckpt("inspect", "locked://runs").code == 0
    done = ckpt("verify", "locked://runs")
    assert done.code == 4
    assert "checkpoint-20  unreadable" in done.out and "model.safetensors" in done.out
    assert "Permission denied" in done.out and "nearest older usable step: 10" in done.out
    monkeypatch.setattr(Locked, "secret", "checkpoint-20/checkpoint_manifest.json")
    for command in ("inspect", "verify"):
        refused = ckpt(command, "locked://runs/checkpoint-20")
        assert refused.code == 4 and "Permission denied" in one_line(refused.err)
    everything = ckpt("verify", "locked://runs", "--all", "--json")
    assert everything.code == 4
    assert [c["checkpoint"]["status"] for c in everything.document["checkpoints"]] == [
        "committed",
        "unreadable",
    ]


def test_storage_options_arrive_decoded(ckpt: Ckpt, locked: None) -> None:
    options = ["token=a=b", "retries=3", 'client={"url": "http://x"}', "flag=true", "empty="]
    done = ckpt(
        "ls", "locked://bucket/none", *(part for o in options for part in ("--storage-option", o))
    )
    assert done.code == 3
    assert Locked.seen == {
        "token": "a=b",
        "retries": 3,
        "client": {"url": "http://x"},
        "flag": True,
        "empty": "",
    }


@pytest.mark.parametrize("tail", ["", "/", "//"])
def test_urls_stay_urls(
    ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: str
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"memory://bucket-{len(tail)}/run"
    save_run(url, (10, 20), run_id="far")
    document = ckpt("ls", url + tail, "--json").document
    assert [entry["step"] for entry in document["checkpoints"]] == [10, 20]
    assert document["latest"] == "checkpoint-20"
    assert document["checkpoints"][0]["url"].startswith("memory://bucket")
    one = ckpt("inspect", f"{url}/checkpoint-10{tail}", "--tensors", "--verify", "--json")
    assert one.code == 0 and one.document["checkpoint"]["step"] == 10
    assert one.document["checkpoint"]["name"] == "checkpoint-10"
    assert ckpt("verify", url + tail, "--all").code == 0
    fsspec.filesystem("memory").rm_file(
        f"/bucket-{len(tail)}/run/checkpoint-20/checkpoint_manifest.json"
    )
    gone = ckpt("inspect", f"{url}/checkpoint-20{tail}", "--json")
    assert gone.code == 1 and gone.document["fallback"]["step"] == 10
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- the process


def test_version_and_help(ckpt: Ckpt) -> None:
    done = ckpt("--version")
    assert done.code == 0 and done.out.startswith("ckpt 0.")
    for arguments in (["--help"], ["ls", "--help"], ["inspect", "-h"], ["verify", "--help"]):
        done = ckpt(*arguments)
        assert done.code == 0
        for code in ("0    good", "1    bad", "2    usage", "3    not found", "4    storage"):
            assert code in done.out


def test_json_may_stand_before_the_command(ckpt: Ckpt, root: Path) -> None:
    assert ckpt("--json", "ls", root) == ckpt("ls", root, "--json") == ckpt("ls", "--json", root)


def test_an_interrupt_is_130(ckpt: Ckpt, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptcore.open_checkpoint", interrupted)
    done = ckpt("verify", root)
    assert done.code == 130 and done.err.strip() == "ckpt: interrupted"


def run_python(
    code: str, *arguments: str | Path, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        env={**os.environ, **environment},
        timeout=60 * patience(),
    )


def test_a_reader_that_leaves_is_no_error(root: Path) -> None:
    command = [sys.executable, "-m", "ckpt_tools.main", "inspect", str(root), "--tensors"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            command, stdout=write_end, stderr=subprocess.PIPE, timeout=60 * patience()
        )
    finally:
        os.close(write_end)
    assert done.returncode == 141 and done.stderr == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_output_that_cannot_be_written_is_4(root: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ckpt_tools.main", "ls", str(root)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60 * patience())
    assert (
        done.returncode == 4 and b"No space left" in done.stderr and b"Traceback" not in done.stderr
    )


def test_commands_import_neither_torch_nor_what_they_do_not_need(root: Path) -> None:
    code = (
        "import sys; from ckpt_tools.main import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'numpy', 'rich', 'fsspec', 'ckpt_trainers'} & sys.modules.keys(); "
        "sys.exit(code or ', '.join(sorted(heavy)) or None)"
    )
    for words in ("ls", "inspect --tensors", "verify --all --json"):
        done = run_python(code, *words.split(), root)
        assert done.returncode == 0, done.stderr.decode()


def test_names_outside_the_encoding_are_escaped(root: Path) -> None:
    code = "import sys; from ckpt_tools.main import main; sys.exit(main(sys.argv[1:]))"
    done = run_python(
        code, "ls", root / "checkpoint-10" / "nö", PYTHONIOENCODING="ascii", PYTHONUTF8="0"
    )
    assert done.returncode == 3 and b"my r\\xfcns" in done.stderr
    told = run_python(code, "inspect", root, "--json", PYTHONIOENCODING="ascii")
    assert told.returncode == 0
    assert json.loads(told.stdout)["checkpoint"]["metadata"] == {"note": "step 30 é"}
    assert (
        run_python(code, "inspect", root, PYTHONIOENCODING="ascii", FORCE_COLOR="1").returncode == 0
    )
