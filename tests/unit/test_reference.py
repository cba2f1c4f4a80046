"""Generated pages of the reference and man pages: as the code has them, and complete."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import gpulse
from gpulse.cli.main import VERBS
from gpulse.web.openapi import document
from tools.docs.__main__ import MAN_PAGES, generate
from tools.docs.command_tree import PROGRAMS, CommandHelp, Option, Paragraph, read_commands, split_paragraphs
from tools.docs.commands_page import anchor, commands_markdown
from tools.docs.man_pages import man_pages

ROOT = Path(__file__).parents[2]
COMMAND = CommandHelp(
    path="gpulse try",
    usage="gpulse try [OPTIONS] [FILE]",
    summary="Try a thing.",
    description=[
        Paragraph("Try `a|b` and *.json, -v too.", is_verbatim=False),
        Paragraph("x  y", is_verbatim=True),
    ],
    exit_codes=[Paragraph("Exit code: 3 nothing.", is_verbatim=False)],
    options=[Option("-i, --interval SECONDS", ".5 or more", "GPULSE_INTERVAL")],
    subcommands=[],
)


def test_generated_files_are_up_to_date() -> None:
    """A change of the catalogue, the rules or the help needs `make docs`."""
    files = generate()

    assert [] == [
        str(path)
        for path, text in files.items()
        if not (ROOT / path).is_file() or (ROOT / path).read_text(encoding="utf-8") != text
    ]
    assert {path.relative_to(ROOT) for path in (ROOT / MAN_PAGES).iterdir()} <= set(files)


def test_every_verb_and_program_has_a_section_and_a_man_page() -> None:
    """Also the subcommands of groups."""
    commands = read_commands()
    paths = {command.path for command in commands}
    page = commands_markdown(commands)

    assert {*PROGRAMS, *(f"gpulse {verb}" for verb in VERBS), "gpulse session start"} <= paths
    assert [] == [path for path in paths if f"# {path}\n" not in page]
    assert {f"{anchor(path)}.1" for path in paths} == set(man_pages(commands))


def test_help_is_split_as_click_does() -> None:
    """Paragraphs are joined to one line, except after a line with a backspace."""
    text = """Say it:
    in two lines.

    \b
    gpulse why    now
    gpulse top    live

    The end.
    """

    assert [
        Paragraph("Say it: in two lines.", is_verbatim=False),
        Paragraph("gpulse why    now\ngpulse top    live", is_verbatim=True),
        Paragraph("The end.", is_verbatim=False),
    ] == split_paragraphs(text)


def test_a_section_escapes_markup() -> None:
    """Stars outside of code, and bars everywhere, for they end a table's cell."""
    programs = [CommandHelp(name, name, "One.", [], [], [], []) for name in PROGRAMS]

    page = commands_markdown([*programs, COMMAND])

    assert (
        "## gpulse try\n\n```text\ngpulse try [OPTIONS] [FILE]\n```\n\nTry `a\\|b` and \\*.json, -v too.\n"
        in page
    )
    assert "| `-i, --interval SECONDS` | .5 or more Environment variable: `GPULSE_INTERVAL`. |" in page
    assert page.endswith("\n\nExit code: 3 nothing.\n")


def test_a_man_page_escapes_requests_and_hyphens() -> None:
    """A line must not begin with a dot, and a hyphen must stay one that can be typed."""
    page = man_pages([CommandHelp("gpulse", "gpulse", "One.", [], [], [], ["gpulse try"]), COMMAND])[
        "gpulse-try.1"
    ]

    assert "gpulse\\-try \\- Try a thing\n" in page
    assert "Try \\fBa|b\\fR and *.json, \\-v too.\n" in page
    assert "\\fB\\-i\\fR, \\fB\\-\\-interval\\fR \\fISECONDS\\fR\n\\&.5 or more" in page
    assert ".nf\n.RS 4\nx  y\n.RE\n.fi\n" in page


@pytest.mark.slow
@pytest.mark.requires("man")
@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / MAN_PAGES).glob("*.1")))
def test_man_renders_every_page_without_a_warning(page: str) -> None:
    """As `man gpulse-why` does."""
    done = subprocess.run(
        ["man", "--warnings", "-l", ROOT / MAN_PAGES / page], capture_output=True, text=True, check=False
    )

    assert (0, "") == (done.returncode, done.stderr)
    assert "NAME" in done.stdout


def test_the_http_api_page_names_every_route_and_parameter() -> None:
    """As the head's own OpenAPI document has them."""
    page = (ROOT / "docs" / "reference" / "http-api.md").read_text(encoding="utf-8")
    paths = document("0")["paths"]
    parameters = {
        parameter["name"]
        for operations in paths.values()
        for operation in operations.values()
        for parameter in operation.get("parameters", ())
    }

    assert [] == [path for path in paths if path not in page]
    assert [] == sorted(name for name in parameters if not re.search(rf"\b{name}\b", page))


def test_the_reference_names_every_environment_variable() -> None:
    """Those that the code reads or sets."""
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    reference = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md")
    )
    variables = set(re.findall(r'"(GPULSE_[A-Z_]+)"', code))

    assert "GPULSE_HEAD" in variables
    assert [] == sorted(name for name in variables if name not in reference)


def test_the_python_page_names_everything_that_the_package_exports() -> None:
    """Whoever adds a name describes it."""
    page = (ROOT / "docs" / "reference" / "python-api.md").read_text(encoding="utf-8")

    assert [] == [name for name in gpulse.__all__ if name != "__version__" and f"`{name}" not in page]
