"""Loading a part: which names of the live state are asked for, and which saved names they are read
from.

A part of a component is loaded as if the checkpoint held just that part, under the names of the
live state, and the live state had nothing else. So everything that follows (checks, reading in
place, other layouts) is the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..arguments import Names, answer_of, shown
from ..errors import InvalidState
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
from ..ranks.communicator import Communicator
from ..ranks.messages import message
from ..state.component import StateComponent
from ..state.modules import ModelState
from ..state.optimizers import OptimizerState, is_by_name
from .placement import LoadedComponent, Partitions, stored_copy_for
from .view import CheckpointView, StoredComponent

Keys = str | Collection[str] | Callable[[str], "bool | str | None"]
Rename = Mapping[str, str] | Callable[[str], str]
Path = tuple[Any, ...]


@message
@dataclass(frozen=True, slots=True)
class Asked:
    """What the other ranks need to know of the keys of a rank: patterns that match nothing there,
    how many names were chosen, and digests of all names and of the chosen ones, by component."""

    unused: list[str]
    chosen: int
    digests: dict[str, list[str]]


class Selection:
    """The `keys` and `rename` of a load, checked; and what they chose on this rank.

    A function is called with each name of the live state, "component/name". rename: see Renaming.
    Raises InvalidState for what is neither.
    """

    def __init__(self, keys: Keys | None, rename: Rename | None = None) -> None:
        self.rename = None if rename is None else Renaming(rename)
        self.names = Names("keys", "*" if keys is None else keys)
        self.by_function = self.names.function is not None
        self.chosen = 0
        self.digests: dict[str, list[str]] = {}
        self.renamed: dict[str, str] = {}

    @property
    def text(self) -> str:
        """What must be equal on all ranks."""
        text = "a function" if self.by_function else repr(sorted(self.names.patterns))
        return text if self.rename is None else f"{text}, renamed by {self.rename.text}"

    def asks_for(self, name: str) -> bool:
        """Whether a name that only the checkpoint has is asked for; functions are for names of the
        live state."""
        return self.names.asks_for(name)

    def source(self, name: str) -> str | None:
        """The saved name that the live `name` is read from; None when it is not asked for."""
        answer = self.names.answer(name)
        if answer is None or isinstance(answer, bool):
            saved = name if self.rename is None else self.rename.saved_name(name)
            return saved if answer else None
        if self.rename is not None and isinstance(answer, str):
            raise InvalidState(
                "the function given as keys says where to read from, and so does rename: give one "
                "of them"
            )
        if isinstance(answer, str) and (answer == name or answer.strip("/").count("/")):
            return answer
        raise InvalidState(
            "the function given as keys must give True, False or a saved name 'component/name'; "
            f"for {name!r} it gives {shown(answer)}"
        )

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
    def asked(self) -> Asked:
        unused = [pattern for pattern in self.names.patterns if pattern in self.names.unused]
        return Asked(unused, self.chosen, self.digests)


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
            live = answer_of("rename", self.function, name)
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
    """A stored component that names are read from: its state, and where they are in it."""

    stored: StoredComponent
    state: Any
    sharded: bool
    paths: dict[str, Path]


@dataclass(slots=True)
class _Wanted:
    """What is asked for of one live component.

    names: all that it has, and where in its state. chosen: live name -> saved name, both with their
    components. sources: the stored components that are read from; None where the live state is to
    stay (on_resize="keep"). missing: chosen names that the checkpoint lacks.
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

    def find(self, name: str) -> tuple[str, _Source, Path] | None:
        """Where a chosen live name is read from: saved name in its component, that, and the path in
        its state. None for one that the checkpoint lacks, which is `missing` then, unless it is in
        a component that stays as it is."""
        saved_key, _, rest = self.chosen[name].partition("/")
        source = self.held.get(saved_key)
        if source is not None and (path := source.paths.get(rest)) is not None:
            return rest, source, path
        if source is not None or saved_key not in self.sources:
            self.missing.append(name)
        return None

    def only_saved(self) -> Iterator[tuple[str, Path]]:
        """Names that are asked for, and that the live state has not, nor anything in their
        place."""
        key, selection = self.component.key, self.selection
        source = self.held.get(key)
        if source is None or selection.by_function:
            return
        here, used = set(self.names.values()), set(self.chosen.values())
        above = {path[:n] for path in here for n in range(len(path))}
        for name, path in _names_in(self.component.stateful, source.state).items():
            known = path in above or any(path[:n] in here for n in range(len(path) + 1))
            full = f"{key}/{name}"
            if not known and full not in used and selection.asks_for(full):
                yield name, path


