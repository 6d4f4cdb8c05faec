"""Who may send what to a server of live rounds: signatures, clocks, numbers used once, and how often one joins."""

import re
from collections import OrderedDict

from aiohttp import web

from tflite_export.device.live import wire
from tfpfl.live.book import Member
from tfpfl.live.rounds import LiveRounds
from tfpfl.live.rules import Refused

CLOCKS_APART = 300.0  # seconds
SLOWEST_BODY = 30.0  # seconds in which a body must have come, and of an update in which more of it must have come
# Seconds in which a request is known. It may be signed CLOCKS_APART ahead, its head may come again until it is
# CLOCKS_APART old, and the body SLOWEST_BODY later; a busy loop may notice late that this time is over.
_KNOWN = 2 * CLOCKS_APART + 2 * SLOWEST_BODY


class Gate:
    """Who may send what: signatures, clocks, numbers that are used once, and how often one joins.

    Args:
        joins: so many devices may join from one address in a minute.
        started: seconds since 1970. Requests that were signed before are refused, since the numbers that were used
            before are not known any more.
    """

    def __init__(self, joins: int, started: float):
        self._most_joins, self._started = joins, int(started)
        self._used: OrderedDict[tuple[int, str], float] = OrderedDict()
        self._keys: dict[str, wire.PublicKey] = {}
        self._joins: dict[str, list[float]] = {}

    def who(self, rounds: LiveRounds, request: web.Request, now: float) -> tuple[Member, wire.Stamp]:
        """Who says that he sent a request, before its body is read.

        Raises:
            Refused: there is no such client, it has not joined, or its clock is wrong.
        """
        values = [request.headers.get(name, "") for name in (wire.CLIENT, wire.TIME, wire.NONCE, wire.SIGNATURE)]
        stamp = wire.Stamp(*values)
        digits = stamp.client.isascii() and stamp.client.isdigit() and len(stamp.client) < 10
        if not digits or str(int(stamp.client)) != stamp.client:
            raise Refused(401, f"{wire.CLIENT} must be the number of a client that has joined")
        if not (stamp.time.isascii() and stamp.time.isdigit() and len(stamp.time) < 12):
            raise Refused(401, f"{wire.TIME} must be a whole number of seconds since 1970")
        member = rounds.member(int(stamp.client))
        if abs(now - int(stamp.time)) > CLOCKS_APART:
            raise Refused(401, f"the device's clock is {int(stamp.time) - now:+.0f} s off: set it")
        if now < self._started:  # the clock was set back: otherwise all would be refused until it is here again
            self._started = int(now)
        if int(stamp.time) < self._started:
            raise Refused(401, "the request was signed before the server started: sign it again")
        return member, stamp

    def check(self, member: Member, stamp: wire.Stamp, request: web.Request, digest: str, now: float) -> None:
        """Checks that the client has signed the request, and that it did not come before.

        Args:
            member, stamp: from `who`.
            request: the request.
            digest: the sha256 of the body, in hexadecimal.
            now: seconds since 1970.

        Raises:
            Refused: the signature is wrong, or the request came before (401); or the client's token was revoked (403).
        """
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise Refused(401, f"{wire.BODY} must be the sha256 of the body, in hexadecimal")
        assert member.key is not None
        if member.key not in self._keys:
            self._keys[member.key] = wire.PublicKey(member.key)
        try:
            self._keys[member.key].check(stamp, request.method, request.path_qs, digest)
        except wire.WireError as error:
            raise Refused(401, str(error)) from None
        if member.revoked:  # nobody else is told
            raise Refused(403, f"the token of client {member.client} was revoked: ask for a new one")
        while self._used and next(iter(self._used.values())) < now - _KNOWN:
            self._used.popitem(last=False)
        if (member.client, stamp.nonce) in self._used:
            raise Refused(401, "this request came before: sign every request anew")
        self._used[member.client, stamp.nonce] = now

    def may_join(self, address: str, now: float) -> None:
        """Counts a join.

        Raises:
            Refused: too many came from this address (429).
        """
        self._joins = {a: kept for a, times in self._joins.items() if (kept := [t for t in times if t > now - 60])}
        times = self._joins.setdefault(address, [])
        if len(times) >= self._most_joins:
            raise Refused(429, f"{self._most_joins} devices have joined from this address in a minute: wait")
        times.append(now)
