"""Draws life-of-a-checkpoint.svg: `python docs/images/draw.py` writes it beside this file."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

WIDTH, HEIGHT = 960, 330
# Colours for light pages, and for dark ones.
LIGHT = {
    "text": "#1f2328",
    "soft": "#59636e",
    "line": "#8c959f",
    "fill": "#f6f8fa",
    "main": "#0969da",
}
DARK = {
    "text": "#e6edf3",
    "soft": "#9198a1",
    "line": "#6e7681",
    "fill": "#161b22",
    "main": "#4493f8",
}


@dataclass(frozen=True)
class Box:
    """A step: where it stands, its name, and two lines about it."""

    x: int
    y: int
    name: str
    lines: tuple[str, str]
    main: bool = False

    width, height = 160, 84


SAVE = (
    Box(20, 70, "state", ("modules, optimizers,", "loaders, plain values")),
    Box(210, 70, "capture", ("every tensor by name;", "all ranks check it")),
    Box(400, 70, "stage", ("one private copy;", "training goes on")),
    Box(590, 70, "write", ("each rank its part,", "with digests")),
    Box(780, 70, "commit", ("the manifest, last:", "now it exists"), main=True),
)
RESTORE = (
    Box(780, 226, "find", ("the newest manifest", "that verifies")),
    Box(590, 226, "check", ("names, shapes, sizes;", "the same on all ranks")),
    Box(400, 226, "read", ("only what each rank", "needs, verified")),
    Box(210, 226, "apply", ("into the live tensors,", "in place")),
    Box(20, 226, "go on", ("at the step after it,", "bit for bit"), main=True),
)


def style(colours: dict[str, str]) -> str:
    return (
        f".t{{fill:{colours['text']}}}.s{{fill:{colours['soft']}}}"
        f".b{{fill:{colours['fill']};stroke:{colours['line']}}}"
        f".m{{fill:{colours['fill']};stroke:{colours['main']};stroke-width:2.5}}"
        f".a{{stroke:{colours['line']};fill:none}}.h{{fill:{colours['line']}}}"
    )


def drawn(box: Box) -> list[str]:
    middle = box.x + box.width // 2
    return [
        f'<rect class="{"m" if box.main else "b"}" x="{box.x}" y="{box.y}" rx="8" '
        f'width="{box.width}" height="{box.height}"/>',
        f'<text class="t" x="{middle}" y="{box.y + 27}" font-size="17" font-weight="600">'
        f"{escape(box.name)}</text>",
        *(
            f'<text class="s" x="{middle}" y="{box.y + 50 + 18 * n}" font-size="13">'
            f"{escape(line)}</text>"
            for n, line in enumerate(box.lines)
        ),
    ]


def arrow(start: Box, end: Box) -> str:
    y = start.y + start.height // 2
    right = end.x > start.x
    first, last = (start.x + start.width, end.x) if right else (start.x, end.x + end.width)
    back = -8 if right else 8
    return (
        f'<path class="a" d="M{first} {y}H{last + back}"/>'
        f'<path class="h" d="M{last} {y}l{back} -5v10z"/>'
    )


def picture() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" text-anchor="middle" role="img">',
        "<title>A save: state, capture, stage, write, commit. A restore: find, check, read, apply, "
        "go on.</title>",
        f"<style>{style(LIGHT)}@media (prefers-color-scheme:dark){{{style(DARK)}}}</style>",
        '<text class="t" x="20" y="34" font-size="18" font-weight="600" text-anchor="start">Save'
        "</text>",
        '<text class="s" x="490" y="34" font-size="13">save_async returns after "stage"</text>',
        '<path class="a" d="M575 44v120" stroke-dasharray="4 4"/>',
        '<text class="s" x="765" y="34" font-size="13">in the background</text>',
        '<text class="t" x="20" y="204" font-size="18" font-weight="600" text-anchor="start">'
        "Restore</text>",
    ]
    for boxes in (SAVE, RESTORE):
        parts += [line for box in boxes for line in drawn(box)]
        parts += [arrow(*pair) for pair in pairwise(boxes)]
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("life-of-a-checkpoint.svg").write_text(picture())
