"""The documents hold together: links lead somewhere, every public name is shown, the picture is the
one that its script draws."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import ckptcore

REPO = Path(ckptcore.__file__).parent.parent
PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in LINK.findall(without_code(page)):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_the_readme_links_every_page() -> None:
    linked = set(LINK.findall((REPO / "README.md").read_text()))
    made_for_the_site = {"docs/index.md", "docs/api.md"}
    pages = {str(page.relative_to(REPO)) for page in (REPO / "docs").rglob("*.md")}
    assert pages - made_for_the_site <= linked


def test_the_site_has_every_page() -> None:
    nav = (REPO / "mkdocs.yml").read_text().partition("nav:")[2]
    docs = REPO / "docs"
    assert sorted(re.findall(r": ([\w/]+\.md)", nav)) == sorted(
        page.relative_to(docs).as_posix() for page in docs.rglob("*.md")
    )


def test_the_api_page_has_every_public_name() -> None:
    shown = re.findall(r"^::: ckptcore\.(\w+)$", (REPO / "docs" / "api.md").read_text(), re.M)
    assert len(shown) == len(set(shown))
    names = set(ckptcore.__all__) - set(ckptcore.errors.__all__) - {"__version__"}
    assert set(shown) == names | {"errors"}


def test_the_picture_is_what_its_script_draws() -> None:
    images = REPO / "docs" / "images"
    drawn = runpy.run_path(str(images / "draw.py"))["picture"]()
    assert (images / "life-of-a-checkpoint.svg").read_text() == drawn


def test_every_case_that_tests_are_named_after_is_explained() -> None:
    used = {
        name.upper()
        for path in (REPO / "tests").rglob("test_*.py")
        for name in re.findall(r"def test_(b\d\d)_", path.read_text())
    }
    explained = re.findall(r"^\| (B\d\d) \|", (REPO / "tests" / "CASES.md").read_text(), re.M)
    assert explained == sorted(used)
