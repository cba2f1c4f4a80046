"""The dashboard as files: its page and policy, a site's own look, and who may see them."""

from __future__ import annotations

import os
import re
from importlib.resources import files
from pathlib import Path

import httpx
import pytest

from gpulse.charts.style import COLORS, HEAT, LINE_COLORS
from gpulse.cluster.access_control import AccessPolicy
from gpulse.web.app import make_app
from gpulse.web.dashboard import Dashboard
from tests.unit.fake_head import TOKEN, FakeHead, seen_as

BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
STATIC = Path(str(files("gpulse.web").joinpath("static")))
OWN = sorted(path for path in STATIC.rglob("*.js") if "vendor" not in path.parts)
EVERY = [path for path in STATIC.rglob("*") if path.suffix in {".js", ".css", ".html", ".svg"}]


def asking(theme_dir: Path | None = None, address: str = "127.0.0.1") -> httpx.AsyncClient:
    """A client of an application with a dashboard."""
    app = make_app(
        FakeHead(), AccessPolicy(TOKEN), dashboard=Dashboard(str(theme_dir) if theme_dir else None)
    )
    transport = httpx.ASGITransport(seen_as(app, os.geteuid()), client=(address, 1))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_the_page_and_its_policy() -> None:
    """Nothing inline, nothing from elsewhere, and everything it names is there."""
    async with asking() as client:
        page = await client.get("/", headers=BROWSER)
        assert 200 == page.status_code
        policy = page.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        assert "Accept" == page.headers["vary"]
        assert not re.search(r"\sstyle=|\son[a-z]+=|<script>|<style|javascript:", page.text)
        named = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
        assert {name for name in named if name.startswith("/static/")}
        for name in named:
            assert name.startswith("/"), "the page asks nobody but its head"
            answer = await client.get(name)
            assert 200 == answer.status_code, name
        assert not re.search(r"\{[a-z]+\}", page.text), "a placeholder was left"


async def test_files_are_asked_for_again_only_when_they_changed() -> None:
    """A browser keeps them, and is told when they are the same."""
    async with asking() as client:
        first = await client.get("/static/app.js")
        assert "no-cache" == first.headers["cache-control"]
        assert first.headers["content-type"].startswith("text/javascript")
        again = await client.get("/static/app.js", headers={"If-None-Match": first.headers["etag"]})
        assert 304 == again.status_code


@pytest.mark.parametrize(
    "path", ["/static/", "/static/../app.py", "/static/%2e%2e/app.py", "/static/nothing.js"]
)
async def test_nothing_but_the_files(path: str) -> None:
    """No listing, no way out of the directory."""
    async with asking() as client:
        assert 404 == (await client.get(path)).status_code
        assert 405 == (await client.post("/static/app.js", json={})).status_code


async def test_what_strangers_see() -> None:
    """The form to log in has its look; the page and the data stay behind the door."""
    async with asking(address="10.0.0.1") as client:
        form = await client.get("/", headers=BROWSER)
        assert 401 == form.status_code
        assert "<form" in form.text
        assert "unsafe" not in form.headers["content-security-policy"]
        named = re.findall(r'(?:src|href)="(/static/[^"]+)"', form.text)
        assert named
        for name in named:
            assert 200 == (await client.get(name)).status_code, name
        assert 401 == (await client.get("/manual.json")).status_code
        assert 401 == (await client.get("/api/v1/findings")).status_code
        other = await client.get("/static/app.js", headers={"Origin": "http://elsewhere.example"})
        assert 403 == other.status_code


async def test_a_sites_own_look(tmp_path: Path) -> None:
    """A title that is text and not markup, a style sheet, pictures; nothing else of that directory."""
    (tmp_path / "title.txt").write_text("The <b>Lab</b> & {version}\nmore\n", encoding="utf-8")
    (tmp_path / "theme.css").write_text(":root { --accent: red }", encoding="utf-8")
    (tmp_path / "logo.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>", encoding="utf-8")
    (tmp_path / "secret.txt").write_text("no", encoding="utf-8")
    (tmp_path / ".hidden.css").write_text("no", encoding="utf-8")
    (tmp_path / "outside.css").symlink_to("/etc/hostname")
    async with asking(tmp_path) as client:
        page = await client.get("/", headers=BROWSER)
        assert "The &lt;b&gt;Lab&lt;/b&gt; &amp; {version}" in page.text
        assert '<link rel="stylesheet" href="/theme/theme.css">' in page.text
        for name, status in (
            ("theme.css", 200),
            ("logo.svg", 200),
            ("secret.txt", 404),
            ("title.txt", 404),
            (".hidden.css", 404),
            ("outside.css", 404),
            ("../theme.css", 404),
        ):
            assert status == (await client.get(f"/theme/{name}")).status_code, name
        (tmp_path / "theme.css").write_text(":root { --accent: blue }", encoding="utf-8")
        assert "blue" in (await client.get("/theme/theme.css")).text


