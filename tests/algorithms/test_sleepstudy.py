"""Regression against the truth: PFLEGO's personal lines of eighteen people, and those of the linear mixed model."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.sleepstudy import DAYS, REACTION, MixedModel
from helpers.toys import Toy, run
from tfpfl.algorithms.pflego import pflego_exact
from tfpfl.data.population import Population
from tfpfl.engines.local.simulation import Simulation
from tfpfl.models import SplitModel, Weights

Y = np.array(list(REACTION.values()))
FOLDS = [np.array([day, day + 5]) for day in range(5)]  # two days of everybody are held out
PEOPLE = len(Y)


def test_the_mixed_model_is_that_of_the_literature():
    """The figures that lme4's own documentation prints for reaction ~ days + (days | person)."""
    model = MixedModel([DAYS] * PEOPLE, list(Y))
    assert model.criterion == pytest.approx(1743.6283, abs=1e-3)
    assert model.fixed == pytest.approx([251.405, 10.467], abs=1e-3)
    assert np.sqrt(np.diag(model.covariance)) == pytest.approx([24.741, 5.922], abs=2e-3)
    assert model.noise == pytest.approx(25.592, abs=1e-3)


def standardized(days):
    return (days - 4.5) / 2.87


class Pflego:
    """PFLEGO with a linear backbone of one feature and heads that are 0 at first; rates and tau are round numbers.

    Args:
        num_days: how many days of everybody it is fitted to.
    """

    def __init__(self, num_days: int):
        backbone = keras.Sequential([keras.Input((1,), dtype="float64"), keras.layers.Dense(1, dtype="float64")])
        backbone.set_weights([np.ones((1, 1)), np.zeros(1)])
        self.model = SplitModel(backbone, kind="regression", head_init="zeros")
        self.population = Population([num_days] * PEOPLE, [1] * PEOPLE)
        self.engine = Simulation(pflego_exact(self.model, self.population, tau=10, beta=0.1, rho=0.1))

    def lines(self, days, reactions, rounds: int) -> list:
        """The lines (intercept, slope) [I, 2] after each of the rounds. Reactions are standardized over all people."""
        center, spread = np.mean(reactions), np.std(reactions)
        x, y = standardized(days)[:, None], (reactions - center) / spread
        data, found = Toy(self.model, self.population, [(x, row[:, None]) for row in y]), []
        ends = tf.constant(standardized(np.array([[0.0], [1.0]])))
        server = heads = None
        for _ in range(rounds):
            server, heads = run(self.engine, data, server=server, states=heads)
            z = [self.model.logits(Weights(server.theta, heads[i]), ends).numpy().ravel() for i in range(PEOPLE)]
            first, second = center + spread * np.transpose(z)
            found.append(np.column_stack([first, second - first]))
        return found


def squares(lines, days, reactions):
    """The squared errors of everybody's line on these days: [I, days]."""
    lines = np.asarray(lines)
    return (reactions - lines[:, :1] - lines[:, 1:] * days) ** 2


@pytest.mark.slow
def test_personal_lines_predict_as_well_as_the_mixed_model_does():
    """Root mean squared error of days that nobody's line was fitted to, over all days and people: within 1 %.

    PFLEGO's rounds are chosen by cross-validation within the known days, as the mixed model's variances are.
    """
    found = {"mixed": [], "pflego": [], "alone": [], "together": []}
    inner, outer = Pflego(6), Pflego(8)
    for out in FOLDS:
        days, known = np.delete(DAYS, out), np.delete(Y, out, axis=1)
        errors = np.zeros(5)
        for test in ([j, j + 4] for j in range(4)):
            lines = inner.lines(np.delete(days, test), np.delete(known, test, axis=1), 5)
            errors += [squares(its, days[test], known[:, test]).mean() for its in lines]
        lines = {
            "mixed": MixedModel([days] * PEOPLE, list(known)).lines,
            "pflego": outer.lines(days, known, 1 + int(errors.argmin()))[-1],
            "alone": [np.polyfit(days, y, 1)[::-1] for y in known],
            "together": [np.polyfit(np.tile(days, PEOPLE), known.ravel(), 1)[::-1]] * PEOPLE,
        }
        for name, its in lines.items():
            found[name].append(squares(its, DAYS[out], Y[:, out]))
    rmse = {name: round(float(np.sqrt(np.mean(values))), 2) for name, values in found.items()}
    assert rmse["pflego"] < 1.01 * rmse["mixed"], rmse
    assert rmse["pflego"] < rmse["alone"] < 0.75 * rmse["together"], rmse  # it shrinks, and it is personal
    assert rmse == {"mixed": 28.79, "pflego": 28.92, "alone": 29.33, "together": 47.6}
