"""What annotations say of records on disk is what is read and written."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import pytest

from ckptcore.errors import CheckpointCorrupt, UnsafePath
from ckptcore.format.manifest import (
    MALFORMED,
    NOT_STORED,
    OPTIONAL,
    FileName,
    malformed,
    typed,
    written,
)


class Pair(NamedTuple):
    size: int
    name: str


@dataclass
class Inner:
    flag: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Record:
    count: int
    kind: Literal["a", "b"]
    numbers: dict[str, float]
    rows: list[Pair]
    inner: dict[str, Inner]
    note: str | None = None
    lately: int | None = field(default=None, metadata=OPTIONAL)
    known: str = field(default="", metadata=NOT_STORED)
    extra: dict[str, Any] = field(default_factory=dict)


def document(**changes: Any) -> dict[str, Any]:
    made = {
        "count": 3,
        "kind": "b",
        "numbers": {"x": 1, "y": "nan"},
        "rows": [[1, "one"]],
        "inner": {"k": {"flag": True, "newer": [1]}},
        "note": None,
    }
    return {**made, **changes}


def test_a_record_comes_back_with_what_is_not_known() -> None:
    found = typed(Record, document(shiny=1, known="not this one"))
    assert (found.count, found.kind, found.rows, found.note) == (3, "b", [Pair(1, "one")], None)
    assert found.numbers["x"] == 1.0
    assert type(found.numbers["x"]) is float
    assert math.isnan(found.numbers["y"])
    assert found.inner == {"k": Inner(True, {"newer": [1]})}
    assert (found.known, found.lately) == ("", None)
    assert found.extra == {"shiny": 1, "known": "not this one"}
    found.numbers = {}
    again = json.loads(json.dumps(written(found), default=written))
    assert again == document(shiny=1, known="not this one", numbers={})


def test_optional_fields_are_written_where_they_say_something() -> None:
    found = typed(Record, document(lately=0))
    assert (found.lately, written(found)["lately"]) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"count": True}, "count: True is not a whole number"),
        ({"count": -1}, "count: -1 is not a whole number"),
        ({"count": 2**62}, "count: .* is not a whole number below"),
        ({"count": 1.0}, "count: 1.0 is not a whole number"),
        ({"kind": "c"}, "kind: 'c' is not one of a, b"),
        ({"kind": ["a"]}, "kind: .* is not one of a, b"),
        ({"numbers": {"x": True}}, "numbers: x: a bool is stored where a float belongs"),
        ({"numbers": {"x": "1"}}, "numbers: x: '1' is not a number"),
        ({"numbers": {"x": 10**400}}, "numbers: x: .*too large"),
        ({"rows": [[1]]}, r"rows: \[1\] has not 2 items"),
        ({"rows": [[1, "a", 2]]}, "has not 2 items"),
        ({"rows": [[1, 2]]}, "rows: a int is stored where a str belongs"),
        ({"rows": {}}, "rows: a dict is stored where a list belongs"),
        ({"inner": {"k": {"flag": 1}}}, "inner: k: flag: a int is stored where a bool belongs"),
        ({"inner": {"k": {}}}, "inner: k: flag must be there"),
        ({"note": 5}, "note: a int is stored where a str belongs"),
        ({"lately": "1"}, "lately: '1' is not a whole number"),
    ],
)
def test_a_wrong_value_is_named_by_its_field(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(MALFORMED, match=why) as caught:
        typed(Record, document(**changes))
    error = malformed("m: not valid", caught.value, "m", "p")
    assert isinstance(error, CheckpointCorrupt)
    assert str(caught.value) in error.message
    assert (error.file, error.path, error.kind) == ("m", "p", "format")


def test_checks_of_annotations_raise_their_own_errors() -> None:
    def even(number: int) -> int:
        if number % 2:
            raise ValueError(f"{number} is odd")
        return number

    assert typed(list[Annotated[int, even]], [2, 4]) == [2, 4]
    with pytest.raises(ValueError, match="3 is odd"):
        typed(dict[str, Annotated[int, even]], {"a": 3})
    with pytest.raises(UnsafePath):
        typed(dict[FileName, int], {"../a": 3})


def test_what_is_no_record_is_not_written() -> None:
    with pytest.raises(TypeError, match="a object is not JSON"):
        json.dumps({"a": object()}, default=written)
