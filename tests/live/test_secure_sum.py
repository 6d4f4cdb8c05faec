"""The sum is exact, whoever drops out, and what the server holds of one client is noise."""

import numpy as np
import pytest
from scipy import stats

from helpers.marks import slow_but
from helpers.secure import FIRST, Told, aggregated, random_words
from tflite_export.device.live.secure import exchange, shamir
from tflite_export.device.live.secure.codec import Codec
from tflite_export.device.live.secure.masks import Attempt, PrivateKey, SecureError
from tfpfl.live import secure_graph as graph

SIZE = 11


def integer_sum(words, clients):
    """The sum modulo 2^32, by Python's integers."""
    return [sum(int(words[i][j]) for i in clients) % 2**32 for j in range(SIZE)]


@pytest.mark.parametrize("cases", slow_but((100, 10_000), 100))
def test_the_sum_is_that_of_the_integers_bit_for_bit(cases):
    """Random cohorts, thresholds and words; up to 40 % of the clients drop out, in random phases."""
    draw, opened, phases = np.random.default_rng(cases), 0, set()
    for case in range(cases):
        n = int(draw.integers(3, 7))
        ids = sorted(draw.choice(10**6, n, replace=False).tolist())
        words = {i: random_words(draw, SIZE) for i in ids}
        gone = [set(), set(), set(), set()]
        for i in draw.choice(ids, int(draw.integers(0, 1 + 2 * n // 5)), replace=False).tolist():
            gone[int(draw.integers(0, 4))].add(i)
        attempt = Attempt(f"run {case}", case + 1, 1 + case % 3)
        try:
            told = aggregated(words, gone, float(draw.choice([0.5, 0.6, 0.7])), attempt)
            found = told.opened()
        except ValueError:  # too few are left, which the next test and the rounds look at
            continue
        opened += 1
        phases |= {k for k in range(4) if gone[k]}
        assert found.tolist() == integer_sum(words, told.masked)
        assert set(told.masked) == set(ids) - gone[0] - gone[1] - gone[2]
    assert opened > 0.6 * cases and phases == {0, 1, 2, 3}


@pytest.mark.parametrize("phase", range(4))
def test_thirty_percent_drop_out_in_a_phase(phase):
    draw, ids = np.random.default_rng(phase), list(range(10))
    words = {i: random_words(draw, SIZE) for i in ids}
    gone = [set(), set(), set(), set()]
    gone[phase] = {1, 4, 8}
    told = aggregated(words, gone)
    assert set(told.masked) == set(ids) - (gone[phase] if phase < 3 else set())
    assert told.opened().tolist() == integer_sum(words, told.masked)


def test_with_too_few_nothing_is_opened():
    draw, ids = np.random.default_rng(9), list(range(10))
    words = {i: random_words(draw, SIZE) for i in ids}
    told = aggregated(words, [set(), set(), set(), {0, 1, 2, 3, 4}])
    assert len(told.shares) == 5  # t is 5 of 9 neighbours, and those who answer have 4
    with pytest.raises(SecureError, match="too few neighbours of client 5"):
        told.opened()
    assert aggregated(words, [set(), set(), set(), {0, 1, 2, 3}]).opened().tolist() == integer_sum(words, ids)
    with pytest.raises(SecureError, match="nothing is revealed"):  # the devices refuse the server's question
        aggregated(words, [set(), set(), {0, 1, 2, 3, 4}, set()])


def test_a_wrong_share_of_a_mask_key_is_found():
    words = {i: random_words(np.random.default_rng(2), SIZE) for i in range(5)}
    told = aggregated(words, [set(), set(), {4}, set()])
    first = told.shares[0]
    forged = told.shares | {0: first._replace(keys={4: bytes(31) + b"\1"})}
    with pytest.raises(SecureError, match="one of them is wrong"):
        told._replace(shares=forged).opened()


@pytest.mark.parametrize(("n", "part", "enough"), [(10, 0.5, 1), (11, 0.5, 2), (10, 0.7, 5)])
def test_how_many_neighbours_must_help_a_server_that_asks_for_both_masks(n, part, enough):
    """It tells some that client 0 is in the sum, the others that it dropped out, and its helpers answer both."""
    secrets = [exchange.Secrets.drawn() for _ in range(n)]
    peers = [exchange.Peer(i, PrivateKey(s.mask).public, PrivateKey(s.share).public) for i, s in enumerate(secrets)]
    k, t = n - 1, graph.threshold_of(n - 1, part)
    boxes = [exchange.close(FIRST, i, s, [p for p in peers if p.client != i], t) for i, s in enumerate(secrets)]

    def answers(j, survivors):
        mine = {i: boxes[i][j] for i in range(n) if i != j}
        held = exchange.open_boxes(FIRST, j, secrets[j], dict(enumerate(peers)), mine)
        return exchange.answer(held, [i for i in survivors if i != j], t)

    here, gone = ([answers(j, range(first, n)) for j in range(1, n)] for first in (0, 1))
    for helpers in range(enough + 1):
        seeds = {j: here[j - 1][0][0] for j in range(1, t + 1)}  # the helpers first, then others who are told the one
        keys = {j: gone[j - 1][1][0] for j in (*range(1, helpers + 1), *range(t + 1, n))}
        assert shamir.join(seeds, t) == secrets[0].seed
        assert (len(keys) >= t) == (helpers >= 2 * t - k) == (helpers == enough)
    assert shamir.join(keys, t) == secrets[0].mask


@pytest.mark.slow
def test_large_cohorts_have_few_neighbours_and_the_same_sum():
    n = 90
    draw = np.random.default_rng(5)
    words = {i: random_words(draw, SIZE) for i in range(n)}
    gone = [set(range(0, 5)), set(range(20, 27)), set(range(40, 47)), set(range(60, 67))]  # 29 % in all
    told = aggregated(words, gone)
    sizes = {len(near) for near in told.circle.neighbours.values()}
    assert sizes == {graph.degree(n - 5, 0.5)} and sizes.pop() < n - 6
    assert all(i in told.circle.neighbours[j] for i, near in told.circle.neighbours.items() for j in near)
    assert told.opened().tolist() == integer_sum(words, told.masked)


def test_the_degree_keeps_its_promises():
    """Against simulated circles: how often a client has too few neighbours left, and too many that are curious."""
    for n in (3, 10, 64):
        assert graph.degree(n, 0.5) == n - 1
    degrees = [graph.degree(n, 0.5) for n in (100, 1000, 10_000)]
    assert degrees == sorted(degrees) and degrees[0] < 99 and degrees[2] < 200
    n, k = 100, graph.degree(100, 0.5)
    t, draw, lost = graph.threshold_of(k, 0.5), np.random.default_rng(0), 0
    steps = np.array([s for s in range(-k // 2, k // 2 + 1) if s])
    for _ in range(2000):
        gone = np.zeros(n, bool)
        gone[draw.choice(n, 30, replace=False)] = True
        left = (~gone)[(np.arange(n)[:, None] + steps) % n].sum(1)
        lost += left.min() < t
    assert lost <= 2000 * 2.0**-10 + 5
    curious = np.sort(draw.random((2000, n)), 1)  # any 10 % of the clients are fewer than t
    assert curious.shape[1] * graph.CURIOUS < t


def test_what_the_server_holds_is_uniform():
    """Chi-square over the 65,536 values of half a word, of 10^6 words that all carry the same gradient."""
    size = 350_000
    words = dict.fromkeys(range(3), np.full(size, 7, np.uint32))
    told = aggregated(words)
    held = np.concatenate(list(told.masked.values()))
    assert len(held) > 10**6
    for part in (held >> np.uint32(16), held & np.uint32(0xFFFF)):
        assert 1e-4 < stats.chisquare(np.bincount(part, minlength=65536)).pvalue < 1 - 1e-4
    plain = np.concatenate(list(words.values()))  # and the test can fail
    assert stats.chisquare(np.bincount(plain & np.uint32(0xFFFF), minlength=65536)).pvalue < 1e-100
    correlation = np.corrcoef(told.masked[0].astype(float), told.masked[1].astype(float))[0, 1]
    assert abs(correlation) < 5 / np.sqrt(size)


def won(draw, games: int, masked: bool) -> int:
    """How many of so many membership games are won by a server that holds the words of client 0.

    In each game it guesses which of two gradients of eight numbers is in eight of the words. Without masks the nearer
    one is the right one. All games are of one attempt, in which each word has a mask of its own.
    """
    codec = Codec(8 * games, 3, 1e3, 1.0, 10)
    both = draw.normal(0, 0.1, (2, games, 8)).astype(np.float32)
    truth = draw.integers(0, 2, games)
    mine = both[truth, np.arange(games)].reshape(-1)
    others = draw.normal(0, 0.1, (2, codec.size)).astype(np.float32)
    words = {
        i: codec.encode(g, 1.0, 5, 1.0, random_words(draw, codec.words)).words for i, g in enumerate([mine, *others])
    }
    held = aggregated(words).masked[0] if masked else words[0]
    seen = codec.decode(held).gradient.reshape(games, 8)
    away = np.abs(seen - both).sum(-1)
    return int(((away[1] < away[0]) == truth).sum())


def test_a_membership_game_is_won_by_chance():
    draw, attempts, games = np.random.default_rng(27), 50, 800
    share = sum(won(draw, games, True) for _ in range(attempts)) / (attempts * games)
    assert abs(share - 0.5) < 0.01  # four deviations
    assert won(draw, games, False) == games
    print(f"with masks {share:.4f} of {attempts * games} games are won, without masks all")


def test_the_server_never_has_both_secrets_of_a_client():
    draw, ids = np.random.default_rng(4), list(range(8))
    told: Told = aggregated({i: random_words(draw, SIZE) for i in ids}, [set(), {7}, {5, 6}, set()])
    seeds = {i for shares in told.shares.values() for i in shares.seeds}
    keys = {i for shares in told.shares.values() for i in shares.keys}
    assert seeds == {0, 1, 2, 3, 4} and keys == {5, 6}
