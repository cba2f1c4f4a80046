"""The site of the documentation: it is built without a warning, and works without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.integration.browser import browsing

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
_LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^\"'> ]+")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return directory


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    """No web fonts, no scripts, no pictures of other servers."""
    pages = list(site.rglob("*.html"))

    assert pages
    assert [] == [found for page in pages for found in _LOADED.findall(page.read_text(encoding="utf-8"))]


def test_markup_is_rendered(site: Path) -> None:
    """Lists, fences, tables and links that GitHub understands and the site does not would stay as they were typed."""
    typed = re.compile(r"<p>(?:(?!</p>).)*\n(?:[-*]|\d+\.) |```|\|---|\]\(", re.DOTALL)
    left = []
    for page in site.rglob("*.html"):
        article = page.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
        prose = re.sub(r"<(pre|code)\b.*?</\1>", "", article, flags=re.DOTALL)
        left += [f"{page.name}: {match[0][-80:]}" for match in typed.finditer(prose)]

    assert [] == left


def test_search_works_in_pages_opened_from_disk(site: Path) -> None:
    """Browsers start no workers there, so the search has a substitute for them."""
    requests: list[str] = []
    errors: list[str] = []
    with browsing() as browser:
        context = browser.new_context(viewport={"width": 1400, "height": 900}, offline=True)
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((site / "index.html").as_uri())
        page.get_by_role("textbox", name="Search").click()
        page.keyboard.type("harvest")
        expect(page.locator(".md-search-result__link").first).to_contain_text("arvest")
        context.close()

    assert [] == errors
    assert [] == [url for url in requests if not url.startswith(("file:", "data:", "blob:"))]
