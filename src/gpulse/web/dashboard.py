"""The dashboard as files: its page, its modules and styles, and a site's own look beside them."""

from __future__ import annotations

import asyncio
import os
import re
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles

from gpulse._version import __version__
from gpulse.web import manual
from gpulse.web.pages import login_form

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Scope

TITLE_FILE = "title.txt"
STYLE_FILE = "theme.css"
_TITLE = "gpulse"
_PLACE = re.compile(r"\{(title|version|theme)\}")
_LONGEST_TITLE = 80
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "require-trusted-types-for 'script'; trusted-types lit-html"
)
_SITE_KINDS = (".css", ".svg", ".png", ".jpg", ".jpeg", ".webp", ".gif", ".ico", ".woff", ".woff2")
"""What a site's own look is made of; other files in its directory are nobody's business."""


class Dashboard:
    """Where the page and its files come from."""

    public = ("/static/", "/theme/")
    """Files that say nothing about anybody's GPUs."""

    def __init__(self, theme_dir: str | None = None) -> None:
        """Find the files.

        Args:
            theme_dir: A site's own look: `theme.css`, `title.txt`, and the pictures and fonts that the CSS names.
        """
        self._directory = str(files("gpulse.web").joinpath("static"))
        self._theme_dir = theme_dir

    def routes(self) -> list[BaseRoute]:
        """The files."""
        found: list[BaseRoute] = [
            *manual.routes(),
            Mount("/static", _packed(_Files(directory=self._directory))),
        ]
        if self._theme_dir is not None:
            found.append(Mount("/theme", _packed(_SiteFiles(directory=self._theme_dir))))
        return found

    async def page(self, _request: Request) -> Response:
        """The one document; everything else is loaded by it."""
        text = await asyncio.to_thread(self._document)
        return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY})

    async def login(self, message: str | None = None, *, status: int = 200) -> Response:
        """The form that takes the token, in the site's own look."""
        title, style = await asyncio.to_thread(self._look)
        return HTMLResponse(
            login_form(message, title=title, style=style), status, {"Content-Security-Policy": _POLICY}
        )

    def _document(self) -> str:
        with open(f"{self._directory}/index.html", encoding="utf-8") as file:
            template = file.read()
        title, style = self._look()
        words = {"title": escape(title), "version": escape(__version__), "theme": style}
        return _PLACE.sub(lambda found: words[found[1]], template)

    def _look(self) -> tuple[str, str]:
        """The title as text, and the link to the site's own style sheet."""
        if self._theme_dir is None:
            return _TITLE, ""
        has_style = os.path.isfile(f"{self._theme_dir}/{STYLE_FILE}")
        return self._title(), f'<link rel="stylesheet" href="/theme/{STYLE_FILE}">' if has_style else ""

    def _title(self) -> str:
        try:
            with open(f"{self._theme_dir}/{TITLE_FILE}", encoding="utf-8", errors="replace") as file:
                return file.readline(4 * _LONGEST_TITLE).strip()[:_LONGEST_TITLE] or _TITLE
        except OSError:
            return _TITLE


def _packed(app: ASGIApp) -> ASGIApp:
    """Files that travel compressed: a third of their size, for people far away from their cluster."""
    return GZipMiddleware(app, minimum_size=1000, compresslevel=6)


class _Files(StaticFiles):
    """Files that a browser keeps, asking each time whether they are still the same."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        return response


class _SiteFiles(_Files):
    """Files of a site: only those that a page's look is made of, read anew each time."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        hidden = any(part.startswith(".") for part in path.split("/"))
        if hidden or not path.lower().endswith(_SITE_KINDS):
            raise HTTPException(404)
        return await super().get_response(path, scope)
