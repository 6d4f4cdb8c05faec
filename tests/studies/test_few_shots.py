"""Few examples of people who never trained: which ones, and that they adapt as if they had no others."""

import numpy as np
import pytest

from helpers import small_runs as runs
from tfpfl.checks import InvalidArgument
from tfpfl.data import Federation
from tfpfl.runs.run import Run
from tfpfl.studies import new_clients
from tfpfl.studies.few_shots import ShotCurve, few_of_each, shot_curve


def test_each_class_gives_as_many_as_it_has_and_draws_are_nested():
    labels = np.random.default_rng(0).permutation(np.repeat([0, 2, 3], [1, 4, 30]))
    before = set()
    for k in (1, 2, 5, 40):
        places = few_of_each(labels, k, seed=3, client=4)
        assert np.array_equal(places, np.unique(places))
        assert np.bincount(labels[places], minlength=4).tolist() == [min(k, n) for n in (1, 0, 4, 30)]
        assert before <= set(places.tolist())
        before = set(places.tolist())
    assert before == set(range(35))
    again = [few_of_each(labels, 2, 3, 4).tolist() for _ in range(2)]
    others = [few_of_each(labels, 2, *which).tolist() for which in ((4, 4), (3, 5), (3, 4, 1))]
    assert again[0] == again[1] and again[0] not in others
    targets = np.zeros((9, 2))
    assert [len(few_of_each(targets, k, 0, 0)) for k in (1, 5, 20)] == [1, 5, 9]
    with pytest.raises(ValueError, match="shots must be numbers of examples >= 1, found 0"):
        few_of_each(labels, 0, 0, 0)


@pytest.mark.parametrize(
    ("shots", "draws", "told"),
    [
        (5, 3, "shots must be a list, such as .* found 5"),
        ((), 3, "found none"),
        ((1, 0), 3, "shots must be at least 1, found 0"),
        ((1.5,), 3, "shots must be a whole number >= 1, found 1.5"),  # was taken for 2
        ((1,), "3", "draws must be a whole number >= 1, found '3'"),
    ],
)
def test_what_is_no_number_of_examples_or_draws_is_refused(shots, draws, told):
    with pytest.raises(InvalidArgument, match=told):
        shot_curve(None, shots, draws=draws)


def test_all_examples_of_a_class_are_drawn_equally_often():
    labels = np.repeat([0, 1], [5, 15])
    drawn = np.concatenate([few_of_each(labels, 3, 0, client) for client in range(2_000)])
    share = np.bincount(drawn, minlength=20) / 2_000
    wanted = np.repeat([3 / 5, 3 / 15], [5, 15])
    assert (np.abs(share - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / 2_000)).all()


def test_the_mean_of_a_curve_is_over_draws_first_and_then_over_the_clients_that_are_tested():
    score = np.array([[[0.0, np.nan, 0.4], [1.0, np.nan, 0.6]]])
    curve = ShotCurve((1,), np.arange(3), np.ones((1, 3), int), score, np.zeros(3))
    np.testing.assert_allclose(curve.by_client, [[0.5, np.nan, 0.5]])
    assert curve.means.tolist() == [0.5]


@pytest.mark.slow
def test_a_new_client_adapts_as_if_it_had_no_other_examples(six_clients, short_end, tmp_path):
    """The same run continued on a federation whose new clients have only the examples that were drawn."""
    run = runs.train(tmp_path / "run", six_clients, rounds=2, new_clients=2)
    with Run.open(run.folder) as opened:
        curve = shot_curve(opened, (1, 3), draws=2, epochs=3)
        new = curve.client_ids.tolist()
        assert curve.score.shape == (2, 2, 2) and len(new) == 2 and not set(new) & set(opened.population.client_ids)
        all_of_it = new_clients.adapt_new_clients(opened, epochs=3)
        every = shot_curve(opened, (1_000,), draws=1, epochs=3)
        np.testing.assert_allclose(every.score[0, 0], all_of_it.score[:, -1])
        np.testing.assert_allclose(curve.before, all_of_it.score[:, 0])
        clients = []
        for i in range(6):
            parts = {split: six_clients.raw(i, split, "global") for split in ("train", "validation", "test")}
            if i in new:
                places = few_of_each(parts["train"][1], 3, opened.config.seed, i, 1)
                parts["train"] = tuple(array[places] for array in parts["train"])
                assert curve.examples[1, new.index(i)] == len(places)
            clients.append(parts)
        fewer = Federation.from_clients(clients, out=tmp_path / "fewer")
        loop = opened.training()
        found = new_clients.adapt_clients(
            opened.algorithm, fewer, loop.server_state(), epochs=3, seed=opened.config.seed, round_num=3
        )
        np.testing.assert_allclose(curve.score[1, 1], found.score[:, -1], atol=1e-6)
        with pytest.raises(ValueError, match="shots must be numbers of examples >= 1"):
            shot_curve(opened, ())
