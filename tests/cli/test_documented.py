"""docs/cli.md: every key that is printed is documented, every documented key is printed; every
command is there; help, completion and silence in a pipe."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_tools.cli import COMMANDS

from ckptcore import CheckpointManager

from .conftest import Ckpt, save_run
from .test_copies import four  # noqa: F401  (a fixture)

DOCUMENT = Path(__file__).parents[2] / "docs" / "cli.md"
KEY = re.compile(r"- `(\w+)(\[\])?`(?: → (\w+))?: \S")


def documented() -> dict[str, dict[str, str | None]]:
    """By section: keys, and the entity that each is described as."""
    found: dict[str, dict[str, str | None]] = {}
    for section in DOCUMENT.read_text().split("\n### ")[1:]:
        title, _, body = section.partition("\n")
        keys = {m[1]: m[3] for m in map(KEY.match, body.splitlines()) if m}
        for name in title.split(", "):
            found[name] = keys
    return found


SECTIONS = documented()


def walk(value: Any, section: str, printed: dict[str, set[str]]) -> None:
    """Collect the keys that are printed, and refuse those that are not documented."""
    for item in value if isinstance(value, list) else [value]:
        if item is None:
            continue
        unknown = item.keys() - SECTIONS[section].keys()
        assert not unknown, f"{section}: {sorted(unknown)} are not in docs/cli.md"
        printed.setdefault(section, set()).update(item)
        for key, entity in SECTIONS[section].items():
            if entity is not None and key in item:
                walk(item[key], entity, printed)


def lines(root: Path, four: Path, tmp_path: Path) -> list[list[str]]:  # noqa: F811
    """Command lines that between them print every key."""
    one, other = root / "checkpoint-10", root / "checkpoint-20"
    damaged = tmp_path / "damaged"
    save_run(damaged, run_id="d")
    (damaged / "checkpoint-30" / "model.safetensors").write_bytes(b"")
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    found = [
        ["ls", root],
        ["inspect", root, "--tensors", "--depth", "1", "--ranks", "--values", "train"],
        ["inspect", damaged],
        ["inspect", damaged / "checkpoint-30"],
        ["inspect", four],
        ["show", four, "table/grid", "--stats"],
        ["show", root, "train/step"],
        ["diff", one, other, "--stats"],
        ["diff", tmp_path / "shape" / "checkpoint-1", one],
        ["plan", four, "--world-size", "2"],
        ["verify", root],
        ["verify", damaged],
        ["doctor", damaged],
        ["watch", root, "--timeout", "0"],
        ["report", root, "-o", tmp_path / "r.html"],
        ["pin", one],
        ["unpin", one],
        ["rm", one],
        ["prune", root, "--keep", "last=1", "--partials"],
        ["cp", one, tmp_path / "copy"],
        ["import", tmp_path / "w.pt", tmp_path / "imported"],
        ["export", one, tmp_path / "exported"],
    ]
    return [[str(word) for word in line] for line in found]


def test_documented_and_printed_keys_are_the_same(
    ckpt: Ckpt,
    root: Path,
    four: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    with CheckpointManager(tmp_path / "shape") as manager:
        manager.save(1, {"model": {"layer.bias": torch.ones(9)}})
    (root / "checkpoint-40.partial-a-b-1-2-3").mkdir()
    printed: dict[str, set[str]] = {}
    commands = set()
    for line in lines(root, four, tmp_path):
        done = ckpt(*line, "--json")
        assert done.out, (line, done.err)
        commands.add(line[0])
        several = done.out.splitlines() if line[0] == "watch" else [done.out]
        for document in map(json.loads, several):
            assert document["schema"] == 1
            walk(document, line[0], printed)
    assert commands == set(COMMANDS) - {"completion"}
    for section, keys in printed.items():
        missing = SECTIONS[section].keys() - keys
        assert not missing, f"{section}: {sorted(missing)} are documented, and never printed"
    assert set(SECTIONS) - {"Values"} == set(printed) | {"copy"}


def test_every_command_is_in_the_table_and_has_two_examples(ckpt: Ckpt) -> None:
    table = DOCUMENT.read_text().split("Exit codes:")[0]
    for name in COMMANDS:
        assert f"`{name} " in table or f"`{name}`" in table, name
        said = ckpt(name, "--help").out
        assert len(re.findall(rf"^ .*\bckpt {name}\b", said.split("Examples:")[1], re.M)) == 2, name
    error = ckpt("ls", "/nowhere/at/all", "--json")
    assert error.document["schema"] == 1 and error.document["error"]["kind"] == "not_found"


def test_a_command_that_there_is_not_has_a_neighbour(ckpt: Ckpt) -> None:
    done = ckpt("inspct", "x")
    assert done.code == 2 and "did you mean inspect?" in done.err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(ckpt: Ckpt, shell: str) -> None:
    assert "_CKPT_COMPLETE" in ckpt("completion", shell).out
    words = {"bash": "ckpt ins", "zsh": "ckpt ins", "fish": "ins"}[shell]
    environment = {**os.environ, "_CKPT_COMPLETE": f"{shell}_complete", "COMP_WORDS": words}
    environment["COMP_CWORD"] = "ins" if shell == "fish" else "1"
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tools"], env=environment, capture_output=True, text=True
    )
    assert "inspect" in done.stdout and done.stderr == ""
    assert ckpt("completion", "tcsh").code == 2


def test_nothing_but_the_answer_in_a_pipe(root: Path) -> None:
    for line in (["ls"], ["inspect"], ["verify"], ["doctor"], ["diff"]):
        done = subprocess.run(
            [sys.executable, "-m", "ckpt_tools", *line, str(root)], capture_output=True, text=True
        )
        assert done.returncode == 0 and done.stderr == "" and "\x1b" not in done.stdout


# ---------------------------------------------------------------- the page

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """What a page is made of; fails where tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page_of(ckpt: Ckpt, path: Path, target: Path) -> Page:
    assert ckpt("report", path, "-o", target).code == 0
    return Page(target.read_text(encoding="utf-8"))


