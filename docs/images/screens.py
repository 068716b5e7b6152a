"""Draws inspect.svg, watch.svg and report.png: `python docs/images/screens.py` saves a small run of
four ranks, asks `ckpt`, and writes them beside this file. The page needs Chromium."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path

import torch

from ckptcore import CheckpointManager, Communicator, Shard, SharingPattern, StateComponent
from ckptcore.testing.ranks import run_ranks

HERE = Path(__file__).parent
RANKS, LAYERS, WIDTH = 4, 6, 64
COLUMNS, LINE, LETTER, EDGE = 84, 20, 8.43, 18
# Colours for light pages, and for dark ones, of what a terminal calls by these numbers.
LIGHT = {"text": "#1f2328", "2": "#59636e", "31": "#cf222e", "32": "#1a7f37", "33": "#9a6700"}
LIGHT |= {"36": "#1b7c83", "fill": "#f6f8fa"}
DARK = {"text": "#e6edf3", "2": "#9198a1", "31": "#ff7b72", "32": "#3fb950", "33": "#d29922"}
DARK |= {"36": "#39c5cf", "fill": "#161b22"}


def rows(*shape: int, rank: int) -> Shard:
    """The rows of a rank, of a tensor of this shape."""
    part = shape[0] // RANKS
    offset = (rank * part, *(0 for _ in shape[1:]))
    return Shard(torch.randn(part, *shape[1:]), shape, offset)


def state(step: int, rank: int) -> list[StateComponent]:
    names = {"attn.qkv": (3 * WIDTH, WIDTH), "attn.out": (WIDTH, WIDTH)}
    names |= {"mlp.up": (4 * WIDTH, WIDTH), "mlp.down": (WIDTH, 4 * WIDTH)}
    shapes = {f"layers.{n}.{name}.weight": s for n in range(LAYERS) for name, s in names.items()}
    shapes["embed.weight"] = (8 * WIDTH, WIDTH)
    model = {name: rows(*shape, rank=rank) for name, shape in shapes.items()}
    moments = {
        name: {key: rows(*shape, rank=rank) for key in ("exp_avg", "exp_avg_sq")}
        for name, shape in shapes.items()
    }
    return [
        StateComponent("model", model, SharingPattern.SHARDED),
        StateComponent("optimizer", {"state": moments}, SharingPattern.SHARDED),
        StateComponent("scheduler", {"last_epoch": step}, SharingPattern.REPLICATED),
        StateComponent("loader", {"position": step * 8 + rank}, SharingPattern.PER_RANK),
        StateComponent("rng", {"torch": torch.get_rng_state()}, SharingPattern.PER_RANK),
    ]


def save(root: Path, steps: range, pause: float = 0.0) -> None:
    def one(comm: Communicator) -> None:
        with CheckpointManager(root, comm=comm, run_id="run-a") as manager:
            for step in steps:
                time.sleep(pause)
                metrics = {"eval_loss": 4 / step**0.25, "accuracy": 1 - 9 / step**0.5}
                manager.save(step, state(step, comm.rank), metrics=metrics)

    run_ranks(RANKS, one)


def command(folder: Path, words: str) -> subprocess.Popen[str]:
    """`ckpt` as it draws on a terminal."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    environment.pop("NO_COLOR", None)
    line = [sys.executable, "-m", "ckpt_tools", *shlex.split(words)]
    return subprocess.Popen(line, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE)


def said(folder: Path, words: str) -> str:
    out, _ = command(folder, words).communicate(timeout=60)
    return f"\x1b[1m$ ckpt {words}\x1b[0m\n" + out.replace(str(folder), "/home/me")


def spans(line: str) -> str:
    """A line with escape codes as pieces of text with classes."""
    found, classes = [], ""
    for part in re.split(r"(\x1b\[[0-9;]*m)", line):
        if part.startswith("\x1b["):
            codes = part[2:-1].split(";")
            classes = "" if codes == ["0"] else f"{classes} {' '.join('c' + c for c in codes)}"
        elif part:
            found.append(f'<tspan class="{classes.strip()}">{escape(part)}</tspan>')
    return "".join(found)


def style(colours: dict[str, str]) -> str:
    named = "".join(f".c{code}{{fill:{c}}}" for code, c in colours.items() if code.isdigit())
    return f"text{{fill:{colours['text']}}}rect{{fill:{colours['fill']}}}{named}"


def picture(text: str, title: str) -> str:
    """Each line is stretched to whole letters, so that columns stand below each other in any
    font."""
    lines = text.rstrip("\n").split("\n")
    bare = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    width = max(map(len, bare)) * LETTER + 2 * EDGE
    height = len(lines) * LINE + 2 * EDGE
    drawn = [
        f'<text x="{EDGE}" y="{EDGE + LINE * (n + 0.75):g}" xml:space="preserve" '
        f'textLength="{len(plain) * LETTER:.1f}">{spans(line)}</text>'
        for n, (line, plain) in enumerate(zip(lines, bare, strict=True))
        if plain
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
            'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{style(LIGHT)}.c1{{font-weight:600}}"
            f"@media (prefers-color-scheme:dark){{{style(DARK)}}}</style>",
            '<rect width="100%" height="100%" rx="8"/>',
            *drawn,
            "</svg>",
            "",
        ]
    )


def photographed(page: Path, target: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser is not None, "the page needs Chromium"
    how = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=900,1250"]
    with tempfile.TemporaryDirectory() as profile:
        line = [browser, *how, f"--user-data-dir={profile}", f"--screenshot={target}"]
        subprocess.run([*line, page.as_uri()], check=True, capture_output=True, timeout=100)


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        root = folder / "runs" / "a"
        save(root, range(100, 400, 100))
        text = said(folder, "inspect runs/a")
        text += "\n" + said(folder, "inspect runs/a --tensors 'model/*' --depth 2")
        (HERE / "inspect.svg").write_text(picture(text, "ckpt inspect"), encoding="utf-8")
        follower = command(folder, "watch runs/a --interval 0.1 --timeout 15")
        time.sleep(2)
        save(root, range(400, 600, 100), pause=1)
        time.sleep(1)
        follower.terminate()
        out, _ = follower.communicate(timeout=60)
        text = f"\x1b[1m$ ckpt watch runs/a\x1b[0m\n{out}"
        (HERE / "watch.svg").write_text(picture(text, "ckpt watch"), encoding="utf-8")
        said(folder, "report runs/a -o report.html")
        page = folder / "report.html"
        page.write_text(page.read_text().replace(str(folder), "/home/me"))
        photographed(page, HERE / "report.png")


if __name__ == "__main__":
    main()
