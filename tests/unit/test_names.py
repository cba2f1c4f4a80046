"""Names in the code are the field's words."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[2] / "src"
METAPHORS = frozenset(
    {
        "book",
        "ledger",
        "scribe",
        "errand",
        "crew",
        "troupe",
        "courier",
        "reel",
        "station",
        "kin",
        "sight",
        "stage",
        "taker",
        "keeper",
        "stretch",
        "wish",
        "news",
        "rounds",
        "doubts",
        "shelf",
        "drawer",
    }
)
"""Words that say what something is like, and not what it is."""
RELATIVE_WORDS = frozenset(
    {
        "told",
        "whose",
        "beyond",
        "elsewhere",
        "beside",
        "asking",
        "happened",
        "lasting",
        "whereabouts",
        "somebody",
        "whatever",
        "whoever",
    }
)
"""Words that mean nothing without the sentence around them."""
LIMITS = frozenset({"most", "longest", "least", "fewest", "shortest", "largest", "smallest"})
"""A constant that limits something is a MAX or a MIN."""
MODULE_WORDS = frozenset({"past", "known", "happened", "words", "told"})
COMMENT = re.compile(r"/\*.*?\*/|(?<![:\"'`])//[^\n]*", re.DOTALL)
SCRIPT_NAME = re.compile(
    r"\b(?:const|let|var|function|class)\s+([A-Za-z_$][\w$]*)"
    r"|\bthis\.([A-Za-z_$][\w$]*)\s*=(?!=)"
    r"|^\s+(?:async |static |get |set )*([A-Za-z_$][\w$]*)\([^()]*\) \{$",
    re.MULTILINE,
)
DIALECT = re.compile(r"\b(so many|heard of|came first|what is said)\b", re.IGNORECASE)
"""Phrases in place of a noun."""
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def words(name: str) -> set[str]:
    """Return the words of a name in snake case or camel case."""
    return {word.lower() for word in WORD.findall(name)}


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Return every class, function, parameter, attribute and variable that a module defines, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


class Module(NamedTuple):
    """A module of the package."""

    file: str
    names: tuple[tuple[int, str], ...]
    """Everything that it defines, with the line."""
    classes: tuple[str, ...]


@cache
def modules() -> tuple[Module, ...]:
    """Return every module of the package."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        if not path.name.endswith("_pb2.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            classes = tuple(node.name for node in tree.body if isinstance(node, ast.ClassDef))
            found.append(Module(str(path.relative_to(SOURCE)), tuple(names(tree)), classes))
    return tuple(found)


def test_no_name_is_a_metaphor() -> None:
    """Nor a relative word that needs its sentence."""

    banned = METAPHORS | RELATIVE_WORDS
    found = [
        f"{file}:{line} {name}"
        for file, defined, _ in modules()
        for line, name in defined
        if words(name) & banned
    ]

    assert [] == found


def scripts() -> Iterator[tuple[str, str]]:
    """Return every script of the dashboard and of the pages with charts, with its path."""
    for path in sorted(SOURCE.rglob("*.js")):
        if "vendor" not in path.parts:
            yield str(path.relative_to(SOURCE)), path.read_text(encoding="utf-8")


def test_no_name_in_a_script_is_a_metaphor() -> None:
    """As in Python: variables, functions, classes, properties, methods and parameters."""

    banned = METAPHORS | RELATIVE_WORDS
    found = [
        f"{file} {name}"
        for file, text in scripts()
        for match in SCRIPT_NAME.finditer(COMMENT.sub("", text))
        for name in filter(None, match.groups())
        if words(name) & banned
    ]

    assert [] == found
    assert ["one", "two", "three", "four", "five", "six"] == [
        name
        for match in SCRIPT_NAME.finditer(
            "const one = 1; let two; function three() {}\nclass four {\n  async five(x) {\n this.six = 2;"
        )
        for name in filter(None, match.groups())
    ]


def test_comments_in_scripts_have_no_dialect() -> None:
    """Neither a metaphor nor a phrase that stands for a term."""

    banned = METAPHORS | RELATIVE_WORDS - {"whose"}  # in a sentence, `whose` is an ordinary word
    found = [
        f"{file} {comment[:80]}"
        for file, text in scripts()
        for comment in COMMENT.findall(text)
        if words(comment) & banned or DIALECT.search(comment)
    ]

    assert [] == found


def test_no_module_has_a_metaphor_for_a_name() -> None:
    """Its path says what is inside."""

    banned = METAPHORS | RELATIVE_WORDS | MODULE_WORDS

    assert [] == [
        file
        for file, *_ in modules()
        if any(words(part) & banned for part in Path(file).with_suffix("").parts)
    ]


def test_limits_are_called_max_or_min() -> None:
    """One way to name a limit."""

    found = [
        f"{file}:{line} {name}"
        for file, defined, _ in modules()
        for line, name in defined
        if name.isupper() and words(name) & LIMITS
    ]

    assert [] == found


def test_no_two_classes_have_the_same_name() -> None:
    """Whoever reads a name knows which class it is."""

    places: defaultdict[str, list[str]] = defaultdict(list)
    for file, _, classes in modules():
        for name in classes:
            places[name.lstrip("_")].append(file)

    assert {} == {name: files for name, files in places.items() if len(files) > 1}
