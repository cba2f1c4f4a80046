"""The form to log in: it works without scripts, and takes its look from the dashboard."""

from __future__ import annotations

from html import escape

_FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Log in · {title}</title>
<link rel="icon" href="/static/icon.svg">
<script src="/static/core/theme.js"></script>
<link rel="stylesheet" href="/static/themes.css"><link rel="stylesheet" href="/static/style.css">
{style}
<script defer src="/static/login.js"></script>
</head>
<body>
<main class="page login">
<h1>{title}</h1>
{body}
</main>
</body>
</html>
"""


def login_form(message: str | None = None, *, title: str = "gpulse", style: str = "") -> str:
    """The form that takes the token.

    Args:
        message: What was wrong with the last one.
        title: What the site calls itself.
        style: The link to its own style sheet.
    """
    said = f'<p class="error-note" role="alert">{escape(message)}</p>\n' if message else ""
    form = (
        '<form method="post" action="/login" class="card toolbar">\n'
        '<label class="field">Token '
        '<input name="token" type="password" autocomplete="current-password" required autofocus></label>'
        '\n<button class="button primary">Log in</button>\n</form>\n'
        '<p class="muted">The user who started the head can print the token on its machine: gpulse token --show</p>'
    )
    return _FRAME.format(title=escape(title), style=style, body=f"{said}{form}")
