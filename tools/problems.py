"""How problems of a checkpoint are told to people: what is wrong with which file, and what to use
instead."""

from __future__ import annotations

from typing import Any

from .render import Block, Line


def problem_lines(
    problems: list[dict[str, Any]], instead: dict[str, Any] | None, checkpoint: dict[str, Any]
) -> list[Block]:
    """Lines for a checkpoint's problems and for the nearest older usable one; none when it is
    good."""
    if checkpoint["status"] == "committed" and not problems:
        return []
    lines: list[Block] = []
    for problem in problems:
        lines += one_problem(problem)
    if not problems and checkpoint["reason"]:
        lines.append(Line(f"  {checkpoint['reason']}", "red"))
    if instead is None:
        lines.append(Line("  no older usable checkpoint beside it", "yellow"))
    else:
        how = "every byte verified" if instead["verified"] else "by its manifest"
        which = f"{instead['step']} of run {instead['run_id']} ({how})"
        lines.append(Line(f"  nearest older usable step: {which}: {instead['url']}", "green"))
    return lines


def one_problem(problem: dict[str, Any]) -> list[Block]:
    lines: list[Block] = [Line(f"  {problem['kind']}: {problem['message']}", "red")]
    place = f"    file {problem['file']}"
    if problem["tensor"]:
        place += f", tensor {problem['tensor']}"
    lines.append(Line(place))
    told = set()
    for what in ("size", "digest"):
        expected, actual = problem[f"expected_{what}"], problem[f"actual_{what}"]
        unit = " bytes" if what == "size" else ""
        if actual is not None:
            told.add(actual)
            lines.append(Line(f"    {what}: expected {expected}{unit}, actual {actual}{unit}"))
        elif expected is not None:
            lines.append(Line(f"    {what}: expected {expected}{unit}"))
    if problem["actual"] is not None and problem["actual"] not in told:
        part = {"digest": "digest of the chunk: ", "header": "digest of the header: "}.get(
            problem["kind"], ""
        )
        lines.append(Line(f"    {part}expected {problem['expected']}, actual {problem['actual']}"))
    return lines
