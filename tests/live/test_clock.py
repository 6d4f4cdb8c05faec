"""The clock of the server's machine is set back while a round is open."""

import time

from helpers.live import Talker, serving
from tflite_export.device.live import wire
from tfpfl.live.rules import Rules


def test_a_round_ends_though_the_clock_was_set_back(run):
    """Nobody sends an update: the deadline moves again and again, each time by two seconds of this test."""
    back = [0.0]

    def clock():
        return time.time() - back[0]

    with serving(run, Rules(wait_for=10, deadline=2.0), clock=clock) as (address, rounds, tokens):
        for client in range(10):
            assert Talker(address, clock).join(run, client, tokens[client])[0] == 200
        assert rounds.view.kind == wire.VISIT
        back[0] = 3600.0

        def moved():
            return sum(event[2] == "extended" for event in rounds.book.events())

        until = time.monotonic() + 60
        while moved() < 2 and time.monotonic() < until:
            time.sleep(0.1)
        assert moved() >= 2
