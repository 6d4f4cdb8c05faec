"""`Gate` alone, with the clock of the test: a signed request is taken once, while its time is good; and `Steady`."""

import hashlib
from types import SimpleNamespace

import pytest
from aiohttp import test_utils

from tflite_export.device.live import wire
from tfpfl.live.book import Member
from tfpfl.live.gate import SLOWEST_BODY, Gate
from tfpfl.live.rules import Refused
from tfpfl.live.server import Steady

STARTED, TARGET, NOBODY = 1_790_000_000.0, "/v1/work?wait=0", hashlib.sha256(b"").hexdigest()


class Door:
    """A gate with one client behind it."""

    def __init__(self):
        self.gate, self.signer = Gate(10, STARTED), wire.Signer()
        self.members = {4: Member(4, self.signer.public, False, 0, 0)}
        self.rounds = SimpleNamespace(member=self.members.__getitem__)

    def signed(self, time):
        """A request that the client has signed at this time of its own clock."""
        headers = self.signer.stamp(4, "GET", TARGET, b"", time).headers()
        return test_utils.make_mocked_request("GET", TARGET, headers)

    def comes(self, request, now, seconds=0.0):
        """The request comes at this time, and its body so many seconds later."""
        member, stamp = self.gate.who(self.rounds, request, now)
        self.gate.check(member, stamp, request, NOBODY, now + seconds)


# (how many seconds the client's clock is ahead, how many seconds later the request comes again)
@pytest.mark.parametrize(
    "ahead, later", [(0, 0), (0, 19), (0, 299), (0, 300), (300, 301), (300, 599), (300, 600), (-300, 0)]
)
def test_a_request_is_not_taken_twice_as_long_as_its_time_is_good(ahead, later):
    door, now = Door(), STARTED + 1000
    request = door.signed(now + ahead)
    door.comes(request, now)
    with pytest.raises(Refused, match="came before") as refused:
        door.comes(request, now + later)
    assert refused.value.status == 401
    door.comes(door.signed(now + later), now + later)  # one that is signed anew is taken


def test_the_last_moment_of_a_request_is_not_longer_for_a_slow_body():
    """Its time is checked when its head comes, and whether it came before when the body is there."""
    door, now = Door(), STARTED + 1000
    request = door.signed(now + 300)
    door.comes(request, now)
    with pytest.raises(Refused, match="came before"):
        door.comes(request, now + 600, SLOWEST_BODY)


def test_requests_are_forgotten_when_their_time_is_no_longer_good():
    door, now = Door(), STARTED + 1000
    for second in range(50):
        door.comes(door.signed(now + second), now + second)
    request = door.signed(now + 300)
    door.comes(request, now + 50)
    with pytest.raises(Refused, match="clock is .* off"):  # so it need not be known any more
        door.comes(request, now + 601)
    assert len(door.gate._used) == 51
    door.comes(door.signed(now + 800), now + 800)
    assert len(door.gate._used) == 1


def test_a_clock_that_is_set_back_locks_nobody_out():
    """As when a machine gets the right time after the server was started; what was signed before stays refused."""
    door, now = Door(), STARTED - 3600
    with pytest.raises(Refused, match="clock is .* off"):
        door.comes(door.signed(STARTED), now)
    door.comes(door.signed(now), now)
    with pytest.raises(Refused, match="before the server started"):
        door.comes(door.signed(now - 1), now + 1)
    request = door.signed(now + 1)
    door.comes(request, now + 1)
    with pytest.raises(Refused, match="came before"):
        door.comes(request, now + 2)


def test_the_clock_of_the_rounds_is_never_set_back():
    shown = iter([100.0, 101.0, 41.0, 43.0, 50.0, 20.0, 21.0, 90.0])
    steady = Steady(lambda: next(shown))
    assert [steady() for _ in range(8)] == [100.0, 101.0, 101.0, 103.0, 110.0, 110.0, 111.0, 180.0]


def test_only_the_client_itself_is_told_that_its_token_was_revoked():
    door, now = Door(), STARTED + 1000
    door.members[4] = door.members[4]._replace(revoked=True)
    with pytest.raises(Refused, match="revoked: ask for a new one") as refused:
        door.comes(door.signed(now), now)
    assert refused.value.status == 403
    door.signer = wire.Signer()  # somebody else
    with pytest.raises(Refused, match="signature") as refused:
        door.comes(door.signed(now), now)
    assert refused.value.status == 401
