"""Damage to a file that several checkpoints have in common: found in each of them, and mended in all
at once."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ckpt_tools.main import main as command

import ckptcore
from ckptcore import CheckpointManager
from tests.reuse.test_reuse import ADAPTER, BASE, Tuned, restored, shared, values


def test_damage_to_a_shared_file_is_found_in_every_checkpoint(tmp_path: Path) -> None:
    model = Tuned()
    with CheckpointManager(tmp_path, reuse=True) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"model": model})
        with (tmp_path / "checkpoint-1" / BASE).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\1")
        for step in (1, 2):
            problems = ckptcore.open_checkpoint(tmp_path / f"checkpoint-{step}").verify()
            assert [problem.file for problem in problems] == [BASE]
        ckpt.save(3, {"model": model})  # the file was touched, so it is written anew
    assert shared(tmp_path, 2, 3) == {ADAPTER}
    assert ckptcore.open_checkpoint(tmp_path / "checkpoint-3").verify() == []


def flip(path: Path) -> None:
    """One bit, without a trace in the times of the file."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints 1 to 3 have the base in one file, 4 and 5 in another one."""
    model = Tuned(1.0)
    with CheckpointManager(tmp_path / "root", reuse=True, refresh_every=3) as ckpt:
        for step in range(1, 6):
            model.step()
            ckpt.save(step, {"model": model})
    return tmp_path / "root"


def json_of(capsys: pytest.CaptureFixture, *words: Any) -> tuple[int, dict[str, Any]]:
    code = command([*map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_verify_says_who_has_the_damaged_file(root: Path, capsys: pytest.CaptureFixture) -> None:
    flip(root / "checkpoint-4" / BASE)
    code, document = json_of(capsys, "verify", root, "--all")
    assert code == 1
    found = {each["checkpoint"]["name"]: each for each in document["checkpoints"]}
    assert [name for name, each in found.items() if not each["ok"]] == [
        "checkpoint-4",
        "checkpoint-5",
    ]
    assert found["checkpoint-5"]["same_files"] == {BASE: [f"checkpoint-4/{BASE}"]}
    assert found["checkpoint-4"]["same_files"] == {BASE: [f"checkpoint-5/{BASE}"]}
    assert found["checkpoint-1"]["same_files"] == {}
    assert command(["verify", str(root / "checkpoint-5")]) == 1
    out = capsys.readouterr().out
    assert f"{BASE} is one file with checkpoint-4/{BASE}: damaged there, too" in out
    (mend,) = found["checkpoint-5"]["mend"]
    source, target = (root / name / BASE for name in ("checkpoint-1", "checkpoint-5"))
    assert shlex.split(mend) == ["cp", str(source), str(target)]
    assert f"mend: {mend}" in out


def test_one_command_mends_all(root: Path, capsys: pytest.CaptureFixture) -> None:
    flip(root / "checkpoint-5" / BASE)
    code, document = json_of(capsys, "doctor", root, "--verify")
    assert code == 1
    first, second = document["findings"]
    assert (first["name"], second["name"]) == ("checkpoint-5", "checkpoint-4")
    assert f"one file with checkpoint-4/{BASE}: damaged there, too" in first["message"]
    assert f"it has the damaged checkpoint-5/{BASE}, too" in second["message"]
    assert first["mend"][0] == second["mend"][0]
    subprocess.run(first["mend"][0], shell=True, check=True)
    for step in range(1, 6):
        assert ckptcore.open_checkpoint(root / f"checkpoint-{step}").verify() == []
    assert values(restored(root, 4))[0] == 1.0
    assert command(["doctor", str(root), "--verify"]) == 0


def test_no_command_where_the_bytes_are_nowhere_else(
    root: Path, capsys: pytest.CaptureFixture
) -> None:
    """The other file of the same bytes is damaged as well."""
    flip(root / "checkpoint-1" / BASE)
    flip(root / "checkpoint-5" / BASE)
    _, document = json_of(capsys, "doctor", root, "--verify")
    first, second = document["findings"]
    assert [mend.split()[1] for mend in first["mend"]] == ["rm"]
    assert [mend.split()[1] for mend in second["mend"]] == ["rm"]
    _, document = json_of(capsys, "verify", root, "--all")
    assert [each["ok"] for each in document["checkpoints"]] == [False] * 5
    shares = [len(each["same_files"].get(BASE, ())) for each in document["checkpoints"]]
    assert shares == [2, 2, 2, 1, 1]


def test_a_copy_on_a_tier_mends_each_by_itself(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for step in (4, 5):
        name = f"checkpoint-{step}"
        ckptcore.copy_checkpoint(root / name, tmp_path / "tier" / name)
    flip(root / "checkpoint-1" / BASE)
    flip(root / "checkpoint-5" / BASE)
    code, document = json_of(capsys, "doctor", root, "--verify", "--tier", tmp_path / "tier")
    assert code == 1
    for finding in document["findings"]:
        words = shlex.split(finding["mend"][0])
        assert words[:2] == ["ckpt", "cp"]
        assert command(words[1:]) == 0
    for step in (4, 5):
        assert ckptcore.open_checkpoint(root / f"checkpoint-{step}").verify() == []


def test_damage_beside_what_is_shared(root: Path, capsys: pytest.CaptureFixture) -> None:
    flip(root / "checkpoint-5" / ADAPTER)
    _, document = json_of(capsys, "verify", root / "checkpoint-5")
    assert document["checkpoints"][0]["same_files"] == {}
    _, document = json_of(capsys, "doctor", root, "--verify")
    assert [finding["name"] for finding in document["findings"]] == ["checkpoint-5"]
