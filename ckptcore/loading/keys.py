"""Loading a part: which names of the live state are asked for, and which saved names they are read
from.

A part of a component is loaded as if the checkpoint held just that part, under the names of the
live state, and the live state had nothing else. So everything that follows (checks, reading in
place, other layouts) is the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from ..arguments import shown
from ..errors import InvalidState, StateMismatch
from ..format.digest import content_digest
from ..format.layout import Box, LogicalTensor
from ..format.values import (
    TensorRef,
    codec_of,
    decode,
    encode,
    join_path,
    key_leaves,
    keyed,
    part_of,
)
from ..state.component import StateComponent
from ..state.modules import ModelState
from ..state.optimizers import OptimizerState
from ..state.tree import Differences
from .placement import LoadedComponent, RankPosition, stored_copy_for
from .view import CheckpointView, StoredComponent

Keys = str | Collection[str] | Callable[[str], "bool | str | None"]
Rename = Mapping[str, str] | Callable[[str], str]
Path = tuple[Any, ...]


class Selection:
    """The `keys` and `rename` of a load, checked; and what they chose on this rank.

    A pattern asks for the names that it matches and for all that lies below them: "model",
    "model/*" and "m*" ask for the component "model". `*` matches `/`, too. A function is called
    with each name of the live state, "component/name". rename: see Renaming. Raises InvalidState
    for what is neither.
    """

    def __init__(self, keys: Keys | None, rename: Rename | None = None) -> None:
        self.rename = None if rename is None else Renaming(rename)
        keys = "*" if keys is None else keys
        self.function = keys if callable(keys) else None
        found: Any = () if callable(keys) else (keys,) if isinstance(keys, str) else keys
        if not isinstance(found, list | tuple | set | frozenset | KeysView):
            raise InvalidState(
                f"keys must be a name, a pattern, a list of them or a function, not {shown(keys)}"
            )
        self.patterns: list[str] = [*found]
        if self.function is None and not (
            self.patterns and all(isinstance(p, str) and p for p in self.patterns)
        ):
            raise InvalidState(
                f"keys must be one or more names or patterns such as 'model/*', not {shown(keys)}"
            )
        self.used: set[str] = set()
        self.chosen = 0
        self.digests: dict[str, list[str]] = {}
        self.renamed: dict[str, str] = {}

    @property
    def text(self) -> str:
        """What must be equal on all ranks."""
        text = "a function" if self.function is not None else repr(sorted(self.patterns))
        return text if self.rename is None else f"{text}, renamed by {self.rename.text}"

    def source(self, name: str) -> str | None:
        """The saved name that the live `name` is read from; None when it is not asked for."""
        if self.function is None:
            matching = [pattern for pattern in self.patterns if matches(pattern, name)]
            self.used.update(matching)
            return self._saved_name(name) if matching else None
        try:
            answer = self.function(name)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise InvalidState(f"the function given as keys fails for {name!r} ({what})") from error
        if answer is None or isinstance(answer, bool):
            return self._saved_name(name) if answer else None
        if self.rename is not None and isinstance(answer, str):
            raise InvalidState(
                "the function given as keys says where to read from, and so does rename: give one "
                "of them"
            )
        if isinstance(answer, str) and (answer == name or answer.strip("/").count("/")):
            return answer
        raise InvalidState(
            "the function given as keys must give True, False or a saved name 'component/name'; "
            f"for {name!r} it "
            f"gives {shown(answer)}"
        )

    def _saved_name(self, name: str) -> str:
        return name if self.rename is None else self.rename.saved_name(name)

    def asks_for(self, name: str) -> bool:
        """Whether a name that only the checkpoint has is asked for; functions are for names of the
        live state."""
        return any(matches(pattern, name) for pattern in self.patterns)

    def choose(self, key: str, names: Collection[str]) -> dict[str, str]:
        """Live name -> saved name, both with the component, for what is asked for among `names` of
        a component."""
        # A component without names (an empty dict, a fresh loader) goes by its own.
        asked = [f"{key}/{name}" for name in names] or [key]
        chosen = {name: source for name in asked if (source := self.source(name)) is not None}
        self.chosen += len(chosen)
        pairs = "\n".join(f"{name}\t{source}" for name, source in sorted(chosen.items()))
        self.digests[key] = [
            content_digest(text.encode("utf-8", "surrogatepass"))
            for text in ("\n".join(sorted(asked)), pairs)
        ]
        self.renamed |= {name: source for name, source in chosen.items() if name != source}
        return chosen

    @property
    def answer(self) -> dict[str, Any]:
        """What the other ranks need to know: patterns that match nothing here, how much was chosen,
        and what."""
        unused = [pattern for pattern in self.patterns if pattern not in self.used]
        return {"unused": unused, "chosen": self.chosen, "digests": self.digests}


def matches(pattern: str, name: str) -> bool:
    if name == pattern or name.startswith(f"{pattern}/") or fnmatchcase(name, pattern):
        return True
    above = pattern.removesuffix("/*")
    return above != pattern and fnmatchcase(name, above)


class Renaming:
    """From saved names to those of the live state, both "component/name".

    A dict has beginnings of names, saved -> live; the first that fits counts. A function is called
    with each saved name, and gives the live one. A live name that comes of no saved one is read
    from its own. Raises InvalidState.
    """

    def __init__(self, rename: Any) -> None:
        self.function = rename if callable(rename) else None
        self.beginnings: dict[str, str] = {}
        if self.function is None:
            good = isinstance(rename, Mapping) and rename
            if not good or not all(
                isinstance(text, str) and text for pair in rename.items() for text in pair
            ):
                raise InvalidState(
                    "rename must be a dict of beginnings of names, saved -> live, such as "
                    f"{{'model/module.': 'model/'}}, or a function of a saved name, not "
                    f"{shown(rename)}"
                )
            self.beginnings = dict(rename)
        self._by_live_name: dict[str, str] = {}

    @property
    def text(self) -> str:
        """What must be equal on all ranks."""
        return "a function" if self.function is not None else repr(sorted(self.beginnings.items()))

    def learn(self, saved_names: Iterable[str]) -> None:
        """Find out what a function makes of the names of a checkpoint. Raises InvalidState."""
        if self.function is None:
            return
        for name in saved_names:
            try:
                live = self.function(name)
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                raise InvalidState(
                    f"the function given as rename fails for {name!r} ({what})"
                ) from error
            if not isinstance(live, str) or not live:
                raise InvalidState(
                    "the function given as rename must give the name 'component/name' of the live "
                    f"state; for {name!r} it gives {shown(live)}"
                )
            if (other := self._by_live_name.setdefault(live, name)) != name:
                raise InvalidState(f"rename gives {other!r} and {name!r} the same name {live!r}")

    def saved_name(self, live: str) -> str:
        for before, after in self.beginnings.items():
            if live.startswith(after):
                saved = before + live[len(after) :]
                first = next(start for start in self.beginnings if saved.startswith(start))
                if first == before:
                    return saved
        return self._by_live_name.get(live, live)


@dataclass(frozen=True, slots=True)
class _From:
    """A tensor of a stored component, wherever it is put."""

    key: str
    stored: StoredComponent
    ref: TensorRef


@dataclass(frozen=True, slots=True)
class _Source:
    """A stored component that names are read from: its state, and the paths in it by name."""

    stored: StoredComponent
    state: Any
    sharded: bool


@dataclass(slots=True)
class _Wanted:
    """What is asked for of one live component.

    names: all that it has, and where in its state. chosen: live name -> saved name, both with their
    components.
    sources: the stored components that are read from; None where the live state is to stay
    (on_resize="keep").
    missing: chosen names that the checkpoint lacks.
    """

    selection: Selection
    component: StateComponent
    names: dict[str, Path]
    chosen: dict[str, str]
    sources: dict[str, _Source | None] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def held(self) -> dict[str, _Source]:
        return {key: source for key, source in self.sources.items() if source is not None}

    @property
    def sharded(self) -> bool:
        return any(source.sharded for source in self.held.values())

    def stays(self, saved_name: str) -> bool:
        """Whether it is in a component that stays as it is, which is no lack."""
        key = saved_name.partition("/")[0]
        return key in self.sources and self.sources[key] is None

    def part(self, owner: Any, tree: Any, unexpected: list[str]) -> LoadedComponent:
        versions = _versions(self.chosen, {key: source.stored for key, source in self.held.items()})
        stored = replace(_stored(tree), versions=versions)
        return LoadedComponent(
            replace(self.component, stateful=owner), stored, self.sharded, unexpected
        )


def chosen_components(
    selection: Selection,
    view: CheckpointView,
    components: Sequence[StateComponent],
    position: RankPosition,
    missing: list[str],
) -> Iterator[LoadedComponent]:
    """What `selection` asks for, component by component; `missing` gets the names that the
    checkpoint lacks.

    Raises InvalidState, StateMismatch, CheckpointCorrupt, StorageError.
    """
    if selection.rename is not None:
        selection.rename.learn(_all_saved(view))
    for component in components:
        names = _live_names(component.stateful, component.stateful.state_dict())
        wanted = _Wanted(selection, component, names, selection.choose(component.key, names))
        _open_sources(wanted, view, position)
        part = _part(wanted)
        missing += wanted.missing
        if part is not None:
            yield part


def _all_saved(view: CheckpointView) -> Iterator[str]:
    """The names of all components of a checkpoint, each with that of its component."""
    for key in view.manifest.components:
        held = (n for n, copy in enumerate(view.manifest.copies(key)) if view.manifest.holds(copy))
        if (number := next(held, None)) is None:
            continue
        tree = view.component(key, number).tree
        state = decode(tree, opaque=True, lenient=True, file=f"{view.url}: component {key!r}")
        by_parameter = isinstance(state, dict) and state.keys() >= _OPTIMIZER_PARTS
        names = state["group_of"] if by_parameter else _tree_names(state)
        yield from (f"{key}/{name}" for name in names)


def _part(wanted: _Wanted) -> LoadedComponent | None:
    if not wanted.chosen or (wanted.sources and not wanted.held):
        return None  # nothing is asked for, or the live state is to stay
    if (whole := _whole(wanted)) is not None:
        return LoadedComponent(wanted.component, whole.stored, whole.sharded)
    if isinstance(wanted.component.stateful, OptimizerState):
        return _part_of_optimizer(wanted)
    return _part_of_tree(wanted)


def _open_sources(wanted: _Wanted, view: CheckpointView, position: RankPosition) -> None:
    component, saved = wanted.component, view.manifest.components
    for key in dict.fromkeys(source.partition("/")[0] for source in wanted.chosen.values()):
        if key in saved:
            copy = stored_copy_for(view.manifest, replace(component, key=key), position)
            sharded = component.sharded or saved[key].pattern == "SHARDED"
            wanted.sources[key] = None if copy is None else _opened(view, key, copy, sharded)
        elif key == component.key:
            # Not one of its names is there. It may be lacking where that was said.
            wanted.missing += [key] if component.required else []
            wanted.chosen = {n: s for n, s in wanted.chosen.items() if s.partition("/")[0] != key}


def _opened(view: CheckpointView, key: str, copy: int, sharded: bool) -> _Source:
    stored = view.component(key, copy)
    file = f"{view.url}: component {key!r}"
    state = decode(stored.tree, lambda ref: _From(key, stored, ref), opaque=True, file=file)
    return _Source(stored, state, sharded)


def _whole(wanted: _Wanted) -> _Source | None:
    """The stored component, where all of the live one is read from all of it, under the same names.

    It is handed over in its saved shape then, as without `keys`: a loader's state may have grown.
    """
    key, owner, chosen = wanted.component.key, wanted.component.stateful, wanted.chosen
    if len(wanted.sources) != 1 or len(chosen) < len(wanted.names):
        return None
    ((saved_key, source),) = wanted.sources.items()
    if source is None or any(s != saved_key + n[len(key) :] for n, s in chosen.items()):
        return None
    if wanted.selection.function is not None:
        return None if wanted.names and hasattr(owner, "differences") else source
    saved = _saved_names(owner, source.state)
    return source if all(wanted.selection.asks_for(f"{key}/{name}") for name in saved) else None


def _tree_names(state: Any) -> dict[str, Path]:
    return {name: keys for name, keys, _ in key_leaves(state)}


def _live_names(owner: Any, state: Any) -> dict[str, Path]:
    """Names of a state's parts, and where they are in it. Those of an optimizer are the names of
    its parameters."""
    if isinstance(owner, OptimizerState):
        return {name: (name,) for name in state["group_of"]}
    return _tree_names(state)


_OPTIMIZER_PARTS = {"state", "group_of", "shapes", "groups"}


def _saved_names(owner: Any, state: Any) -> dict[str, Path]:
    if not isinstance(owner, OptimizerState):
        return _tree_names(state)
    groups = state.get("group_of") if isinstance(state, dict) else None
    wanted = ("state", "shapes", "groups")
    if not isinstance(groups, dict) or not all(
        isinstance(state.get(name), dict) for name in wanted
    ):
        raise StateMismatch(
            "the saved state is not that of an OptimizerState (no groups of named parameters)"
        )
    return {name: (name,) for name in groups}


def _inner(state: Any, path: Path = (), keys: Path = ()) -> Iterator[tuple[str, Path]]:
    """Name and path of the dicts in a state that is a dict."""
    for key, item in (keyed(state) or {}).items():
        step = part_of(key)
        if keyed(item) is not None:
            yield join_path((*path, step)), (*keys, key)
            yield from _inner(item, (*path, step), (*keys, key))


def _at(state: Any, path: Path) -> Any:
    for key in path:
        state = (keyed(state) or {})[key]
    return state


def _put(tree: dict[Any, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _part_of_tree(wanted: _Wanted) -> LoadedComponent | None:
    """A part of nested dicts, leaf by leaf."""
    key, held = wanted.component.key, wanted.held
    paths = {k: {**dict(_inner(s.state)), **_tree_names(s.state)} for k, s in held.items()}
    taken: dict[Path, Any] = {}
    for name, saved_name in wanted.chosen.items():
        saved_key, _, rest = saved_name.partition("/")
        if name == key:
            continue  # it has no names here
        if rest in paths.get(saved_key, ()):
            path = wanted.names[name.partition("/")[2]]
            taken[path] = _at(held[saved_key].state, paths[saved_key][rest])
        elif not wanted.stays(saved_name):
            wanted.missing.append(name)
    unexpected = []
    for name, path in _only_saved(wanted):
        if hasattr(wanted.component.stateful, "differences"):
            unexpected.append(name)
        else:
            taken[path] = _at(held[key].state, path)
    if not taken:
        return None
    tree: Any = {}
    for path, value in taken.items():
        if path:
            _put(tree, path, value)
        else:
            tree = value
    return wanted.part(_owner(wanted.component.stateful, list(taken)), tree, unexpected)


def _versions(chosen: Mapping[str, str], sources: Mapping[str, StoredComponent]) -> bytes | None:
    """What was saved beside the state of the modules that are read from, by the names of those that
    read it."""
    tables = {}
    for key, stored in sources.items():
        found = None if stored.versions is None else decode(stored.versions)
        tables[key] = found.get("") if isinstance(found, dict) else None
    made: dict[str, Any] = {}
    for name, saved in chosen.items():
        key, _, rest = saved.partition("/")
        table = tables.get(key)
        if not isinstance(table, dict):
            return None  # an earlier version has saved it
        module, origin = (text.rpartition(".")[0] for text in (name.partition("/")[2], rest))
        while True:  # with the modules around, as far as both are named alike
            if origin in table:
                made[module] = table[origin]
            (module, _, a), (origin, _, b) = module.rpartition("."), origin.rpartition(".")
            if a != b or not a:
                break
    return encode({"": made})


def _only_saved(wanted: _Wanted) -> Iterator[tuple[str, Path]]:
    """Leaves that are asked for, and that the live state has not, nor anything in their place."""
    key = wanted.component.key
    if key not in wanted.held or not wanted.selection.patterns:
        return
    here, used = set(wanted.names.values()), set(wanted.chosen.values())
    above = {path[:n] for path in here for n in range(len(path))}
    for name, path, _ in key_leaves(wanted.held[key].state):
        known = path in above or any(path[:n] in here for n in range(len(path) + 1))
        full = f"{key}/{name}"
        if not known and full not in used and wanted.selection.asks_for(full):
            yield name, path


def _part_of_optimizer(wanted: _Wanted) -> LoadedComponent | None:
    """The state of some parameters. The options of a group come along where all its parameters do,
    from one group."""
    key, owner, held = wanted.component.key, wanted.component.stateful, wanted.held
    named = {k: _saved_names(owner, source.state) for k, source in held.items()}
    live = owner.state_dict()
    tree: dict[str, Any] = {"state": {}, "group_of": {}, "shapes": {}, "groups": {}}
    origins: dict[int, set[Any]] = {number: set() for number in live["groups"]}
    for name, number in live["group_of"].items():
        saved_name = wanted.chosen.get(f"{key}/{name}")
        saved_key, _, rest = (saved_name or "").partition("/")
        if rest not in named.get(saved_key, ()):
            if saved_name is not None and not wanted.stays(saved_name):
                wanted.missing.append(f"{key}/{name}")
            origins[number].add(None)
            continue
        state = held[saved_key].state
        tree["group_of"][name], tree["shapes"][name] = number, state["shapes"].get(rest)
        if rest in state["state"]:
            tree["state"][name] = state["state"][rest]
        origins[number].add((saved_key, state["group_of"][rest]))
    if not tree["group_of"]:
        return None
    for number, found in origins.items():
        origin = next(iter(found)) if len(found) == 1 else None
        options = {} if origin is None else held[origin[0]].state["groups"].get(origin[1], {})
        tree["groups"][number] = options
    used = set(wanted.chosen.values())
    extra = [
        n
        for n in named.get(key, ())
        if n not in wanted.names
        and f"{key}/{n}" not in used
        and wanted.selection.asks_for(f"{key}/{n}")
    ]
    return wanted.part(_OptimizerPart(owner, set(tree["group_of"])), tree, extra)


def _stored(tree: Any) -> StoredComponent:
    """A component that is made of tensors of others, named by where they are in `tree`."""
    tensors: list[LogicalTensor] = []
    origins: list[_From] = []
    first: dict[tuple[int, int], int] = {}

    def leaf(path: Path, value: Any) -> TensorRef | None:
        if type(value) is not _From:
            return None
        number, kept = value.ref.index, value.stored.tensors
        if not 0 <= number < len(kept):
            raise ValueError(f"the tree refers to tensor {number} of {len(kept)}")
        tensor = kept[number]
        target = number if tensor.alias_of is None else tensor.alias_of
        at = first.setdefault((id(value.stored), target), len(tensors))
        alias = None if at == len(tensors) else at
        layout = kept[target].layout if alias is None else None
        name = join_path(path) if path else "value"
        tensors.append(LogicalTensor(name, tensor.dtype, tensor.shape, layout, alias))
        origins.append(value)
        return TensorRef(len(tensors) - 1, value.ref.numpy)

    def find(number: int, box: Box) -> Iterator[Any]:
        return origins[number].stored.pieces(origins[number].ref.index, box)

    encoded = encode(tree, leaf)
    return StoredComponent(encoded, tensors, find, [origin.key for origin in origins])


class _PartOwner:
    """The owner of a component, with some paths of its state only; what is not asked for stays as
    it is."""

    def __init__(self, whole: Any, paths: Sequence[Path]) -> None:
        self.whole, self.paths = whole, paths
        self.restore_last = bool(getattr(whole, "restore_last", False))

    def state_dict(self) -> Any:
        state = self.whole.state_dict()
        tree: dict[Any, Any] = {}
        for path in self.paths:
            try:
                value = _at(state, path)
            except KeyError:  # only the checkpoint has it
                continue
            if not path:
                return value
            _put(tree, path, value)
        return tree

    def load_state_dict(self, part: Any) -> None:
        taken = {}
        for path in self.paths:
            try:
                taken[path] = _at(part, path)
            except KeyError:  # a part that belongs to other ranks
                continue
        if isinstance(self.whole, ModelState):  # takes what it is given
            state: Any = OrderedDict((path[0], value) for path, value in taken.items())
            if (versions := getattr(part, "_metadata", None)) is not None:
                state._metadata = versions
            self.whole.load_state_dict(state)
        elif taken:
            self.whole.load_state_dict(_with(self.whole.state_dict(), taken))


class _JudgedOwner(_PartOwner):
    """One that knows what fits its state."""

    def differences(self, saved: Any) -> Differences:
        return _fit(self.whole, saved)


class _OptimizerPart:
    """The state of some parameters of an optimizer."""

    def __init__(self, whole: OptimizerState, names: set[str]) -> None:
        self.whole, self.names = whole, names
        self.allocate = whole.allocate

    def state_dict(self) -> dict[str, Any]:
        state = self.whole.state_dict()
        some = {
            part: {n: v for n, v in state[part].items() if n in self.names}
            for part in ("state", "group_of", "shapes")
        }
        return {**some, "groups": state["groups"]}

    def differences(self, saved: Any) -> Differences:
        return _fit(self.whole, saved)

    def load_state_dict(self, part: Mapping[str, Any]) -> None:
        live = self.whole.state_dict()
        groups = {
            number: part["groups"].get(number) or options
            for number, options in live["groups"].items()
        }
        self.whole.load_state_dict({**live, "state": {}, **part, "groups": groups})


def _fit(whole: Any, part: Any) -> Differences:
    """How what is there fits; what is missing or unexpected was found out when the part was
    chosen."""
    return Differences([], [], 1, whole.differences(part).mismatched)


def _owner(whole: Any, paths: Sequence[Path]) -> _PartOwner:
    return (_JudgedOwner if hasattr(whole, "differences") else _PartOwner)(whole, paths)


def _with(state: Any, taken: Mapping[Path, Any]) -> Any:
    """A copy of nested dicts with other values at some paths. What is not on the way to them is the
    same object."""
    if () in taken:
        return taken[()]
    below: dict[Any, dict[Path, Any]] = {}
    for path, value in taken.items():
        below.setdefault(path[0], {})[path[1:]] = value
    items = keyed(state) or {}
    new = {
        key: _with(item, below.pop(key)) if key in below else item for key, item in items.items()
    }
    new |= {key: _with({}, rest) for key, rest in below.items()}
    codec = None if type(state) is dict else codec_of(state)
    return new if codec is None else codec.decode(new)
