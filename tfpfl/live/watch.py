"""What an operator sees of live rounds: who is here, who is late, bytes and curves; as JSON, and as a page.

It says which clients are awake, and so it is for one who has the operator's token, on the loopback too: other people
may use this machine, and behind a proxy every request comes from it. The page itself holds nothing; it asks for the
token. docs/live_protocol.md has the JSON.
"""

import hashlib
import hmac
import secrets
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from tflite_export.device.files import write_whole
from tflite_export.device.live import wire
from tflite_export.device.live.wire import KEYS, PHASES
from tfpfl.checks import InvalidArgument
from tfpfl.live.rounds import LiveRounds
from tfpfl.live.rules import Refused
from tfpfl.live.watching import OPERATOR, STATES
from tfpfl.runs import protocols
from tfpfl.runs.results import json_row

LATE = 0.5  # the part of a round's time after which a client that is waited for is late
KEPT = 0.5  # seconds for which an answer is kept, so that many watchers cost no more than one
MOST_MEMBERS, MOST_ROUNDS, MOST_EVENTS = 200, 1000, 30  # in one answer
WATCHED = 10.0  # seconds for which one who asked counts as watching
_PAGE = Path(__file__).parent / "watch_page"
_FILES = {"page.css": "text/css", "page.js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def operator_token(folder: Path) -> str:
    """The operator's token of a run, from its folder; made if there is none. Only the file's owner can read it.

    Raises:
        InvalidArgument: the file holds something else.
    """
    path = folder / OPERATOR
    if not path.exists():
        write_whole(path, secrets.token_urlsafe(24).encode() + b"\n", 0o600)
    token = path.read_text(encoding="utf-8", errors="replace").strip()
    if not (token.isascii() and token.isprintable() and 16 <= len(token) <= 200 and " " not in token):
        raise InvalidArgument(f"{path} holds no token: delete it, and the next start makes one")
    return token


class Watch:
    """The state of live rounds for one who has the operator's token. One thread at a time asks for it.

    Args:
        rounds: the rounds.
        token: the operator's token.
    """

    def __init__(self, rounds: LiveRounds, token: str):
        self.rounds, self._token = rounds, hashlib.sha256(token.encode()).digest()
        self.history: list[dict] = []  # all saved rounds, as `state` has found them
        self._again = 0  # the rounds after this one are read again: scores may have come after they were saved
        self._scores: dict[int, float] = {}  # {client: its score in the last evaluated round}
        self._kept: dict[str, Any] = {}
        self._seen: tuple | None = None  # of which part of which round the kept answer is
        self._asked = -np.inf  # seconds since 1970
        config, named = rounds.run.config, rounds.run.config.score
        splits = rounds._splits
        self._about = {
            "name": rounds.run.folder.absolute().name,
            "id": config.run_id,
            "algorithm": config.algorithm,
            "clients": len(rounds.run.population.client_ids),  # on places, all who may join
            "rounds": config.rounds,
            "split": "test" if "test" in splits else splits[0] if splits else "",
            "score": {"name": named.name, "fraction": named.is_fraction, "larger_is_better": named.larger_is_better},
            "deadline": rounds.rules.deadline,
            "quorum": rounds.rules.quorum,
            "wait_for": rounds.rules.wait_for,
        }

    def check(self, header: str) -> None:
        """Checks the header Authorization of a request.

        Raises:
            Refused: it does not have the operator's token.
        """
        kind, _, token = header.partition(" ")
        given = hashlib.sha256(token.strip().encode(errors="replace")).digest()
        if kind.lower() != "bearer" or not hmac.compare_digest(given, self._token):
            raise Refused(401, f"this is for the operator: send the token in {OPERATOR} of the run folder")

    def is_watched(self, now: float) -> bool:
        """Whether somebody asked for the state within the last `WATCHED` seconds."""
        return now - self._asked < WATCHED

    def state(self, since: int, now: float) -> dict:
        """All that is shown.

        Args:
            since: the history begins with the round after this one, and has at most `MOST_ROUNDS`.
            now: seconds since 1970.
        """
        self._asked = now
        seen = self.rounds.view.kind, self.rounds.view.round_num
        if seen != self._seen or not 0 <= now - self._kept["at"] < KEPT:
            self._kept, self._seen = self._state(now), seen
        return self._kept | {"history": self.history[max(since, 0) :][:MOST_ROUNDS]}

    def _state(self, now: float) -> dict:
        self._read_rounds()
        opened = self._round()
        members, counts = self._members(opened, now)
        names = ("at", "what", "round", "client")
        return {
            "protocol": wire.PROTOCOL,
            "at": round(now, 3),
            "run": self._about,
            "doing": wire.VISIT if self.rounds.view.kind in PHASES else self.rounds.view.kind,
            "saved": self.rounds.saved,
            "scoring": self.rounds.oldest_scored,
            "round": opened,
            "counts": counts,
            "members": members[:MOST_MEMBERS],
            "left_off": max(len(members) - MOST_MEMBERS, 0),
            "bytes": {way: sum(row[f"bytes_{way}"] for row in self.history) for way in ("up", "down")},
            "events": [dict(zip(names, event[1:5], strict=True)) for event in self.rounds.book.events(MOST_EVENTS)],
        }

    def _round(self) -> dict | None:
        """The round that is under way; None if there is none."""
        view, book, rules = self.rounds.view, self.rounds.book, self.rounds.rules
        if view.kind not in (wire.VISIT, wire.SCORE, *PHASES):
            return None
        opened = book.open_now()
        if opened is None:  # nobody is invited: devices work at their own speed
            nobody: dict = {name: [] for name in ("invited", "came", "waiting")}
            number = self.rounds.saved + (view.kind == wire.VISIT)  # after the last step, its theta is scored
            return {"number": number, "began": None, "deadline": None, "moved": False} | nobody
        invited = list(opened.arrival)
        began = opened.opened if view.kind in (wire.VISIT, KEYS) else view.deadline - rules.deadline
        came = [i for i in invited if book.counted(view.round_num, i) is not None]
        if view.kind in PHASES:  # whoever has sent the message of this phase
            attempt = book.attempt(view.round_num).number
            if view.kind != KEYS or attempt > 1:  # the time of an attempt that failed makes nobody late
                began = view.deadline - (rules.deadline if view.kind == KEYS else rules.phase)
            came = [i for i in sorted(view.settings) if book.message(view.round_num, attempt, view.kind, i) is not None]
        return {
            "number": view.round_num,
            "began": began,
            "deadline": view.deadline,
            "moved": view.deadline - began > 1.5 * rules.deadline,
            "invited": invited,
            "came": came,
            "waiting": sorted(view.waiting),
        } | ({"phase": view.kind} if view.kind in PHASES else {})

    def _members(self, opened: dict | None, now: float) -> tuple[list[dict], dict[str, int]]:
        """All clients, those that need a look first; and how many are in which state."""
        waiting, awake = self.rounds.view.waiting, set(self.rounds.awake(now).tolist())
        done = set(opened["came"]) if opened else set()
        if self.rounds.view.kind == wire.SCORE:
            done = set(self.rounds.book.scores(self.rounds.view.round_num))
        late = False
        if opened is not None and opened["deadline"] is not None:
            late = now - opened["began"] > LATE * (opened["deadline"] - opened["began"])
        names, rows = self.rounds.run.federation.client_names, []
        for i, member in self.rounds.book.members().items():
            if member.revoked or member.key is None:
                state = "revoked" if member.revoked else "not joined"
            elif i in waiting:
                state = "late" if late or i not in awake else "working"
            else:
                state = "sent" if i in done else "here" if i in awake else "away"
            heard = self.rounds.seen.get(i) if member.key is not None else None
            row = {"client": i, "name": names[i], "state": state, "invited": member.invited, "came": member.arrived}
            row["heard"] = None if heard is None else round(max(now - heard, 0.0), 1)
            rows.append(row | {"score": self._scores.get(i)})
        counts = Counter(row["state"] for row in rows)
        rows.sort(key=lambda row: STATES.index(row["state"]))
        return rows, {state: counts[state] for state in STATES}

    def _read_rounds(self) -> None:
        """Reads the rounds that were saved since the last time, and again those that were still being scored then."""
        store, split, score = self.rounds.run.store, self._about["split"], self._about["score"]["name"]
        since, evaluated = min(self._again, len(self.history)), None
        self._again = (self.rounds.oldest_scored or self.rounds.saved + 1) - 1
        rows = store.history(since=since)
        del self.history[since:]
        for row in rows:
            told = {name: row.get(name) for name in ("round", "clients", "dropped", "loss", "seconds")}
            told |= {"bytes_up": row.get("bytes_up", 0), "bytes_down": row.get("bytes_down", 0), "scores": {}}
            for name, key in ((score, "score"), ("loss", "loss")):
                end = f" {split} {name}"
                for model in (key.removesuffix(end) for key in row if key.endswith(end)):
                    told["scores"].setdefault(model, {})[key] = row[f"{model}{end}"]
                    evaluated = row["round"]
            models = sorted(told["scores"], key=protocols.MODELS.index)
            told["scores"] = {model: json_row(told["scores"][model]) for model in models}
            self.history.append(json_row(told))
        if evaluated is not None:
            rows = [e for e in store.evaluations(evaluated) if e.split == split]
            own = protocols.predicts(rows)
            self._scores = {e.client_id: e.score for e in rows if e.model == own and np.isfinite(e.score)}


class WatchPage:
    """The page that shows the state; its three files are read when the server starts."""

    def __init__(self):
        self._files = {name: (_PAGE / name).read_bytes() for name in ("index.html", *_FILES)}

    def routes(self) -> list[web.RouteDef]:
        """What answers GET /watch, and its style and script."""
        return [web.get("/watch", self._answer), *(web.get(f"/watch/{name}", self._answer) for name in _FILES)]

    async def _answer(self, request: web.Request) -> web.Response:
        name = request.path.removeprefix("/watch").removeprefix("/") or "index.html"
        kind = _FILES.get(name, "text/html")
        return web.Response(body=self._files[name], headers=_HEADERS, content_type=kind, charset="utf-8")
