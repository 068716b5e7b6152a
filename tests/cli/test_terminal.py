"""What a person at a terminal sees: tables that fit, ages, colours, and none with NO_COLOR."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from ckpt_tools import render
from ckpt_tools.report import fitting
from ckpt_tools.watch import text_of

from ckptcore import open_checkpoint
from ckptcore.testing.processes import patience

from .conftest import Ckpt, report_of


def drawn(blocks: list[render.Block], width: int) -> list[str]:
    return render.drawn(blocks, render.Screen(width)).splitlines()


def test_ls_on_a_wide_terminal(root: Path) -> None:
    (root / "checkpoint-10" / "checkpoint_manifest.json").unlink()
    lines = drawn(report_of("ls", root).blocks, 140)
    assert lines[0].split() == ["step", "name", "status", "size", "created", "run", "metrics"]
    last = re.split(r"\s{2,}", lines[4].strip())
    assert last[0:3] == ["30", "checkpoint-30", "committed (latest)"]
    assert last[3].endswith("KiB") and last[4].endswith("ago") and last[5] == "run-a"
    assert "loss=0.0333333" in last[6]
    assert lines[5].startswith("checkpoint-10: no checkpoint_manifest.json")


def test_ls_on_a_narrow_terminal_keeps_names_whole(root: Path) -> None:
    lines = drawn(report_of("ls", root).blocks, 80)
    assert all(len(line) <= 80 for line in lines)
    assert any("checkpoint-30  committed (latest)" in line for line in lines)


def cells_of(root: Path, *asked: str) -> set[tuple[str, ...]]:
    lines = drawn(report_of("inspect", root / "checkpoint-20", *asked).blocks, 120)
    assert lines[0].startswith("checkpoint-20")
    return {tuple(re.split(r"\s{2,}", line.strip())) for line in lines}


def test_inspect_is_one_screen(root: Path) -> None:
    cells = cells_of(root, "--verify")
    assert len(cells) < 24
    assert ("status", "committed, every byte verified") in cells
    assert ("step", "20") in cells and ("world size", "1") in cells
    plain = open_checkpoint(root / "checkpoint-20").values_bytes(
        "model"
    )  # names, and what ties the tensors
    assert ("model", "GLOBAL", "BF16,F32", "3", f"{30 + plain} B", "0") in cells
    assert ("loss", "0.05") in cells
    assert not any("note" in text for cell in cells for text in cell)


def test_each_question_has_one_answer(root: Path) -> None:
    cells = cells_of(root, "--tensors", "*", "--values", "train")
    assert ("model/layer.bias", "BF16", "3", "6 B", "model.safetensors") in cells
    assert ("nested/none", "None") in cells and ("total: 3 tensors, 30 B",) in cells
    assert ("world size", "1") not in cells
    assert ("metadata/note", '"step 20 é"') in cells_of(root, "--metadata")
    assert ("model/layer", "2", "BF16,F32", "30 B") in cells_of(root, "--depth", "1")
    files = {cell[0] for cell in cells_of(root, "--files")}
    assert {"model.safetensors", "index.rank00000.msgpack"} <= files


def test_texts_are_no_markup(root: Path) -> None:
    rows: list[list[render.Cell | str]] = [
        [f"tensor-{n}", "[bold]no markup[/bold]"] for n in range(1000)
    ]
    table = render.Table("tensors", [render.Column("tensor"), render.Column("note")], rows)
    lines = drawn([table], 80)
    assert len(lines) == 1003 and lines[-1] == "  tensor-999  [bold]no markup[/bold]"


def test_columns_that_do_not_fit_are_folded_and_then_stand_below_each_other() -> None:
    columns = "name!, why, size>=size_bytes"
    rows = [{"name": "checkpoint-1", "why": "it was never committed", "size_bytes": 5}]
    table = render.table("", columns, rows)
    assert drawn([table], 60)[2:] == ["checkpoint-1  it was never committed   5 B"]
    folded = drawn([table], 30)
    assert [line.rstrip() for line in folded[2:]] == [
        "checkpoint-1  it was       5 B",
        "              never",
        "              committed",
    ]
    assert all(len(line) <= 30 for line in folded)
    assert drawn([table], 20) == [
        "  name  checkpoint-1",
        "  why   it was never committed",
        "  size  5 B",
    ]
    assert render.drawn([table], render.Screen()).splitlines()[1:] == [
        "checkpoint-1  it was never committed   5 B"
    ]


def test_damage_is_told_on_a_terminal(root: Path) -> None:
    shard = root / "checkpoint-30" / "model.safetensors"
    shard.write_bytes(shard.read_bytes() + b"x")
    lines = drawn(report_of("verify", root).blocks, 200)
    assert lines[0] == "checkpoint-30  damaged"
    assert any("nearest older usable step: 20" in line for line in lines)


def on_a_terminal(root: Path, **environment: str) -> str:
    """What `ckpt ls` writes to a real pseudo-terminal."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "ckpt_tools.main", "ls", str(root)]
    base = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")
    }
    environment = {**base, "TERM": "xterm-256color", "COLUMNS": "100", **environment}
    process = subprocess.Popen(command, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    seen = b""
    try:
        while chunk := os.read(master, 4096):
            seen += chunk
    except OSError:
        pass  # how Linux says that the other side has closed
    os.close(master)
    assert process.wait(timeout=60 * patience()) == 0
    return seen.decode()


def test_colours_and_no_color(root: Path) -> None:
    coloured = on_a_terminal(root)
    assert "\x1b[32mcommitted" in coloured and "ago" in coloured and "─" in coloured
    plain = on_a_terminal(root, NO_COLOR="1")
    assert "committed" in plain and not re.search(r"\x1b\[3\dm", plain)


def test_units() -> None:
    sizes = {
        0: "0 B",
        1023: "1023 B",
        1536: "1.5 KiB",
        5 << 20: "5.0 MiB",
        3 << 30: "3.0 GiB",
        2 << 40: "2.00 TiB",
    }
    assert {nbytes: render.size(nbytes) for nbytes in sizes} == sizes
    assert render.size(None) == "-"
    assert render.ranks([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8" and render.ranks([]) == "-"
    assert [render.age(s) for s in (3, 90, 7200, 200000)] == ["3 s", "1 min", "2 h", "2 d"]


def test_an_event_of_watch_goes_on_below_where_the_terminal_ends(ckpt: Ckpt, root: Path) -> None:
    said = ckpt("watch", root, "--timeout", "0", "--json")
    event = json.loads(said.out)
    whole = text_of(event, render.Screen())
    lines = text_of(event, render.Screen(60)).splitlines()
    assert "\n" not in whole and len(lines) > 1 and all(len(line) <= 60 for line in lines)
    assert all(line.startswith(" " * 21) for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == " ".join(whole.split())


def test_names_of_tiles_are_cut_at_their_parts() -> None:
    assert fitting("layers.0.mlp.up", 15) == "layers.0.mlp.up"
    assert fitting("layers.0.mlp.up", 14) == "…0.mlp.up"
    assert fitting("layers.0.mlp.up", 6) == "…up" and fitting("embedding", 5) == ""
