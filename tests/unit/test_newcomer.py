"""The commands that the documents show, and the plan of the walk that runs them."""

from __future__ import annotations

from pathlib import Path

from tests.newcomer.blocks import Command, commands, list_documents, parse_json_sample
from tests.newcomer.command_rules import RULES, find_rule
from tests.newcomer.walk import find_differences

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
    """Those in the navigation of the site are all that there are."""
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}

    assert {"README.md", "CONTRIBUTING.md", *pages} == set(list_documents(ROOT))


def test_every_rule_is_about_a_command() -> None:
    """The first rule that fits is taken: one that comes after a more general one would never be."""
    used = {
        find_rule(command)
        for name in list_documents(ROOT)
        for command in commands(name, (ROOT / name).read_text(encoding="utf-8"))
    }

    assert [] == [rule for rule in RULES if rule not in used]


def test_what_is_left_out_has_a_reason_and_nothing_else() -> None:
    """A rule says one thing: run it, keep it running, or leave it out."""

    assert [] == [
        rule for rule in RULES if rule.skip and (rule.code or rule.until or rule.before or rule.after)
    ]


def test_answers_are_compared_by_keys_and_types() -> None:
    """Values differ from one run to the next; what a document shows must be there."""
    shown = parse_json_sample('{"a":1,"nodes":[{"name":"n1","gpus":[…],…},…],"end":null}\n')
    answer = {"a": 2.5, "nodes": [{"name": 7}], "end": "now", "more": True}

    assert [{"a": 1, "nodes": [{"name": "n1", "gpus": []}], "end": None}] == shown
    assert [
        "answer.nodes[0].name is 7, which is not of the type of 'n1'",
        "answer.nodes[0] has no 'gpus'",
    ] == list(find_differences(shown[0], answer, "answer"))
