"""The walls between the rooms of the code."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptcore

REPO = Path(ckptcore.__file__).parent.parent
ENGINE = sorted((REPO / "ckptcore").rglob("*.py"))
PRODUCT = [
    *ENGINE,
    *sorted((REPO / "trainers").rglob("*.py")),
    *sorted((REPO / "tools").rglob("*.py")),
]

# Each room imports from those before it. retention: root only.
ORDER = [
    "errors",
    "arguments",
    "format",
    "storage",
    "attempts",
    "root",
    "state",
    "ranks",
    "saving",
    "loading",
    "transfer",
    "copying",
    "coordinator",
    "retention",
    "events",
    "choice",
    "tiers",
    "tiered",
    "saves",
    "manager",
    "preemption",
]
OUTSIDE = {"interop", "testing"}  # on top of all the rooms
TORCH_FREE = [
    "errors",
    "arguments",
    "format",
    "storage",
    "root",
    "loading.reader",
    "loading.view",
    "saving.publish",
    "transfer",
    "copying",
    "choice",
]


def name_of(path: Path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Absolute dotted names of what a module imports, wherever in it."""
    package = (
        name_of(path).split(".") if path.name == "__init__.py" else name_of(path).split(".")[:-1]
    )
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield start
            yield from (f"{start}.{alias.name}" for alias in node.names)


def room(name: str) -> str | None:
    parts = name.split(".")
    return (
        parts[1]
        if parts[0] == "ckptcore" and len(parts) > 1 and parts[1] in [*ORDER, *OUTSIDE]
        else None
    )


def ids(path: Path) -> str:
    return str(path.relative_to(REPO))


@pytest.mark.parametrize("path", [p for p in ENGINE if room(name_of(p)) in ORDER], ids=ids)
def test_rooms_import_only_from_those_before_them(path: Path) -> None:
    mine = room(name_of(path))
    used = {r for r in map(room, imports(path)) if r is not None}
    assert not used & OUTSIDE
    assert used <= set(ORDER[: ORDER.index(mine) + 1]), f"{mine} imports {used}"
    if mine in ("saving", "loading"):
        assert not used & ({"saving", "loading"} - {mine})
    if mine == "retention":
        assert used <= {"errors", "arguments", "storage", "root"}


def test_every_module_is_in_a_room() -> None:
    strays = [
        name_of(p) for p in ENGINE if p.parent == REPO / "ckptcore" and p.name != "__init__.py"
    ]
    assert {name.split(".")[1] for name in strays} <= set(ORDER)
    folders = {
        p.name for p in (REPO / "ckptcore").iterdir() if p.is_dir() and p.name != "__pycache__"
    }
    assert folders <= {*ORDER, *OUTSIDE}


MODULES = sorted(
    name_of(p)
    for p in ENGINE
    if name_of(p).removeprefix("ckptcore.").startswith(tuple(TORCH_FREE)) or p == ENGINE[0]
)


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=REPO
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_reading_needs_no_torch() -> None:
    assert "ckptcore.loading.view" in MODULES
    assert "ckptcore.format.values" in MODULES
    names = ", ".join(MODULES)
    assert run(f"import sys, {names}; print('torch' in sys.modules)") == "False"
    assert (
        run(
            "import sys; from ckptcore import open_checkpoint, scan_root, errors; print('torch' "
            "in sys.modules)"
        )
        == "False"
    )


def test_the_command_needs_no_torch() -> None:
    if not (REPO / "tools").exists():
        pytest.skip("this copy has no tools")
    names = ", ".join(
        f"ckpt_tools.{path.stem}"
        for path in (REPO / "tools").glob("*.py")
        if path.stem != "__init__"
    )
    assert run(f"import sys, {names}; print('torch' in sys.modules)") == "False"


def test_inspecting_a_checkpoint_needs_no_torch(tmp_path: Path) -> None:
    import torch

    ckptcore.CheckpointManager(tmp_path).save(1, {"m": {"w": torch.ones(2), "when": {1, 2}}})
    code = (
        "import sys; from ckptcore import open_checkpoint, scan_root\n"
        f"view = open_checkpoint({str(tmp_path / 'checkpoint-1')!r})\n"
        f"assert scan_root({str(tmp_path)!r})[0].step == 1\n"
        "assert view.values('m')['when'] == {1, 2} and view.verify() == [] and "
        "len(view.tensors()) == 1\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    assert run(code) == "False False"


@pytest.mark.parametrize("path", PRODUCT, ids=ids)
def test_modules_have_names_that_say_something(path: Path) -> None:
    assert not {part.lower() for part in name_of(path).split(".")} & {
        "utils",
        "util",
        "helpers",
        "helper",
        "common",
        "misc",
    }
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree) or not tree.body, "a module says what it is for"


FORBIDDEN = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


@pytest.mark.parametrize("path", PRODUCT, ids=ids)
def test_product_code_never_pickles(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & FORBIDDEN
    if room(name_of(path)) == "interop":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("torch.load", "torch.save", "eval", "exec", "__import__"), (
                f"line {node.lineno}"
            )
            assert "allow_pickle" not in {keyword.arg for keyword in node.keywords}, (
                f"line {node.lineno}"
            )


@pytest.mark.parametrize("path", [p for p in PRODUCT if p not in ENGINE], ids=ids)
def test_trainers_and_tools_use_public_names_only(path: Path) -> None:
    for name in imports(path):
        if name.split(".")[0] == "ckptcore":
            assert name == "ckptcore" or name.removeprefix("ckptcore.") in ckptcore.__all__, name
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "ckptcore"
        ):
            assert node.attr in ckptcore.__all__, f"line {node.lineno}: ckptcore.{node.attr}"


def test_the_frame_is_there() -> None:
    makefile = (REPO / "Makefile").read_text()
    for target in ("demo", "test", "bench", "lint"):
        assert f"\n{target}:" in makefile
    ci = REPO / ".ci" / "run"
    assert "make test" in ci.read_text()
    assert ci.stat().st_mode & 0o100
    for name in ("README.md", "pyproject.toml", "constraints.txt", ".gitignore"):
        assert (REPO / name).exists(), name
