"""Documents name files that exist, and their links lead somewhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "tools", "docs", "man", "contrib", "benchmarks", "examples", "types", ".ci")
GUIDES = ("ARCHITECTURE.md", "CONTRIBUTING.md")
"""Documents about the code: whatever looks like a path in them is one."""
DOCUMENTS = (
    *GUIDES,
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)
LINKING = (*DOCUMENTS, "CHANGELOG.md", "benchmarks/RESULTS.md")
CODE = re.compile(r"`([\w.-]+(?:/[\w.*-]+)*/?)`")
FILE = re.compile(r".+\.(?:css|html|js|md|proto|py|sh|toml|yml)")
QUOTE = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A block of code that says from which file it is."""
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
"""A link or a picture: its file, and the section in it."""
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@cache
def paths() -> frozenset[str]:
    """Every file and folder of the repository, and the end of its path from each folder on."""
    found = {path.name for path in ROOT.iterdir()}
    for folder in FOLDERS:
        for path in (ROOT / folder, *(ROOT / folder).rglob("*")):
            if "__pycache__" not in path.parts:
                parts = path.relative_to(ROOT).parts
                found.update("/".join(parts[start:]) for start in range(len(parts)))
    return frozenset(found)


def exists(name: str) -> bool:
    """Whether a name is a path from the root or from some folder, or something that a module defines."""
    name = name.rstrip("/*")
    module, _, defined = name.rpartition(".")
    files = [path for path in (f"{module}.py", f"src/gpulse/{module}.py") if (ROOT / path).is_file()]
    return name in paths() or any(re.search(rf"\b{defined}\b", (ROOT / path).read_text()) for path in files)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_in_documents_exist(document: str) -> None:
    """Whoever moves a file finds the sentences that name it."""

    text = (ROOT / document).read_text(encoding="utf-8")
    named = {name for name in CODE.findall(text) if "/" in name or FILE.fullmatch(name)}
    if document not in GUIDES:
        named = {name for name in named if name.split("/")[0] in FOLDERS}

    assert [] == sorted(name for name in named if not exists(name))


@cache
def anchors(path: Path) -> frozenset[str]:
    """The names of a document's sections, as GitHub and the site make them."""
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in HEADING.findall(text)]
    return frozenset(re.sub(r"[^\w\s-]", "", title).strip().replace(" ", "-") for title in titles)


@pytest.mark.parametrize("document", LINKING)
def test_links_in_documents_lead_somewhere(document: str) -> None:
    """To pages, pictures and files of the repository, and to sections of pages."""
    file = ROOT / document
    broken = []
    for name, section in LINK.findall(FENCED.sub("", file.read_text(encoding="utf-8"))):
        target = file.parent / name if name else file
        if not target.exists() or (section and section not in anchors(target)):
            broken.append(f"{name}#{section}")

    assert [] == broken


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name.startswith("docs/")])
def test_pages_link_to_nothing_outside_of_the_site(document: str) -> None:
    """Such a link would work in the repository and be broken in the site."""
    file = ROOT / document
    links = [name for name, _ in LINK.findall(FENCED.sub("", file.read_text(encoding="utf-8"))) if name]

    assert [] == [name for name in links if not (file.parent / name).resolve().is_relative_to(ROOT / "docs")]


def test_the_readme_can_be_read_in_two_minutes() -> None:
    """Everything else is in docs."""

    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_every_picture_is_shown() -> None:
    """A picture that no document shows is only weight."""
    shown = {
        (ROOT / document).parent.joinpath(name).resolve()
        for document in LINKING
        for name, _ in LINK.findall((ROOT / document).read_text(encoding="utf-8"))
    }

    assert [] == sorted(path.name for path in (ROOT / "docs" / "images").iterdir() if path not in shown)


def test_pages_that_the_code_names_exist() -> None:
    """Messages and comments name pages by their path in the repository."""
    named = {
        (str(path.relative_to(ROOT)), page)
        for folder in ("src", "contrib", "examples", "tools")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".conf", ".js", ".py", ".service", ".sh", ".toml", ".yml")
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8"))
    }

    assert named
    assert [] == sorted(f"{path}: {page}" for path, page in named if not (ROOT / page).is_file())


def test_code_in_the_guide_is_that_of_its_files() -> None:
    """A block that names its file has lines of it, in their order; lines in between may be left out."""

    quotes = QUOTE.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    stale = []
    for name, block in quotes:
        lines = iter((ROOT / name).read_text(encoding="utf-8").splitlines())
        stale += [f"{name}: {line}" for line in block.splitlines() if line and line not in lines]

    assert quotes
    assert [] == stale
