"""`ckpt cp`: where the copy goes, what is said of it, and exit codes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from ckpt_tools import cp
from ckpt_tools.render import Progress
from fsspec.implementations.memory import MemoryFileSystem

from ckptcore import CheckpointManager, open_checkpoint, scan_root
from ckptcore.testing.processes import patience

Ckpt = Callable[..., Any]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_root_means_its_newest_and_gives_the_name(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    done = ckpt("cp", root, tmp_path / "there" / "run")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("checkpoint-30  copied and verified, ")
    assert done.out.rstrip().endswith(f": {tmp_path / 'there' / 'run' / 'checkpoint-30'}")
    assert contents(tmp_path / "there/run/checkpoint-30") == contents(root / "checkpoint-30")
    assert [p.name for p in (tmp_path / "there/run").iterdir()] == ["checkpoint-30"]


@pytest.mark.parametrize("tail", ["", "/"])
def test_a_checkpoint_to_a_root_or_to_a_folder(
    ckpt: Ckpt, root: Path, tmp_path: Path, tail: str
) -> None:
    one = root / "checkpoint-20"
    assert ckpt("cp", f"{one}{tail}", f"{tmp_path / 'r'}{tail}").code == 0
    assert contents(tmp_path / "r/checkpoint-20") == contents(one)
    assert ckpt("cp", one, f"{tmp_path / 'r' / 'checkpoint-21'}{tail}").code == 0
    assert contents(tmp_path / "r/checkpoint-21") == contents(one)
    # The last name decides, not what lies there.
    (tmp_path / "checkpoint-7").mkdir()
    assert ckpt("cp", one, tmp_path / "checkpoint-7").code == 0
    assert contents(tmp_path / "checkpoint-7") == contents(one)


def test_a_name_that_no_root_finds_is_not_kept(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    (root / "checkpoint-30").rename(root / "best")
    assert ckpt("cp", root / "best", tmp_path / "r").code == 0
    assert [info.name for info in scan_root(tmp_path / "r")] == ["checkpoint-30"]


def test_one_with_a_name_of_its_own_keeps_it(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    with CheckpointManager(root) as manager:
        info = manager.save(30, {"model": {"w": torch.ones(2)}}, name="tuned")
    name = "checkpoint-30-tuned"
    assert name in ckpt("ls", root).out
    for source, target in ((info.url, "r"), (info.url, f"s/{name}"), (tmp_path / "r" / name, "t")):
        assert ckpt("cp", source, tmp_path / target).code == 0
    Path(info).rename(tmp_path / "elsewhere")
    assert ckpt("cp", tmp_path / "elsewhere", tmp_path / "u").code == 0
    assert [[i.name for i in scan_root(tmp_path / folder)] for folder in "rstu"] == [[name]] * 4


def test_relative_paths_and_the_working_folder(
    ckpt: Ckpt, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ckpt("cp", root / "checkpoint-10", ".").code == 0
    assert ckpt("cp", "checkpoint-10", "checkpoint-11").code == 0
    assert contents(tmp_path / "checkpoint-11") == contents(root / "checkpoint-10")


def test_the_document(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    first = ckpt("cp", root, tmp_path / "r", "--json")
    assert first.err == ""
    document = first.document
    view = open_checkpoint(root / "checkpoint-30")
    assert document["source"] == str(root / "checkpoint-30")
    assert document["target"] == document["checkpoint"]["url"] == str(tmp_path / "r/checkpoint-30")
    assert (document["already"], document["kept_bytes"], document["warnings"]) == (False, 0, [])
    assert document["copied_bytes"] == view.manifest.size_bytes
    assert (document["checkpoint"]["step"], document["checkpoint"]["digest"]) == (
        30,
        view.manifest.digest,
    )
    again = ckpt("cp", root, tmp_path / "r", "--json").document
    assert (again["already"], again["copied_bytes"], again["kept_bytes"]) == (
        True,
        0,
        view.manifest.size_bytes,
    )
    assert again["checkpoint"] == document["checkpoint"]
    assert "is there already" in ckpt("cp", root, tmp_path / "r").out


def test_what_is_in_the_way(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    target = tmp_path / "r" / "checkpoint-30"
    assert ckpt("cp", root / "checkpoint-10", target).code == 0
    refused = ckpt("cp", root, tmp_path / "r")
    assert (refused.code, refused.out) == (1, "")
    assert "is a committed checkpoint; pass --overwrite to replace it" in refused.err
    assert contents(target) == contents(root / "checkpoint-10")
    error = ckpt("cp", root, tmp_path / "r", "--json").document["error"]
    assert (error["type"], error["exit_code"], error["path"]) == (
        "CheckpointExists",
        1,
        str(target),
    )
    assert ckpt("cp", root, tmp_path / "r", "--overwrite").code == 0
    assert contents(target) == contents(root / "checkpoint-30")


def test_damage_is_told_and_nothing_is_published(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    path = root / "checkpoint-30" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    done = ckpt("cp", root, tmp_path / "r", "--json")
    error = done.document["error"]
    assert (done.code, error["kind"], error["file"]) == (1, "damaged", "model.safetensors")
    assert error["damage"] == "digest"
    assert error["expected"] != error["actual"]
    assert error["expected"] in error["message"] and error["actual"] in error["message"]
    assert list((tmp_path / "r").iterdir()) == []
    path.unlink()
    done = ckpt("cp", root / "checkpoint-30", tmp_path / "r")
    assert done.code == 1 and "model.safetensors is missing" in done.err
    (root / "checkpoint-30" / "checkpoint_manifest.json").unlink()
    done = ckpt("cp", root / "checkpoint-30", tmp_path / "r")
    assert done.code == 1 and "is uncommitted" in done.err
    assert ckpt("cp", root, tmp_path / "r").code == 0  # the newest one that is committed
    assert [info.step for info in scan_root(tmp_path / "r")] == [20]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["{root}"], 2),
        (["{root}", "{tmp}/r", "more"], 2),
        (["{root}", "{tmp}/r", "--threads", "0"], 2),
        (["{root}", "{tmp}/r", "--target-option", "nonsense"], 2),
        (["{tmp}/none", "{tmp}/r"], 3),
        (["{root}", ""], 3),
        (["{root}", "nonsense://r"], 4),
        (["{root}/checkpoint-10", "{root}"], 1),
        (["{root}", "{tmp}/r", "--threads", "1", "--pins"], 0),
    ],
)
def test_exit_codes(
    ckpt: Ckpt, root: Path, tmp_path: Path, arguments: list[str], code: int
) -> None:
    done = ckpt("cp", *(part.format(root=root, tmp=tmp_path) for part in arguments))
    assert done.code == code
    assert (done.out == "") == (code != 0)
    assert len(done.err.splitlines()) == (code != 0)


def test_a_storage_that_refuses_is_4(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    if os.getuid() == 0:
        (tmp_path / "file").write_text("no folder")
        done = ckpt("cp", root, tmp_path / "file" / "r")
    else:
        (tmp_path / "closed").mkdir(mode=0o500)
        done = ckpt("cp", root, tmp_path / "closed" / "r")
    assert done.code in (3, 4) and done.err


def test_pins(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    CheckpointManager(root).pin(30)
    assert ckpt("cp", root, tmp_path / "r").code == 0
    assert [info.pinned for info in scan_root(tmp_path / "r")] == [False]
    assert ckpt("cp", root, tmp_path / "r", "--pins").code == 0
    assert [info.pinned for info in scan_root(tmp_path / "r")] == [True]


def test_options_reach_both_sides_or_one_and_are_not_printed(
    ckpt: Ckpt, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    class Seen(MemoryFileSystem):
        protocol = "seen"
        cachable = False

        def __init__(self, **options: Any) -> None:
            seen.append(("made", options))
            super().__init__()

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return super()._strip_protocol(path.replace("seen://", "memory://"))

    fsspec.register_implementation("seen", Seen, clobber=True)
    first = ckpt(
        "cp",
        root,
        f"seen://{root.parent.name}/one",
        "--storage-option",
        "token=hush-hush",
        "--json",
    )
    assert first.code == 0
    assert {"token": "hush-hush"} in [options for _, options in seen]
    seen.clear()
    second = ckpt(
        "cp",
        f"seen://{root.parent.name}/one",
        f"seen://{root.parent.name}/two",
        "--storage-option",
        "token=hush-hush",
        "--target-option",
        "token=other-one",
        "--target-option",
        "n=3",
    )
    assert second.code == 0
    assert {"token": "other-one", "n": 3} in [options for _, options in seen]
    failed = ckpt(
        "cp", root, "seen://", "--storage-option", "token=hush-hush", "--storage-option", "oops"
    )
    assert failed.code == 2
    for done in (first, second):
        assert "hush-hush" not in done.out + done.err and "other-one" not in done.out + done.err


def test_every_command_reads_what_lies_on_a_server(
    ckpt: Ckpt, s3: Any, root: Path, tmp_path: Path
) -> None:
    url = s3.new_root()
    options: list[str] = []
    for key, value in s3.options.items():
        options += [
            "--storage-option",
            f"{key}={json.dumps(value) if isinstance(value, dict) else value}",
        ]
    assert ckpt("cp", root, url, *options).code == 0
    assert ckpt("cp", root / "checkpoint-10", url, *options).code == 0
    listed = ckpt("ls", url, "--json", *options)
    assert [(e["step"], e["status"]) for e in listed.document["checkpoints"]] == [
        (10, "committed"),
        (30, "committed"),
    ]
    assert ckpt("inspect", url, "--json", *options).document["checkpoint"]["step"] == 30
    verified = ckpt("verify", url, "--all", "--json", *options)
    assert (verified.code, verified.document["ok"], len(verified.document["checkpoints"])) == (
        0,
        True,
        2,
    )
    assert ckpt("cp", url, tmp_path / "back", *options).code == 0
    assert contents(tmp_path / "back/checkpoint-30") == contents(root / "checkpoint-30")
    assert "some-secret" not in "".join(done.out + done.err for done in (listed, verified))


def test_the_rule_is_in_the_help(ckpt: Ckpt) -> None:
    said = " ".join(ckpt("cp", "--help").out.split())
    assert (
        "When the last name of DST is checkpoint-<number>, that is the folder that the copy "
        "becomes" in said
    )
    assert "4 storage error" in said
    assert " cp " in ckpt("--help").out


def test_a_bar_on_a_terminal_and_none_elsewhere(root: Path, tmp_path: Path) -> None:
    """Standard error is a terminal, standard output is not."""
    code = (
        "import sys; from ckpt_tools.main import main; code = main(); assert 'torch' not in "
        "sys.modules; sys.exit(code)"
    )
    said = {}
    for name, extra in (("bar", []), ("json", ["--json"])):
        ours, theirs = pty.openpty()
        done = subprocess.run(
            [sys.executable, "-c", code, "cp", str(root), str(tmp_path / name), *extra],
            stdout=subprocess.PIPE,
            stderr=theirs,
            timeout=60 * patience(),
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        )
        os.close(theirs)
        said[name] = b""
        try:
            while part := os.read(ours, 1 << 16):
                said[name] += part
        except OSError:
            pass
        os.close(ours)
        assert done.returncode == 0
    assert b"checkpoint-30" in said["bar"] and b"\x1b[" in said["bar"]
    assert said["json"] == b""


def test_an_interrupt_leaves_what_the_next_one_takes_up(
    ckpt: Ckpt, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Impatient(Progress):
        def __call__(self, done: int, total: int) -> None:
            if done == total:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cp, "Progress", Impatient)
        done = ckpt("cp", root, tmp_path / "r", "--threads", "1")
    assert (done.code, done.err.strip()) == (130, "ckpt: interrupted")
    assert [info.status for info in scan_root(tmp_path / "r")] == ["partial"]
    document = ckpt("cp", root, tmp_path / "r", "--json").document
    assert (document["already"], document["copied_bytes"]) == (False, 0)
    assert document["kept_bytes"] == open_checkpoint(root / "checkpoint-30").manifest.size_bytes
    assert [info.status for info in scan_root(tmp_path / "r")] == ["committed"]
    assert contents(tmp_path / "r/checkpoint-30") == contents(root / "checkpoint-30")
