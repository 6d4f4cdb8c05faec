"""The page with which browser tabs join, as the server of live rounds serves it. web/tests has what the page does."""

import http.client
import json
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import pytest

from helpers.live import serving
from tflite_export.device.layout import BROWSER_PROGRAM, HEAD, MANIFEST, THETA
from tflite_export.device.runtime import Bundle
from tfpfl.checks import InvalidArgument
from tfpfl.live.page import LivePage
from tfpfl.live.serve import bundles_of, programs_of

FILES = {"index.html": "<title>page</title>", "sw.js": "self", "assets/main-1.js": "x", "litert-1/a.wasm": "\0asm"}


@pytest.fixture
def built(tmp_path):
    """(a page as it is built, a bundle): four files each."""
    page, bundle = tmp_path / "page", tmp_path / "bundle"
    for name, text in FILES.items():
        (page / name).parent.mkdir(parents=True, exist_ok=True)
        (page / name).write_text(text)
    bundle.mkdir()
    for name in (MANIFEST, BROWSER_PROGRAM, THETA, HEAD, "check.npz"):
        (bundle / name).write_bytes(name.encode())
    (tmp_path / "secret").write_text("secret")
    return page, bundle


@contextmanager
def asking(run, page, watch=None):
    """ask(target, method) -> (status, headers, body), of a server with this page, or without."""
    with serving(run, page=page and (lambda bundles: page), watch=watch) as (address, _, tokens):

        def ask(target, method="GET"):
            with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)) as connection:
                connection.request(method, target)
                answer = connection.getresponse()
                return answer.status, answer.headers, answer.read()

        yield ask


def test_the_page_is_served_with_a_policy_and_nothing_else_is(run, built):
    page, bundle = built
    with asking(run, LivePage(page, bundle)) as ask:
        (page / "later").write_text("came later")
        status, headers, body = ask("/")
        assert (status, body.decode()) == (200, FILES["index.html"])
        policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'self'" and policy["script-src"] == "'self' 'wasm-unsafe-eval'"
        assert {policy[name] for name in ("object-src", "base-uri", "form-action", "frame-ancestors")} == {"'none'"}
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-cache"
        kinds = {"index.html": "text/html", "sw.js": "text/javascript", "litert-1/a.wasm": "application/wasm"}
        for name, kind in kinds.items():
            status, headers, body = ask(f"/{name}")
            assert (status, body.decode(), headers["Content-Type"].split(";")[0]) == (200, FILES[name], kind)
        assert "immutable" in ask("/assets/main-1.js")[1]["Cache-Control"]
        site = json.loads(ask("/site.json")[2])
        assert site["live"] is True and site["format"] == 1
        assert sorted(site["files"]) == sorted(
            [*FILES, *(f"bundle/{name}" for name in (MANIFEST, BROWSER_PROGRAM, THETA, HEAD))]
        )
        assert all(ask(f"/{name}?sha256=1")[0] == 200 for name in site["files"])
        for target in (
            "/later",
            "/../secret",
            "/%2e%2e/secret",
            "/assets",
            "/assets/",
            "/bundle/check.npz",
            "//",
            "/\\",
        ):
            assert ask(target)[0] == 404, target
        assert ask("/index.html", "POST")[0] == 405
        assert ask("/v1/health")[0] == 200 and ask("/v1/work?wait=0")[0] == 401  # the protocol is beside it
    with asking(run, None) as ask:
        assert ask("/")[0] == 404 and ask("/site.json")[0] == 404


def test_a_site_stays_what_it_is_and_other_folders_are_refused(built):
    page, bundle = built
    files = {"index.html": {"bytes": 1, "sha256": "00"}}
    (page / "site.json").write_text(json.dumps({"format": 1, "made_by": "tfpfl 1", "files": files}))
    found = json.loads(LivePage(page, bundle)._site)
    assert found == {"format": 1, "made_by": "tfpfl 1", "files": files, "live": True}
    for text in ("{", "[]", '{"files": 3}'):
        (page / "site.json").write_text(text)
        with pytest.raises(InvalidArgument, match="damaged"):
            LivePage(page, bundle)
    with pytest.raises(InvalidArgument, match="make web"):
        LivePage(bundle, bundle)


@pytest.mark.slow
def test_bundles_get_a_program_for_browsers_when_there_is_a_page(run):
    """Devices that have joined have the same program afterwards, and no client's examples are in the bundles."""
    before = bundles_of(run)
    programs = programs_of(before)
    after = bundles_of(run, browser=True)
    assert after == before and programs_of(after) == programs
    assert [Bundle(folder).manifest["browser"]["client"] for folder in after.values()] == [None] * len(after)  # checked
    kept = {k: (folder / BROWSER_PROGRAM).stat().st_mtime_ns for k, folder in after.items()}
    assert not any((folder / "client.safetensors").exists() for folder in after.values())
    assert bundles_of(run, browser=True) == after == bundles_of(run)
    assert kept == {k: (folder / BROWSER_PROGRAM).stat().st_mtime_ns for k, folder in after.items()}
    assert {path.name for path in (run.folder / "bundles").iterdir()} == {f"k{k}" for k in after}