async def test_the_form_has_the_sites_look(tmp_path: Path) -> None:
    """Title and style sheet, for those who are not known yet."""
    (tmp_path / "title.txt").write_text("The <Lab>", encoding="utf-8")
    (tmp_path / "theme.css").write_text("", encoding="utf-8")
    async with asking(tmp_path, address="10.0.0.1") as client:
        form = await client.get("/", headers=BROWSER)
        assert 401 == form.status_code
        assert "<h1>The &lt;Lab&gt;</h1>" in form.text
        assert "/theme/theme.css" in form.text
        assert 200 == (await client.get("/theme/theme.css")).status_code


async def test_a_look_without_files(tmp_path: Path) -> None:
    """An empty directory is no error: the title is ours and the style sheet is not there."""
    async with asking(tmp_path) as client:
        page = await client.get("/", headers=BROWSER)
        assert "<title>gpulse" in page.text
        assert "/theme/" not in page.text
        assert 404 == (await client.get("/theme/theme.css")).status_code


async def test_the_assets_are_small() -> None:
    """What the front page loads, and everything that there is, as they travel."""
    front = _loaded(STATIC / "index.html")
    assert STATIC / "pages/overview.js" in front
    assert STATIC / "pages/gpu.js" not in front, "other pages are loaded when somebody goes there"
    async with asking() as client:
        sizes = {path: await _travelled(client, f"/static/{path.relative_to(STATIC)}") for path in EVERY}
    assert sum(size for path, size in sizes.items() if path in front) < 140_000
    assert sum(sizes.values()) < 280_000


def _loaded(start: Path) -> set[Path]:
    """A file and what it names, and what those import."""
    found, waiting = set[Path](), [start]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".html":
            waiting += [STATIC / name for name in re.findall(r'(?:src|href)="/static/([^"]+)"', text)]
        elif path.suffix == ".js":
            waiting += [
                (path.parent / name).resolve()
                for name in re.findall(r'^(?:import|export)[^;]*?"(\.[^"]+)";', text, re.MULTILINE)
            ]
    return found


async def _travelled(client: httpx.AsyncClient, path: str) -> int:
    async with client.stream("GET", path, headers={"Accept-Encoding": "gzip"}) as answer:
        return len(b"".join([piece async for piece in answer.aiter_raw()]))


def test_what_others_made_has_its_licence() -> None:
    """Each vendored library has its licence beside it and its version in the list."""
    vendor = STATIC / "vendor"
    listed = (vendor / "README.md").read_text(encoding="utf-8")
    for path in vendor.iterdir():
        if path.suffix in {".js", ".css"}:
            assert path.name in listed
            assert (vendor / f"{path.name.partition('.')[0]}.LICENSE").is_file()


def test_own_scripts_are_all_looked_at() -> None:
    """Those of the shell and of the form to log in too."""
    assert {"app.js", "login.js", "overview.js"} <= {path.name for path in OWN}


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_own_scripts_cannot_run_text(path: Path) -> None:
    """What the policy forbids is not even tried."""
    text = path.read_text(encoding="utf-8")
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "eval(",
        "document.write",
        "unsafeHTML",
        "http://",
    ):
        assert word not in text


@pytest.mark.parametrize("selector", ['="light"]', ':is([data-scheme="dark"]'])
def test_charts_have_the_colors_of_all_pictures(selector: str) -> None:
    """Lines, heat maps and missing data of the dashboard look as in reports, in light and in dark."""
    tokens = (STATIC / "tokens.css").read_text()
    theme = tokens.partition(selector)[2].partition("}")[0]
    names = {
        **{f"chart-{place + 1}": f"line{place}" for place in range(LINE_COLORS)},
        **dict(zip(("heat-0", "heat-50", "heat-100"), HEAT, strict=True)),
        "no-data": "gap",
    }
    expected = {name: COLORS[own]["dark" in selector] for name, own in names.items()}
    assert expected == {name: re.findall(rf"--{name}: (#\w+);", theme)[0] for name in names}
