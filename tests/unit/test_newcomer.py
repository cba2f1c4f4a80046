"""The commands that the documents show, and the plan of the walk that runs them."""

from __future__ import annotations

from pathlib import Path

from tests.newcomer.blocks import Command, commands
from tests.newcomer.plan import DOCUMENTS, RULES

ROOT = Path(__file__).parents[2]
TEXT = """
```sh
gpulse head           # until Ctrl-C
# a remark

curl \\
  http://localhost:8091/
```

```console
$ gpulse status
2 nodes
```

```python
print("$ none")
```

- In a list:
  ```
  $ gpulse top
  ```
"""


def test_commands_are_read_from_fenced_blocks() -> None:
    """With their continuation lines, and without what they print."""

    assert [
        Command("a.md", 3, 0, "gpulse head           # until Ctrl-C"),
        Command("a.md", 7, 0, "curl \\\n  http://localhost:8091/"),
        Command("a.md", 11, 1, "gpulse status"),
        Command("a.md", 21, 3, "gpulse top"),
    ] == commands("a.md", TEXT)


def test_every_document_is_walked_through() -> None:
    """One that is added is tried out, too."""
    there = {"README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))}

    assert there == set(DOCUMENTS)


def test_every_rule_is_about_a_command() -> None:
    """The first rule that fits is taken: one that comes after a more general one would be none."""
    listed = [
        command for name in DOCUMENTS for command in commands(name, (ROOT / name).read_text(encoding="utf-8"))
    ]
    used = {next((rule for rule in RULES if rule.fits(command)), None) for command in listed}

    assert [] == [rule for rule in RULES if rule not in used]


def test_what_is_left_out_has_a_reason_and_nothing_else() -> None:
    """A rule says one thing: run it, keep it running, or leave it out."""

    assert [] == [
        rule for rule in RULES if rule.skip and (rule.code or rule.until or rule.before or rule.after)
    ]