def chosen_components(
    selection: Selection,
    view: CheckpointView,
    components: Sequence[StateComponent],
    comm: Communicator,
    partitions: Partitions,
    missing: list[str],
) -> Iterator[LoadedComponent]:
    """What `selection` asks for, component by component; `missing` gets the names that the
    checkpoint lacks.

    Raises InvalidState, StateMismatch, CheckpointCorrupt, StorageError.
    """
    if selection.rename is not None:
        selection.rename.learn(_all_saved(view))
    for component in components:
        names = _names_in(component.stateful, component.stateful.state_dict())
        wanted = _Wanted(selection, component, names, selection.choose(component.key, names))
        _open_sources(wanted, view, comm, partitions)
        part = None
        if wanted.chosen and (wanted.held or not wanted.sources):  # else the live state is to stay
            part = _whole(wanted) or _part(wanted)
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
        by_parameter = is_by_name(state) and "state" in state
        names = state["group_of"] if by_parameter else _tree_names(state)
        yield from (f"{key}/{name}" for name in names)


def _open_sources(
    wanted: _Wanted, view: CheckpointView, comm: Communicator, partitions: Partitions
) -> None:
    component, saved = wanted.component, view.manifest.components
    for key in dict.fromkeys(source.partition("/")[0] for source in wanted.chosen.values()):
        if key in saved:
            copy = stored_copy_for(view.manifest, replace(component, key=key), comm, partitions)
            sharded = component.sharded or saved[key].pattern == "SHARDED"
            opened = None if copy is None else _opened(view, key, copy, sharded, component.stateful)
            wanted.sources[key] = opened
        elif key == component.key:
            # Not one of its names is there. It may be lacking where that was said.
            wanted.missing += [key] if component.required else []
            wanted.chosen = {n: s for n, s in wanted.chosen.items() if s.partition("/")[0] != key}


def _opened(view: CheckpointView, key: str, copy: int, sharded: bool, owner: Any) -> _Source:
    stored = view.component(key, copy)
    file = f"{view.url}: component {key!r}"
    state = decode(stored.tree, lambda ref: _From(key, stored, ref), opaque=True, file=file)
    if isinstance(owner, OptimizerState):
        paths: dict[str, Path] = {name: (name,) for name in owner.saved_parts(state)["group_of"]}
    else:
        paths = {**dict(_inner(state)), **_tree_names(state)}
    return _Source(stored, state, sharded, paths)


def _whole(wanted: _Wanted) -> LoadedComponent | None:
    """The stored component, where all of the live one is read from all of it, under the same names.

    It is handed over in its saved shape then, as without `keys`: a loader's state may have grown.
    """
    key, owner, chosen = wanted.component.key, wanted.component.stateful, wanted.chosen
    if len(wanted.sources) != 1 or len(chosen) < len(wanted.names):
        return None
    ((saved_key, source),) = wanted.sources.items()
    if source is None or any(s != saved_key + n[len(key) :] for n, s in chosen.items()):
        return None
    if wanted.selection.by_function:
        whole = not wanted.names or not hasattr(owner, "differences")
    else:
        saved = _names_in(owner, source.state)
        whole = all(wanted.selection.asks_for(f"{key}/{name}") for name in saved)
    return LoadedComponent.of(wanted.component, source.stored, source.sharded) if whole else None


def _tree_names(state: Any) -> dict[str, Path]:
    return {name: keys for name, keys, _ in key_leaves(state)}


def _names_in(owner: Any, state: Any) -> dict[str, Path]:
    """Names of a state's parts, and where they are in it. Those of an optimizer are the names of
    its parameters."""
    if isinstance(owner, OptimizerState):
        return {name: (name,) for name in state["group_of"]}
    return _tree_names(state)


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


def tree_of(taken: Mapping[Path, Any]) -> Any:
    """Nested dicts with these values at these paths."""
    tree: Any = {}
    for path, value in taken.items():
        if not path:
            return value
        inner = tree
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return tree


