"""No two purposes of randomness share their numbers, and nothing is drawn beside the list of purposes."""

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfpfl
from tfpfl.checks import InvalidArgument
from tfpfl.data.randomness import Fold, ModelKey, Stream, entropy, generator

PACKAGE = Path(tfpfl.__file__).parent


def start(seed, stream, index):
    return tuple(entropy(seed, stream, index).generate_state(8).tolist())


@pytest.mark.parametrize("seed", [0, 1, 7, 2**31 - 1])
def test_streams_of_one_seed_start_from_different_entropy(seed):
    """Data and run may have the same seed, and a round the number of a client."""
    starts = {}
    for stream in Stream:
        for index in range(1, 40):
            starts.setdefault(start(seed, stream, index), set()).add(stream)
    shared = [streams for streams in starts.values() if len(streams) > 1]
    assert not shared
    assert len(starts) > 39 * (len(Stream) - 2)  # two have no index; all others start anew for every index


def test_keys_of_one_client_differ():
    """Epochs are folded in as 0, 1, ...; other purposes must not be one of them."""
    key = tf.constant([3, 14], tf.int32)
    numbers = [*Fold, *range(20)]
    folded = {tuple(tf.random.experimental.stateless_fold_in(key, number).numpy().tolist()) for number in numbers}
    assert len(folded) == len(Fold) + 20
    assert len({tuple(tf.constant([5, purpose], tf.int32).numpy()) for purpose in ModelKey}) == len(ModelKey)


def test_saved_runs_and_federations_rely_on_these_numbers():
    """Written out as NumPy has them: (entropy, spawn key) of seed 9 and index 4."""
    expected = {
        Stream.SOURCE: (9, ()),
        Stream.NEW_CLIENTS: ((9, 4), ()),
        Stream.PARTITION: (9, (0,)),
        Stream.COHORT: (9, (1, 4)),
        Stream.VALIDATION: (9, (2, 4)),
        Stream.CLIENT_KEY: (9, (3, 4)),
        Stream.DROPS: (9, (4, 4)),
        Stream.CLIENT_DROPOUT: (9, (5, 4)),
        Stream.CLIENT_SPEED: (9, (6, 4)),
        Stream.JITTER: (9, (7, 4)),
        Stream.COHORT_SIZE: (9, (8, 4)),
        Stream.COHORT_SHARE: (9, (10, 4)),
        Stream.CLIENT_TEST: (9, (9, 4)),
        Stream.SHOTS: (9, (11, 4)),
        Stream.BETWEEN: (9, (12, 4)),
        Stream.PRETRAINING: (9, (13, 4)),
        Stream.PRETRAINING_LAYERS: (9, (14, 4)),
        Stream.POOL_TEST: (9, (1004,)),
    }
    for stream, (seed, key) in expected.items():
        same = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
        assert np.array_equal(generator(9, stream, 4).random(5), same.random(5)), stream
    assert set(expected) == set(Stream)
    assert [int(fold) for fold in (Fold.STRAGGLER, Fold.SPLIT, Fold.FAULT)] == [-1, -2, -3]
    assert (int(ModelKey.BACKBONE), int(ModelKey.HEAD)) == (0, 1)


@pytest.mark.parametrize(("seed", "index"), [(-1, 0), (0, -1)])
def test_negative_numbers_are_refused(seed, index):
    with pytest.raises(InvalidArgument, match="-1"):
        entropy(seed, Stream.COHORT, index)


@pytest.mark.parametrize(("seed", "index"), [(0.5, 0), ("1", 0), (0, 1.5), (None, 0), ("x", 0), (0, float("inf"))])
def test_what_is_no_whole_number_is_refused(seed, index):
    """Seeds 0.1 and 0.5 were both 0."""
    with pytest.raises(InvalidArgument, match="must be whole numbers, found seed"):
        entropy(seed, Stream.COHORT, index)
    same = entropy(np.int64(3), Stream.COHORT, np.int32(2)).generate_state(1)
    assert same == entropy(3, Stream.COHORT, 2).generate_state(1)


def test_no_generator_starts_elsewhere():
    """`battery` makes up data, and `papers.explicit` chooses whom a figure shows: neither is part of a run.

    `own_networks` seeds Keras, whose initializers a user's own network draws from.
    """
    starts = re.compile(r"SeedSequence|default_rng|RandomState|np\.random\.seed|random\.set_seed|^import random", re.M)
    found = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if starts.search(p.read_text())}
    allowed = {"data/randomness.py", "runs/own_networks.py", "studies/battery_subject.py", "studies/papers/explicit.py"}
    assert found == allowed
