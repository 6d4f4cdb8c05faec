"""What a client predicts with that has never taken part, against the table in docs/protocols.md."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.normalized import model_for
from helpers.quick import quick
from tfpfl.algorithms import ALGORITHMS, build_algorithm
from tfpfl.algorithms.contract import ClientData
from tfpfl.engines.local.simulation import Simulation
from tfpfl.studies import battery
from tfpfl.studies.battery_subject import Trained, visits_by_id

PAGE = Path(__file__).parents[2] / "docs" / "protocols.md"
NEVER = 5  # a client that is in no round


def table() -> dict:
    """{title of a method: (backbone, head)} of the page."""
    text = PAGE.read_text(encoding="utf-8")
    lines = text[text.index("<!-- unseen -->") : text.index("<!-- /unseen -->")].strip().splitlines()[3:]
    rows = ([cell.strip() for cell in line.strip("| ").split("|")] for line in lines)
    return {title: (backbone, head) for titles, backbone, head in rows for title in titles.split(", ")}


def same(ours, theirs) -> bool:
    pairs = list(zip(tf.nest.flatten(ours), tf.nest.flatten(theirs), strict=True))
    return all(np.shape(a) == np.shape(b) and np.allclose(a, b, atol=1e-7) for a, b in pairs)


def test_the_page_has_every_method():
    assert set(table()) == {row.title for row in ALGORITHMS.values()}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(ALGORITHMS, "pflego", "pgfed", "local"))
def test_what_it_predicts_with(name, federation):
    """After two rounds of others, each part of the model is that of round 0, or the newest that the server sends."""
    population = battery.small_population(federation)
    algorithm = build_algorithm(name, model_for(name), population, **quick(name))
    engine = Simulation(algorithm, federation)
    [visit] = visits_by_id(population, [NEVER], 11)
    data = ClientData(*federation.reader("train")(NEVER), visit.info, tf.constant(visit.key))

    def predicts(trained):
        [state] = trained.states([NEVER])
        message = algorithm.message(trained.server, *([tf.constant(NEVER)] if algorithm.message_per_client else []))
        return message, algorithm.personal_model(message, tf.nest.map_structure(tf.constant, state), data)

    _, before = predicts(Trained(algorithm, engine))
    message, after = predicts(Trained(algorithm, engine).rounds(2, cohorts=lambda t: [0, 1, 2]))
    sent = tf.nest.flatten(message)
    row = ALGORITHMS[name]
    for part, told in zip(("theta", "head"), table()[row.title], strict=True):
        first = same(getattr(before, part), getattr(after, part))
        newest = all(any(same(each, leaf) for leaf in sent) for each in tf.nest.flatten(getattr(after, part)))
        defaults = {k: p.default for k, p in row.hyperparameters.items()}
        other = "fine-tuned" if row.evaluated(defaults) == "fine-tuned" else "mixed"
        assert told == ("first" if first else "newest" if newest else other), (part, told)