def _part(wanted: _Wanted) -> LoadedComponent | None:
    """What is asked for, as a component of its own."""
    owner = wanted.component.stateful
    if isinstance(owner, OptimizerState):
        taken = _of_optimizer(wanted, owner)
        unexpected = [name for name, _ in wanted.only_saved()]
        # What a parameter has here counts, also where the checkpoint has nothing for it.
        paths = [path for path in taken if path[0] != "state"]
        paths += [("state", name) for part, name in paths if part == "shapes"]
    else:
        taken, unexpected = _of_tree(wanted, owner)
        paths = [*taken]
    if not taken:
        return None
    held = wanted.held
    stored = replace(_stored(tree_of(taken)), versions=_versions(wanted.chosen, held))
    component = replace(wanted.component, stateful=PartOwner(owner, paths))
    sharded = any(source.sharded for source in held.values())
    return LoadedComponent.of(component, stored, sharded, unexpected)


def _of_tree(wanted: _Wanted, owner: Any) -> tuple[dict[Path, Any], list[str]]:
    """What is taken of nested dicts, leaf by leaf, by where it goes; and names that only the
    checkpoint has."""
    taken: dict[Path, Any] = {}
    for name in wanted.chosen:
        if name == wanted.component.key:
            continue  # it has no names here
        if (found := wanted.find(name)) is not None:
            _, source, path = found
            taken[wanted.names[name.partition("/")[2]]] = _at(source.state, path)
    only_saved = [*wanted.only_saved()]
    if hasattr(owner, "differences"):
        return taken, [name for name, _ in only_saved]
    for _, path in only_saved:
        taken[path] = _at(wanted.held[wanted.component.key].state, path)
    return taken, []


def _of_optimizer(wanted: _Wanted, owner: OptimizerState) -> dict[Path, Any]:
    """The state of some parameters. The options of a group come along where all its parameters do,
    from one group."""
    live = owner.state_dict()
    taken: dict[Path, Any] = {("state",): {}}
    options: dict[int, list[Any]] = {number: [] for number in live["groups"]}
    for name, number in live["group_of"].items():
        full = f"{wanted.component.key}/{name}"
        found = wanted.find(full) if full in wanted.chosen else None
        if found is None:
            options[number].append(None)
            continue
        rest, source, _ = found
        state = source.state
        taken["group_of", name], taken["shapes", name] = number, state["shapes"].get(rest)
        if rest in state["state"]:
            taken["state", name] = state["state"][rest]
        options[number].append(state["groups"].get(state["group_of"][rest], {}))
    if len(taken) == 1:
        return {}
    for number, each in options.items():
        of_one_group = bool(each) and all(one is each[0] for one in each)
        taken["groups", number] = (each[0] if of_one_group else None) or {}
    return taken


def _versions(chosen: Mapping[str, str], sources: Mapping[str, _Source]) -> bytes | None:
    """What was saved beside the state of the modules that are read from, by the names of those that
    read it."""
    tables = {}
    for key, source in sources.items():
        versions = source.stored.versions
        found = None if versions is None else decode(versions)
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


class PartOwner:
    """The owner of a component, with some paths of its state only; what is not asked for stays as
    it is."""

    def __init__(self, whole: Any, paths: Sequence[Path]) -> None:
        self.whole, self.paths = whole, paths
        self.restore_last = bool(getattr(whole, "restore_last", False))

    def _some_of(self, state: Any) -> dict[Path, Any]:
        found = {}
        for path in self.paths:
            try:
                found[path] = _at(state, path)
            except KeyError:  # only the other side has it, or other ranks
                continue
        return found

    def state_dict(self) -> Any:
        return tree_of(self._some_of(self.whole.state_dict()))

    def load_state_dict(self, part: Any) -> None:
        """Modules and optimizers take what they are given; of others all of the state is."""
        if isinstance(self.whole, OptimizerState):
            self.whole.load_part(part)
        elif isinstance(self.whole, ModelState):
            taken = self._some_of(part)
            state: Any = OrderedDict((path[0], value) for path, value in taken.items())
            if (versions := getattr(part, "_metadata", None)) is not None:
                state._metadata = versions
            self.whole.load_state_dict(state)
        elif taken := self._some_of(part):
            self.whole.load_state_dict(_with(self.whole.state_dict(), taken))


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
