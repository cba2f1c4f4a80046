"""Write the generated pages of the reference and the man pages: `python -m tools.docs`, or `make docs`."""

from __future__ import annotations

from pathlib import Path

from tools.docs.command_tree import read_commands
from tools.docs.commands_page import commands_markdown
from tools.docs.man_pages import man_pages
from tools.docs.reference_pages import diagnosis_markdown, metrics_markdown

ROOT = Path(__file__).parents[2]
MAN_PAGES = Path("man", "man1")
"""Relative to the repository; installed as share/man/man1."""


def generate() -> dict[Path, str]:
    """Return the text of every generated file by its path in the repository."""
    commands = read_commands()
    reference = Path("docs", "reference")
    return {
        reference / "commands.md": commands_markdown(commands),
        reference / "metrics.md": metrics_markdown(),
        reference / "findings.md": diagnosis_markdown(),
        **{MAN_PAGES / name: text for name, text in man_pages(commands).items()},
    }


def main() -> None:
    """Write every generated file, and delete man pages of commands that no longer exist."""
    files = generate()
    (ROOT / MAN_PAGES).mkdir(parents=True, exist_ok=True)
    for path in (ROOT / MAN_PAGES).glob("*.1"):
        if path.relative_to(ROOT) not in files:
            path.unlink()
    for path, text in files.items():
        (ROOT / path).write_text(text, encoding="utf-8")
    print(f"wrote {len(files)} files: {len(files) - 3} man pages and 3 pages of the reference")


if __name__ == "__main__":
    main()
