"""The dashboard: its page, login form and static files, the manual of findings, and a site's custom theme."""

from __future__ import annotations

import asyncio
import os
import re
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Scope

from gpulse._version import __version__
from gpulse.diagnosis.finding_texts import (
    COMPARISONS,
    DERIVED_SIGNALS,
    FAMILY_TITLES,
    STATISTICS,
    ManualEntry,
    build_entries,
    signal_text,
)
from gpulse.model.clock_event_reasons import CLOCK_REASONS
from gpulse.model.metric_catalog import CATALOG
from gpulse.web.responses import json_response

MANUAL_PATH = "/manual.json"


@cache
def manual_document() -> dict[str, Any]:
    """Return the document with all findings, their families, and the names of signals."""
    return {
        "families": dict(FAMILY_TITLES),
        "findings": {entry.id: _entry_document(entry) for entry in build_entries()},
        "signals": _signals(),
        "statistics": dict(STATISTICS),
        "comparisons": dict(COMPARISONS),
        "reasons": {str(reason.bit): reason.name for reason in CLOCK_REASONS},
    }


def manual_routes() -> list[Route]:
    """Return the route of the document."""
    return [Route(MANUAL_PATH, _serve_manual, methods=["GET"])]


async def _serve_manual(_request: Request) -> Response:
    return await json_response(manual_document())


def _entry_document(entry: ManualEntry) -> dict[str, Any]:
    return {
        "title": entry.title,
        "means": entry.means,
        "recognised": entry.recognised,
        "severity": entry.severity,
        "family": entry.family,
        "informational": entry.informational,
        "limits": list(entry.limits),
        "needs": list(entry.needs),
        "sources": list(entry.sources),
        "advice": [advice._asdict() for advice in entry.advice],
    }


def _signals() -> dict[str, dict[str, str]]:
    names = [*DERIVED_SIGNALS, *(name for metrics in CATALOG.values() for name in metrics)]
    known = {name: signal_text(name) for name in names}
    return {
        name: {"words": said.words, "unit": said.unit} for name, said in known.items() if said is not None
    }


_LOGIN_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Log in · {title}</title>
<link rel="icon" href="/static/icon.svg">
<script src="/static/core/theme.js"></script>
<link rel="stylesheet" href="/static/tokens.css"><link rel="stylesheet" href="/static/base.css">
<link rel="stylesheet" href="/static/components.css">
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
    """Return the login page.

    Args:
        message: What was wrong with the last token.
        title: Title of the site.
        style: Link to the site's style sheet.
    """
    said = f'<p class="error-note" role="alert">{escape(message)}</p>\n' if message else ""
    form = (
        '<form method="post" action="/login" class="card toolbar">\n'
        '<label class="field">Token '
        '<input name="token" type="password" autocomplete="current-password" required autofocus></label>'
        '\n<button class="button primary">Log in</button>\n</form>\n'
        '<p class="muted">The user who started the head can print the token on its machine with: gpulse token --show</p>'
    )
    return _LOGIN_PAGE.format(title=escape(title), style=style, body=f"{said}{form}")


TITLE_FILE = "title.txt"
STYLE_FILE = "theme.css"
_DEFAULT_TITLE = "gpulse"
_PLACEHOLDER = re.compile(r"\{(title|version|theme)\}")
_MAX_TITLE_CHARS = 80
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "require-trusted-types-for 'script'; trusted-types lit-html"
)
_THEME_SUFFIXES = (".css", ".svg", ".png", ".jpg", ".jpeg", ".webp", ".gif", ".ico", ".woff", ".woff2")
"""Files of a theme; others in its directory are not served."""


class Dashboard:
    """Serves the page and its files."""

    public = ("/static/", "/theme/")
    """Paths that need no login, because they contain no data."""

    def __init__(self, theme_dir: str | None = None) -> None:
        """Find the files.

        Args:
            theme_dir: Directory of a custom theme: `theme.css`, `title.txt`, and pictures and fonts of the CSS.
        """
        self._directory = str(files("gpulse.web").joinpath("static"))
        self._theme_dir = theme_dir

    def routes(self) -> list[BaseRoute]:
        """Return the routes of the files."""
        found: list[BaseRoute] = [
            *manual_routes(),
            Mount("/static", _with_gzip(_CachedFiles(directory=self._directory))),
        ]
        if self._theme_dir is not None:
            found.append(Mount("/theme", _with_gzip(_ThemeFiles(directory=self._theme_dir))))
        return found

    async def page(self, _request: Request) -> Response:
        """Serve the page, which loads everything else."""
        text = await asyncio.to_thread(self._document)
        return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY})

    async def login(self, message: str | None = None, *, status: int = 200) -> Response:
        """Serve the login page in the site's theme."""
        title, style = await asyncio.to_thread(self._read_theme)
        return HTMLResponse(
            login_form(message, title=title, style=style), status, {"Content-Security-Policy": _POLICY}
        )

    def _document(self) -> str:
        with open(f"{self._directory}/index.html", encoding="utf-8") as file:
            template = file.read()
        title, style = self._read_theme()
        words = {"title": escape(title), "version": escape(__version__), "theme": style}
        return _PLACEHOLDER.sub(lambda found: words[found[1]], template)

    def _read_theme(self) -> tuple[str, str]:
        """Return the title as text, and the link to the theme's style sheet."""
        if self._theme_dir is None:
            return _DEFAULT_TITLE, ""
        has_style = os.path.isfile(f"{self._theme_dir}/{STYLE_FILE}")
        return self._title(), f'<link rel="stylesheet" href="/theme/{STYLE_FILE}">' if has_style else ""

    def _title(self) -> str:
        try:
            with open(f"{self._theme_dir}/{TITLE_FILE}", encoding="utf-8", errors="replace") as file:
                return file.readline(4 * _MAX_TITLE_CHARS).strip()[:_MAX_TITLE_CHARS] or _DEFAULT_TITLE
        except OSError:
            return _DEFAULT_TITLE


def _with_gzip(app: ASGIApp) -> ASGIApp:
    """Compress files, to a third of their size, for people with a slow connection to their cluster."""
    return GZipMiddleware(app, minimum_size=1000, compresslevel=6)


class _CachedFiles(StaticFiles):
    """Files that browsers cache, and validate before each use."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        return response


class _ThemeFiles(_CachedFiles):
    """Files of a site's theme; other files are not found."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        hidden = any(part.startswith(".") for part in path.split("/"))
        if hidden or not path.lower().endswith(_THEME_SUFFIXES):
            raise HTTPException(404)
        return await super().get_response(path, scope)
