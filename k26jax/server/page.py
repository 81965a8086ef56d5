"""The page at `/`: files that come with the package, kept to this server by a policy."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).with_name("static")
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/tree.js": ("tree.js", "text/javascript; charset=utf-8"),
}
PAGE_PATHS = tuple(_FILES)
# The browser asks nobody but this server, runs no script but the page's, and shows it in no frame.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


async def page(request: Request) -> Response:
    """GET /, and the files that it names."""
    name, kind = _FILES[request.url.path]
    return Response((_FOLDER / name).read_bytes(), media_type=kind, headers=_HEADERS)
