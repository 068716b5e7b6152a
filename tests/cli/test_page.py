"""The page of `ckpt report` in a browser: what it looks like in windows wide and narrow, by day, by
night and on paper, and that it works without a mouse. Skipped where there is no Chromium."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ckptcore.testing.processes import patience

from .conftest import Ckpt

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "headless_shell")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]
# Reports, in the title, what it finds: how wide the page is, what is beside a window of 500 pixels,
# and what the focus does.
PROBE = """<script>
addEventListener("load", () => {
  const found = {};
  found.overflow = document.documentElement.scrollWidth - innerWidth;
  const stops = [...document.querySelectorAll("a[href], [tabindex='0'], summary")];
  found.stops = stops.length;
  const tile = document.querySelector("#bytes g");
  const tip = tile.querySelector(".tip");
  const before = getComputedStyle(tip).display;
  found.named = [...document.querySelectorAll("[tabindex='0']")].every(
    (each) => each.getAttribute("aria-label"));
  let looks = 0;
  const look = () => {  // a window that the system gives no focus to has none to show
    tile.focus();
    found.focused = document.activeElement === tile;
    found.tip = document.hasFocus() ? [before, getComputedStyle(tip).display] : null;
    document.title = JSON.stringify(found);
    if (found.tip === null && ++looks < 20) setTimeout(look, 100);
  };
  look();
});
</script>"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser here: none of {BROWSERS}")


def browse(page: Path, profile: Path, *how: str) -> str:
    command = [str(BROWSER), *QUIET, f"--user-data-dir={profile}", *how, page.as_uri()]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100 * patience(), check=True
    )
    return done.stdout


@pytest.fixture
def page(ckpt: Ckpt, root: Path, tmp_path: Path) -> Path:
    assert ckpt("report", root, "-o", tmp_path / "r.html").code == 0
    return tmp_path / "r.html"


def test_it_fits_a_narrow_window_and_works_from_the_keyboard(page: Path, tmp_path: Path) -> None:
    page.write_text(page.read_text().replace("</body>", f"{PROBE}</body>"))
    dumped = browse(
        page,
        tmp_path / "profile",
        "--window-size=500,900",
        "--virtual-time-budget=4000",
        "--dump-dom",
    )
    title = dumped.split("<title>")[1].split("</title>")[0]
    assert '"overflow":0' in title and '"focused":true' in title and '"named":true' in title
    assert '"tip":["none","block"]' in title or '"tip":null' in title
    assert int(title.split('"stops":')[1].split(",")[0]) > 12


def test_light_dark_and_paper(page: Path, tmp_path: Path) -> None:
    sizes = {}
    for name, how in {"light": [], "dark": ["--blink-settings=preferredColorScheme=0"]}.items():
        shot = tmp_path / f"{name}.png"
        browse(page, tmp_path / name, "--window-size=900,1200", f"--screenshot={shot}", *how)
        sizes[name] = shot.read_bytes()
    assert sizes["light"][:4] == sizes["dark"][:4] == b"\x89PNG" and sizes["light"] != sizes["dark"]
    paper = tmp_path / "r.pdf"
    browse(page, tmp_path / "paper", f"--print-to-pdf={paper}", "--no-pdf-header-footer")
    assert paper.read_bytes()[:5] == b"%PDF-" and paper.stat().st_size > 10_000
