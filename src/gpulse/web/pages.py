"""The few plain pages: what is here, and the form to log in. No scripts, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_FRAME = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title></head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def overview(version: str, links: Iterable[tuple[str, str]]) -> str:
    """Links to what can be read here, each with a sentence."""
    rows = "\n".join(
        f'<li><a href="{escape(path)}">{escape(path)}</a> {escape(text)}</li>' for path, text in links
    )
    body = f"<p>gpulse {escape(version)}</p>\n<ul>\n{rows}\n</ul>"
    return _FRAME.format(title="gpulse head", body=body)


def login(message: str | None = None) -> str:
    """The form that takes the token."""
    said = f"<p><strong>{escape(message)}</strong></p>\n" if message else ""
    form = (
        '<form method="post" action="/login">\n'
        '<p><label>Token <input name="token" type="password" autocomplete="current-password" required autofocus>'
        "</label> <button>Log in</button></p>\n</form>\n"
        "<p>The token is in the file gpulse/token of the configuration directory of whoever started the head.</p>"
    )
    return _FRAME.format(title="Log in", body=f"{said}{form}")