def test_the_page_is_whole_and_alone(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    page = page_of(ckpt, root, tmp_path / "r.html")
    tags = [tag for tag, _ in page.tags]
    assert "script" not in tags and "link" not in tags and "img" not in tags
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids)) == 6
    targets = [attrs["href"] for _, attrs in page.tags if "href" in attrs]
    assert targets == [f"#{name}" for name in ids]
    text = "\n".join(page.texts)
    assert "loss" in text and "since checkpoint-20 (step 20)" in text and "run-a" in text
    focusable = [attrs for tag, attrs in page.tags if attrs.get("tabindex") == "0"]
    assert focusable and all(attrs["aria-label"] for attrs in focusable)
    assert sum("lowest loss" in (a.get("aria-label") or "") for t, a in page.tags if t == "g") == 1
    assert not list(tmp_path.glob("*.partial-*"))


def test_tiles_have_the_areas_of_their_bytes(ckpt: Ckpt, tmp_path: Path) -> None:
    sizes = {"a.x": 600, "b.x": 300, "c.x": 100}
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, {"m": {name: torch.zeros(n) for name, n in sizes.items()}})
    page = page_of(ckpt, tmp_path / "root", tmp_path / "r.html")
    tiles = [attrs for tag, attrs in page.tags if tag == "rect"]
    areas = sorted(float(t["width"] or 0) * float(t["height"] or 0) for t in tiles)[-3:]
    whole = 960 * 360
    assert [round(area / whole, 1) for area in areas] == [0.1, 0.3, 0.6]
    assert all(float(t["x"] or 0) + float(t["width"] or 0) <= 960.1 for t in tiles)


def test_names_cannot_become_markup(ckpt: Ckpt, tmp_path: Path) -> None:
    evil = "</td><script>alert(1)</script>\x1b[2J\"'&"
    with CheckpointManager(tmp_path / "root", run_id="r") as manager:
        for step in (1, 2):
            state = {"m": {evil: torch.full((3,), float(step)), "v": {evil: step}}}
            manager.save(step, state, metrics={evil: step}, metadata={evil: evil})
    page = page_of(ckpt, tmp_path / "root", tmp_path / "r.html")
    assert "script" not in [tag for tag, _ in page.tags]
    assert "\x1b" not in (tmp_path / "r.html").read_text()
    assert any("<script>alert(1)</script>" in text for text in page.texts)


def test_four_ranks_and_one_checkpoint_alone(ckpt: Ckpt, four: Path, tmp_path: Path) -> None:  # noqa: F811
    page = page_of(ckpt, four, tmp_path / "r.html")
    assert "there is no checkpoint before it" in page.texts
    heads = [text for text in page.texts if text in ("own", "table", "index")]
    assert {"own", "table", "index"} <= set(heads)
    assert ckpt("report", four, "-o", tmp_path / "no" / "where.html").code in (3, 4)
