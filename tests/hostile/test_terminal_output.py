"""Names, keys and texts in a checkpoint never steer the terminal of whoever looks at it with
`ckpt`."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from ckpt_tools.main import main

from ckptcore import CheckpointManager
from ckptcore.format.values import encode

# Sets a title, clears the screen, rings, goes back, turns the text around, breaks the line; C0, C1
# and beyond.
EVIL = "\x1b]0;owned\x07\x1b[2J\x08\x9b31m\x7f\u202e\u2028\r\n\t[red]"


def manifest(document):
    """In everything that is free text, and as a file's name where that is allowed."""
    for field in ("run_id", "attempt_id", "checkpoint_id", "created", "training_args_hash"):
        document[field] = EVIL
    for field in ("versions", "environment", "metadata"):
        document[field] = {EVIL: EVIL}
    document["metrics"] = {EVIL: 1.5}
    document["timings"] = {EVIL: 0.5}
    document["groups"] = {EVIL: [[0]]}
    document[EVIL] = EVIL
    allowed = "".join(c for c in EVIL if c > "\x7f") + ".safetensors"
    document["files"][allowed] = [7, "0" * 32, 0]
    document["components"]["plain"]["metadata"] = {EVIL: EVIL}


def names(raw):
    for number, row in enumerate(raw["components"]["plain"]["tensors"]):
        row[1] = f"{number}{EVIL}"


def values(raw):
    raw["components"]["plain"]["tree"] = encode(
        {EVIL: EVIL, 1: [EVIL, {(EVIL,): EVIL.encode()}], "n": 7**6000, 7**6000: 1}
    )


def check(text: str) -> None:
    assert text.isascii() or all(c.isprintable() for c in text if c > "\x7f"), ascii(text)
    assert not {c for c in text if (c < " " and c != "\n") or c == "\x7f"}, ascii(text)


COMMANDS = {
    "ls": ["ls", "{root}"],
    "inspect": ["inspect", "{folder}"],
    "tensors": ["inspect", "{folder}", "--tensors", "*"],
    "values": ["inspect", "{folder}", "--values", "plain"],
    "verify": ["verify", "{folder}"],
    "all": ["verify", "--all", "{root}"],
    "no such component": ["inspect", "{folder}", "--values", EVIL],
    "no such tensor": ["inspect", "{folder}", "--tensors", EVIL],
    "no such option": ["ls", "{root}", "--" + EVIL],
    "no such folder": ["ls", "{root}/" + EVIL],
}


@pytest.mark.parametrize("form", ["plain", "rich", "json"])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_no_control_characters(crafted, capfd, monkeypatch, command, form):
    crafted.index(names)
    crafted.index(values)
    crafted.manifest(manifest)
    (crafted.folder / EVIL.replace("/", "")).write_bytes(b"not ours")
    damaged = crafted.root / "checkpoint-2"
    shutil.copytree(crafted.folder, damaged)
    (damaged / "plain.safetensors").write_bytes(b"x")
    monkeypatch.setenv("NO_COLOR", "1")
    if form == "rich":
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "dumb")
    for folder in (crafted.folder, damaged):
        arguments = [
            part.format(root=crafted.root, folder=folder) if part is not EVIL else part
            for part in command
        ]
        code = main([*arguments, *(["--json"] if form == "json" else [])])
        out, err = capfd.readouterr()
        assert code in (0, 1, 2, 3)
        assert out + err
        check(out.replace("\x1b[0m", "").replace("\x1b[1m", "") if form == "rich" else out)
        check(err)
        if form == "json" and out:
            json.loads(out)


def test_what_was_meant_is_still_told(tmp_path, capfd):
    """Escaped, not dropped: names that differ in such characters alone can be told apart."""
    CheckpointManager(tmp_path).save(
        1, {"m": {"a\x1b[2J": torch.ones(1), "a\x9b2J": torch.ones(2), "größe": torch.ones(3)}}
    )
    assert main(["inspect", str(tmp_path / "checkpoint-1"), "--tensors", "*"]) == 0
    out = capfd.readouterr().out
    assert "m/a\\x1b[2J" in out
    assert "m/a\\x9b2J" in out
    assert "m/größe" in out
