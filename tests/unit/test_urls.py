"""Texts that name storages: which are URLs, what lies below and around them, and what of them is
shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ckptcore.storage.urls import join_url, local_path, masked_url, mistaken_url, split_url

LETTERS = st.characters(exclude_characters="/:", exclude_categories=["Cs", "Cc"])
NAMES = st.text(LETTERS, min_size=1, max_size=8).filter(lambda name: name not in (".", ".."))
PATHS = st.lists(NAMES, max_size=3).map("/".join)
SCHEMES = st.sampled_from(["memory", "s3", "gs", "https", "git+ssh", "file", "zip"])
URLS = st.builds(
    lambda scheme, top, path: f"{scheme}://{top}{path}", SCHEMES, st.sampled_from(["", "/"]), PATHS
)
AROUND = st.one_of(
    PATHS.map(lambda path: f"/{path}"),
    URLS,
    st.builds(
        lambda caches, url: "".join(f"{c}::" for c in caches) + url,
        st.lists(st.sampled_from(["simplecache", "filecache", "dir"]), min_size=1, max_size=2),
        URLS,
    ),
    st.builds(
        lambda path, url: f"zip://{path}::{url}",
        PATHS,
        URLS | PATHS.map(lambda path: f"/{path}.zip"),
    ),
)


@given(AROUND, NAMES)
@example("/", "run")
@example("memory://", "run")
@example("memory:///", "run")
@example("simplecache::memory://", "run")
@example("zip://::/x/r.zip", "run")
def test_what_was_joined_is_split_again(around: str, name: str) -> None:
    joined = join_url(around, name)
    # `sftp://user@host` is a host with who asks it, and nothing lies around it.
    assume("@" not in name or not re.search("://(::|$)", around))
    assert split_url(joined) == (around, name)
    assert join_url(around, "") == around
    for slashes in ("/", "//"):
        with_slashes = join_url(around, name + slashes)
        assert split_url(with_slashes) == (around, name)
    deeper = join_url(around, f"{name}/deeper")
    assert deeper == join_url(joined, "deeper")
    assert split_url(deeper) == (joined, "deeper")
    assert (local_path(joined) is None) == (local_path(around) is None)


@pytest.mark.parametrize(
    ("url", "path", "joined"),
    [
        ("run", "checkpoint-1", "run/checkpoint-1"),
        ("/runs//", "a/b", "/runs/a/b"),
        ("/", "a", "/a"),
        ("s3://bucket", "a/b", "s3://bucket/a/b"),
        ("s3://bucket/run//", "a", "s3://bucket/run/a"),
        ("memory://", "a", "memory://a"),
        ("memory:///", "a", "memory:///a"),
        ("http://host:8000/run", "a", "http://host:8000/run/a"),
        ("simplecache::s3://bucket/run", "a", "simplecache::s3://bucket/run/a"),
        (
            "simplecache::zip://run::s3://bucket/r.zip",
            "a",
            "simplecache::zip://run/a::s3://bucket/r.zip",
        ),
        ("zip://::/x/r.zip", "a/b", "zip://a/b::/x/r.zip"),
        ("zip://run/::file:///x/r.zip", "a", "zip://run/a::file:///x/r.zip"),
        ("my::run", "a", "my::run/a"),
    ],
)
def test_what_lies_below(url: str, path: str, joined: str) -> None:
    assert join_url(url, path) == joined


@pytest.mark.parametrize(
    ("url", "around", "name"),
    [
        ("/runs/a/", "/runs", "a"),
        ("/runs/a/../b", "/runs", "b"),
        ("/a", "/", "a"),
        ("/", "/", ""),
        ("s3://bucket/run/a//", "s3://bucket/run", "a"),
        ("s3://bucket", "s3://", "bucket"),
        ("memory:///a", "memory:///", "a"),
        ("memory://", "memory://", ""),
        ("file:///a/b", "file:///a", "b"),
        ("file:///a::x/b", "file:///a::x", "b"),
        ("zip://a::file:///x::y.zip", "zip://::file:///x::y.zip", "a"),
        ("simplecache::s3://bucket/run", "simplecache::s3://bucket", "run"),
        ("zip://run/a::/x/r.zip", "zip://run::/x/r.zip", "a"),
        ("zip://::/x/r.zip", "zip://::/x/r.zip", ""),
    ],
)
def test_what_lies_around(url: str, around: str, name: str) -> None:
    assert split_url(url) == (around, name)


def test_local_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert split_url("a") == (str(tmp_path), "a")
    assert split_url("my:run/a") == (f"{tmp_path}/my:run", "a")
    assert split_url("~/a") == ("/home/somebody", "a")
    assert split_url(".") == (str(tmp_path.parent), tmp_path.name)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        *(
            (text, text)
            for text in (
                "",
                "run",
                "/x",
                "c:/x",
                "my:run/x",
                "a::b",
                "a::b/c://d",
                "1://x",
                "::s3://x",
                "s3:x",
            )
        ),
        ("file:///x", "/x"),
        ("file:///x/a::b", "/x/a::b"),
        ("local:///x", "/x"),
        ("file://x", "x"),
        ("file://localhost/x", "/x"),
        ("file://localhost", "localhost"),
        ("file://localhosts/x", "localhosts/x"),
        *(
            (url, None)
            for url in (
                "s3://b",
                "memory://",
                "git+ssh://h/x",
                "simplecache::file:///x",
                "zip://a::/x.zip",
            )
        ),
    ],
)
def test_which_are_of_this_machine(text: str, path: str | None) -> None:
    assert local_path(text) == path


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("s3:/bucket/run", "s3://bucket/run"),
        ("memory:/x", "memory://x"),
        ("file:/x", "file:///x"),
        ("local:/x", "local:///x"),
        ("zip:/run::/x/r.zip", "zip://run::/x/r.zip"),
        ("simplecache::s3:/bucket/run", "simplecache::s3://bucket/run"),
        *(
            (text, None)
            for text in (
                "c:/x",
                "z:/x",
                "my:/x",
                "my:run/x",
                "s3:run",
                "s3:",
                "run",
                "/s3:/x",
                "./s3:/x",
                "s3://b/x",
            )
        ),
    ],
)
def test_which_have_been_urls(text: str, meant: str | None) -> None:
    assert mistaken_url(text) == meant


@pytest.mark.parametrize(
    "url", ["s3://bucket/run", "file:///x/run", "memory://x", "simplecache::s3://bucket/run"]
)
def test_what_pathlib_makes_of_a_url_is_known_for_it(url: str) -> None:
    assert mistaken_url(str(Path(url))) == url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("ftp://me:pw@host:21/run", "ftp://me:***@host:21/run"),
        ("ftp://:pw@host/run", "ftp://:***@host/run"),
        ("zip://run::ftp://me:pw@host/r.zip", "zip://run::ftp://me:***@host/r.zip"),
        ("simplecache::ftp://me:pw@host/run", "simplecache::ftp://me:***@host/run"),
        ("ftp://me:p@w@host/run", "ftp://me:***@host/run"),  # the last @ ends it, as urllib has it
        ("ftp://me@corp:pw@host/run", "ftp://me@corp:***@host/run"),
        *(
            (url, url)
            for url in (
                "s3://bucket/a:b@c",
                "http://host:80/x@y",
                "abfs://a@b.net/x",
                "/x/a:b@c",
                "my:x@y",
            )
        ),
    ],
)
def test_what_is_shown(url: str, shown: str) -> None:
    assert masked_url(url) == shown
