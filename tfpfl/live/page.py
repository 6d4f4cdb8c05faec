"""The page with which a browser tab is a device: its files, from the same origin as the protocol, and what it may do.

Only the files that were there when the server started are served, by their names: no path is ever looked up. The policy
lets the page load, run and ask nothing but this server, and nobody show it in a frame.
"""

import json
from pathlib import Path

from aiohttp import web

from tflite_export.device.files import describe
from tflite_export.device.layout import BROWSER_PROGRAM, HEAD, MANIFEST, THETA
from tfpfl.checks import InvalidArgument

INDEX, SITE, SITE_FORMAT = "index.html", "site.json", 1
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".json": "application/json",
    ".webmanifest": "application/manifest+json",
    ".wasm": "application/wasm",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; object-src 'none'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


def require_page(folder: Path) -> None:
    """Checks that a folder holds a page.

    Raises:
        InvalidArgument: it does not.
    """
    if not (folder / INDEX).is_file():
        raise InvalidArgument(f"{folder} holds no page: `make web` builds one in web/dist (Node.js is needed)")


class LivePage:
    """The files of the page.

    Args:
        folder: the page as `make web` builds it, or a site that `python -m tflite_export web` wrote.
        bundle: the bundle that a page without a site shows; it must have a program for browsers.

    Raises:
        InvalidArgument: the folder holds no page, or its site.json is damaged.
    """

    def __init__(self, folder: Path, bundle: Path):
        require_page(folder)
        self._files = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
        if SITE in self._files:
            try:
                site = json.loads(self._files.pop(SITE).read_text(encoding="utf-8"))
                dict.items(site["files"])  # a TypeError if these are no names and files
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise InvalidArgument(f"{folder / SITE} is damaged: write the site again ({error})") from error
        else:
            names = (MANIFEST, BROWSER_PROGRAM, THETA, HEAD)
            self._files |= {f"bundle/{name}": bundle / name for name in names}
            files = {name: describe(path) for name, path in self._files.items()}
            site = {"format": SITE_FORMAT, "made_by": "tfpfl serve", "files": files}
        self._site = json.dumps(site | {"live": True}).encode()  # by it, the page knows that it can join here

    def routes(self) -> list[web.RouteDef]:
        """What answers GET; for everything that no other route does."""
        return [web.get("/{name:.*}", self._answer)]

    async def _answer(self, request) -> web.StreamResponse:
        name = request.match_info["name"] or INDEX
        if name != SITE and name not in self._files:
            raise web.HTTPNotFound
        lasting = name.startswith(("assets/", "litert-")) or "sha256" in request.query  # as in the page's sw.js
        cached = "public, max-age=31536000, immutable" if lasting else "no-cache"
        kind = _TYPES.get(Path(name).suffix, "application/octet-stream")
        headers = {**HEADERS, "Cache-Control": cached, "Content-Type": kind}
        if name == SITE:
            return web.Response(body=self._site, headers=headers)
        return web.FileResponse(self._files[name], headers=headers)
