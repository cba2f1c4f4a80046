"""The form to log in: a page without scripts, which takes its look from the dashboard."""

from __future__ import annotations

from html import escape

_FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · gpulse</title>
<link rel="icon" href="/static/icon.svg">
<link rel="stylesheet" href="/static/themes.css"><link rel="stylesheet" href="/static/style.css">
</head>
<body>
<main class="page login">
<h1>{title}</h1>
{body}
</main>
</body>
</html>
"""


def login(message: str | None = None) -> str:
    """The form that takes the token."""
    said = f'<p class="error-note" role="alert">{escape(message)}</p>\n' if message else ""
    form = (
        '<form method="post" action="/login" class="card toolbar">\n'
        '<label class="field">Token '
        '<input name="token" type="password" autocomplete="current-password" required autofocus></label>'
        '\n<button class="button primary">Log in</button>\n</form>\n'
        '<p class="muted">The token is in the file gpulse/token of the configuration directory of whoever started the head.</p>'
    )
    return _FRAME.format(title="Log in", body=f"{said}{form}")
