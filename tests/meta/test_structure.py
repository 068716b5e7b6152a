"""The walls between the rooms of the code."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ckptcore
from ckptcore.testing.processes import patience

REPO = Path(ckptcore.__file__).parent.parent
ENGINE = sorted((REPO / "ckptcore").rglob("*.py"))
PRODUCT = [
    *ENGINE,
    *sorted((REPO / "trainers").rglob("*.py")),
    *sorted((REPO / "tools").rglob("*.py")),
]

# Modules and folders of ckptcore: each imports from those on its own line and on lines before it.
# Old names go when the last module has moved; what is not there yet does no harm.
LINES = """
errors version
arguments
events
format
storage
ranks
catalog
state
replicas
nodes
saving loading
copy
upkeep
tiers
manager
preemption
testing interop integrations
"""
LINE_OF = {room: number for number, line in enumerate(LINES.split("\n")) for room in line.split()}
NEVER = {("saving", "loading"), ("loading", "saving")}  # though they stand on one line
TORCH_FREE = [
    "errors",
    "arguments",
    "events",
    "format",
    "storage",
    "catalog",
    "loading.reader",
    "loading.view",
    "copy",
    "upkeep",
]

# Imports inside a function or under TYPE_CHECKING, by module and what it imports, and why. This
# list may only shrink.
STARTS_FAST = "`import ckptcore` and `ckpt ls` start without it"
OPTIONAL = "an optional package"
LATE: dict[tuple[str, str], str] = {
    ("events", "torch"): STARTS_FAST,
    ("format.values", "numpy"): STARTS_FAST,
    ("interop.optimizer_names", "transformers"): OPTIONAL,
    ("interop.sources", "transformers"): OPTIONAL,
    ("loading.reader", "numpy"): STARTS_FAST,
    ("loading.view", "numpy"): STARTS_FAST,
    ("ranks.communicator", "torch"): STARTS_FAST,
    ("storage.opening", "ckptcore.storage.remote"): "a local root needs no fsspec",
    ("storage.opening", "ckptcore.storage.s3"): "other storages need no S3 client",
    ("storage.urls", "fsspec"): STARTS_FAST,
    ("state.layout", "torch"): "torch.distributed.tensor takes a second to import",
}
# Imports that close a circle, by importer and imported. This list may only shrink.
CIRCLES: set[tuple[str, str]] = set()


def name_of(path: Path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, node: ast.AST) -> Iterator[tuple[str, str]]:
    """(Absolute dotted name of the module, name taken from it or "") for an import statement."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = name_of(path).split(".")
        package = package if path.name == "__init__.py" else package[:-1]
        base = package[: len(package) - node.level + 1] if node.level else []
        start = ".".join([*base, *([node.module] if node.module else [])])
        yield from ((start, alias.name) for alias in node.names)


def imports(path: Path) -> Iterator[str]:
    """Absolute dotted names of what a module imports, wherever in it."""
    for node in ast.walk(parsed(path)):
        for start, name in imported(path, node):
            yield start
            if name:
                yield f"{start}.{name}"


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


PATHS = {name_of(path): path for path in PRODUCT}


def module_of(start: str, name: str) -> str:
    """The module that an import enters: that of the name where it is one."""
    return f"{start}.{name}" if f"{start}.{name}" in PATHS else start


def room(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "ckptcore" and len(parts) > 1 and parts[1] in LINE_OF else None


def ids(path: Path) -> str:
    return str(path.relative_to(REPO))


@pytest.mark.parametrize("path", [p for p in ENGINE if room(name_of(p))], ids=ids)
def test_rooms_import_only_from_those_before_them(path: Path) -> None:
    mine = room(name_of(path))
    if name_of(path) == "ckptcore.ranks.per_node":
        mine = "replicas"  # about to move
    used = {r for r in map(room, imports(path)) if r is not None}
    later = {r for r in used if LINE_OF[r] > LINE_OF[mine] or (mine, r) in NEVER}
    assert later == set(), f"{mine} stands before"


def test_every_module_is_in_a_room() -> None:
    found = {name_of(p).split(".")[1] for p in ENGINE if name_of(p) != "ckptcore"}
    assert found <= LINE_OF.keys()


def late_imports(path: Path) -> Iterator[tuple[str, str]]:
    """(module, what it imports) in functions and under TYPE_CHECKING: modules of ckptcore by
    their names, others by their package's."""
    late = [
        node
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ]
    for part in late:
        for node in ast.walk(part):
            for start, name in imported(path, node):
                found = module_of(start, name)
                own = found.split(".")[0] == "ckptcore"
                yield (
                    name_of(path).removeprefix("ckptcore."),
                    found if own else found.split(".")[0],
                )


@pytest.mark.parametrize("path", ENGINE[1:], ids=ids)
def test_imports_stand_at_the_top(path: Path) -> None:
    """What is imported late is hard to see, and may hide a circle."""
    assert set(late_imports(path)) <= LATE.keys()


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph: dict[str, set[str]] = {}
    for name, path in PATHS.items():
        nodes = [found for node in ast.walk(parsed(path)) for found in imported(path, node)]
        entered = {module_of(start, taken) for start, taken in nodes} & PATHS.keys() - {name}
        graph[name] = {other for other in entered if (name, other) not in CIRCLES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' <- '.join(error.args[1])}")


def test_lists_of_exceptions_have_nothing_that_is_mended() -> None:
    late = {found for path in ENGINE[1:] for found in late_imports(path)}
    assert set(LATE) - late == set(), "imported at the top by now"
    edges = {
        (name, module_of(start, taken))
        for name, path in PATHS.items()
        for node in ast.walk(parsed(path))
        for start, taken in imported(path, node)
    }
    assert CIRCLES - edges == set(), "imported no more"
    rooms = {name_of(path).split(".")[1] for path in ENGINE if name_of(path) != "ckptcore"}
    assert set(LINE_OF) - rooms == set(), "gone by now"


MODULES = sorted(
    name_of(p)
    for p in ENGINE
    if name_of(p).removeprefix("ckptcore.").startswith(tuple(TORCH_FREE)) or p == ENGINE[0]
)


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100 * patience(),
        cwd=REPO,
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
        if path.stem not in ("__init__", "convert")
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
    if name_of(path) == "ckptcore.interop.pickles":  # an Unpickler that finds what is on a list
        assert "pickle.load" not in path.read_text() and "find_class" in path.read_text()
        return
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


def test_only_the_transaction_asks_whether_folders_can_be_renamed() -> None:
    """How a checkpoint comes to be under a root is written in one place; storages say what they
    can."""
    asking = {
        name_of(path).removeprefix("ckptcore.")
        for path in PRODUCT
        if "atomic_rename" in path.read_text() and room(name_of(path)) not in ("storage", "testing")
    }
    assert asking == {"catalog.transaction"}


def test_every_package_is_installed() -> None:
    """A folder that pyproject.toml does not list is there in this copy, and missing in a wheel."""
    listed = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {alias: package for package, alias in listed["package-dir"].items()}
    found = {
        ".".join([folders[parts[0]], *parts[1:]])
        for path in PRODUCT
        if path.name == "__init__.py" and (parts := name_of(path).split("."))
    }
    assert found == set(listed["packages"])
