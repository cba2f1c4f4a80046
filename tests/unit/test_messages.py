"""The list of all texts that users see."""

from __future__ import annotations

from pathlib import Path

from tests.messages import COMMITTED, SOURCE, find_messages, format_messages


def test_the_list_is_that_of_the_code() -> None:
    """`make messages` writes it again, so that a change of wording is read as one."""

    assert format_messages(find_messages([SOURCE])) == COMMITTED.read_text(encoding="utf-8")


def test_texts_are_found_in_python_and_javascript(tmp_path: Path) -> None:
    """Errors, help and labels are listed; docstrings, SQL, CSS, keys and identifiers are not."""

    (tmp_path / "a.py").write_text(
        '"""Not this docstring."""\n'
        "import click\n"
        "@click.command()\n"
        "def look(name):\n"
        '    """Take a look."""\n'
        '    raise ValueError(f"cannot open {name}: it is locked")\n'
        'SQL = "SELECT a FROM b WHERE c"\n'
        'ORDER = "time DESC, from_frame DESC"\n'
        'Kind = TypeVar("Kind")\n'
        'headers["Vary"] = "Origin"\n'
        'KEY = "sm_active_ratio"\n'
    )
    (tmp_path / "b.js").write_text(
        'const title = "No findings yet"; // a remark about it\nrender(`<b>Free GPUs</b>`);\n'
        'h("p", { class: "muted card-note" }, `${nameOf(gpu)} ${stateOf(gpu)}`);\n'
        'if (event.key === "Escape") find("a").matches(".cell, body");\n'
    )

    assert ["Take a look.", "cannot open {name}: it is locked", "No findings yet", "Free GPUs"] == [
        message.text for message in find_messages([tmp_path], root=tmp_path)
    ]
