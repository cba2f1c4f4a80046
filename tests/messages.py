"""List the texts that users see, from the code: help, errors, tables, findings, reports and the dashboard.

`python -m tests.messages [PATH…]` prints them with their file and line; `make messages` writes them to tests/messages.txt, so that
they can be read from top to bottom and a change of wording is visible in a diff. A test compares that file with the code.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
COMMITTED = Path(__file__).with_suffix(".txt")
_NOT_FOR_USERS = re.compile(
    r"""^\s*(?:SELECT|INSERT|UPDATE|DELETE|CREATE|DROP|ALTER|WITH|FROM|WHERE|ORDER|GROUP|LEFT|JOIN|PRAGMA|BEGIN|COMMIT|VALUES|SET|AND|OR|ON|UNION|COPY|ATTACH|LOCK|NOTIFY)\b
    |^[A-Za-z]+/[A-Za-z0-9.+-]+(?:;|$)
    |^(?::root\{|@media\s|\(prefers-color-scheme:|hole\ c-\{|default-src\s)|px\ system-ui
    |[a-z]\|[a-z].*(?:\\[bdsw]|\.\*)|\\(?:[b(]|\d)
    |^[a-z-]+:[^\s;]+;[a-z-]+:
    |^[\w.:-]*=\S*$
    |\b(?:SELECT|BETWEEN|VARCHAR|BIGINT|DESC|IS\ NULL|IN\ \(|AS\ [a-z]+\b)|::[A-Z{]|\bnode_id\b|^(?:max|count)\ by\ \(
    |^(?=.*_)"?\w+"?(?:,\ "?\w+"?)+$
    |^(?:Accept|Allow|Origin|Vary)$|^default-src\b
    |\(\.\*\)|"\.\*"|\(\?:|\bleast\(|\b(?:FROM|WHERE|AND|OR)\ [a-z]+\b|^(?:time|hour),\ (?=[a-z])
    |^color-mix\(|prefers-color-scheme|\}px\b|^\.[a-z-]+,\ (?=\S)
    |\bsys\.argv\b|(?:^|\n)\s*(?:import|from|def|function|const|let|if|for|return)\s.*[\n:;{]""",
    re.VERBOSE,
)
"""SQL, PromQL, media types, names of HTTP headers, style sheets, regular expressions and programs."""
_WORDS = re.compile(r"[A-Za-z][a-z']+(?:[,;:]?\s+(?:\{[^}]*\}\s*)?)[A-Za-z{'(]")
_ONE_WORD = re.compile(r"^[A-Z][a-z]{2,}[^\w/]*$")
"""A heading or a label."""
_JS_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"|`((?:[^`\\]|\\.)*)`')
_JS_COMMENT = re.compile(r"/\*.*?\*/|(?<![:\"'])//[^\n]*", re.DOTALL)
_HTML_TEXT = re.compile(r">([^<>]+)<|\b(?:title|placeholder|aria-label|alt)=\"?([^\"<>]+)\"")
_JS_EXPRESSION = re.compile(r"\$\{[^{}]*\}")
_JS_NOT_FOR_USERS = re.compile(
    r"(?:[!=]==|\bcase|\bclass(?:Name)?\s*[:=]|\b(?:startsWith|onKey|matches|closest|querySelector|querySelectorAll)\()\s*$"
)
"""Code before a string that is a key, a CSS class or a selector."""
_PLACEHOLDER = re.compile(r"\{(?![^{}]*(?:\w\w' if |\belse '[^']*\w\w))[^{}]*\}")
"""A value; not a choice between words."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Message(NamedTuple):
    """One text, with its place in the code."""

    file: str
    line: int
    text: str


def find_messages(paths: list[Path], root: Path = ROOT) -> list[Message]:
    """Return the texts of these files and folders, in the order of the code."""
    found: list[Message] = []
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            name = str(file.resolve().relative_to(root))
            if file.suffix == ".py" and not file.name.endswith("_pb2.py"):
                found += _in_python(name, file.read_text(encoding="utf-8"))
            elif file.suffix in {".js", ".html"} and "vendor" not in file.parts:
                found += _in_page(name, file.read_text(encoding="utf-8"))
    return found


def _in_python(name: str, source: str) -> Iterator[Message]:
    tree = ast.parse(source)
    hidden = _docstrings(tree)
    found: dict[tuple[int, int], Message] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            hidden.update(id(value) for value in node.values)
            hidden.update(
                id(v)
                for value in node.values
                for v in ast.walk(value)
                if isinstance(v, ast.JoinedStr) and v is not node
            )
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "TypeVar":
            hidden.update(map(id, node.args))
        if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in hidden:
            text = _text_of(node) or ""
            for number, part in enumerate(_visible_parts(text)):
                if _is_message(part):
                    found[id(node), number] = Message(name, node.lineno, part)
    yield from sorted(found.values(), key=lambda message: message.line)


def _docstrings(tree: ast.Module) -> set[int]:
    """Return the docstrings, except those of commands, which are their help; and texts that stand alone after a field."""
    hidden: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            hidden.add(id(node.value))
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS) and any(_is_command(decorator) for decorator in node.decorator_list):
            first = node.body[0]
            if isinstance(first, ast.Expr):
                hidden.discard(id(first.value))
    return hidden


def _is_command(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Attribute) and called.attr in {"command", "group"}


def _text_of(node: ast.expr) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text_of(value) or "" for value in values)
        case ast.FormattedValue(value=value):
            return "{" + ast.unparse(value) + "}"
    return None


def _visible_parts(text: str) -> list[str]:
    """Return what a browser shows of a piece of HTML; other text as it is."""
    if re.search(r"<[a-z!/]", text) is None or not re.search(r"</|/>|=", text):
        return [text]
    return [first or second for first, second in _HTML_TEXT.findall(text)]


def _is_message(text: str) -> bool:
    if _NOT_FOR_USERS.search(text) or not re.search(r"[A-Za-z]", _without_placeholders(text)):
        return False
    return bool(_WORDS.search(text) or _ONE_WORD.match(text))


def _without_placeholders(text: str) -> str:
    rest, before = text, ""
    while rest != before:
        rest, before = _PLACEHOLDER.sub("", rest), rest
    return rest


def _in_page(name: str, source: str) -> Iterator[Message]:
    source = _JS_COMMENT.sub(lambda match: "\n" * match.group().count("\n"), source)
    texts = [(match.start(), match.group(1) or match.group(2) or "") for match in _JS_STRING.finditer(source)]
    if name.endswith(".html"):
        texts = [(0, source)]
    for start, text in texts:
        if _JS_NOT_FOR_USERS.search(source, max(0, start - 40), start):
            continue
        line = source.count("\n", 0, start) + 1
        for part in _visible_parts(text):
            for words in _texts_of_template(" ".join(part.split())):
                if _is_message(words) and not words.startswith(("./", "../", "/")):
                    yield Message(name, line, words)


def _texts_of_template(template: str) -> list[str]:
    """Return a template literal with words of its own as it is; of one that is only expressions, the texts in their quotes."""
    rest, before = template, ""
    while rest != before:
        rest, before = _JS_EXPRESSION.sub("", rest), rest
    if re.match(r"[A-Z][a-z]+ \w", rest):
        return [template]
    is_code = (
        "${" in rest
        or "=>" in rest
        or rest.startswith(("}", ")", "; }"))
        or rest.endswith((")}", ": html"))
        or not re.search(r"[A-Za-z]", rest)
    )
    return re.findall(r'"([^"]+)"', template) if is_code else [template]


def format_messages(messages: list[Message]) -> str:
    """Return one message on each line, under the name of its file, without line numbers."""
    lines: list[str] = []
    file = None
    for message in messages:
        if message.file != file:
            file = message.file
            lines += ["", file]
        lines.append("  " + " ".join(message.text.split()))
    return "\n".join(lines).lstrip() + "\n"


def main() -> None:
    """Print the messages of the given paths, or write those of all code to the committed file."""
    if "--write" in sys.argv:
        COMMITTED.write_text(format_messages(find_messages([SOURCE])), encoding="utf-8")
        return
    paths = [Path(argument) for argument in sys.argv[1:]] or [SOURCE]
    for message in find_messages(paths):
        sys.stdout.write(f"{message.file}:{message.line}: {' '.join(message.text.split())}\n")


if __name__ == "__main__":
    main()
