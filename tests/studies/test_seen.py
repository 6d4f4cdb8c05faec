"""A comparison does not mix clients that never took part into its tests, and says how many there are of each."""

import json
import math
from dataclasses import replace

import pytest
from scipy import stats

from helpers.made_records import CLIENTS, ROUNDS, made
from tfpfl.checks import InvalidArgument
from tfpfl.runs import statistics
from tfpfl.runs.config import RunConfig
from tfpfl.runs.protocols import EV_ALL, EV_SEEN, EV_UNSEEN
from tfpfl.runs.run import Run
from tfpfl.studies import comparison
from tfpfl.studies.paper_tables import latex, paper_table
from tfpfl.studies.papers import ledger as ledgers
from tfpfl.studies.papers import ledger_tables
from tfpfl.studies.records import Record
from tfpfl.studies.report import render
from tfpfl.studies.run_groups import paired, pairs_protocol
from tfpfl.studies.told import told_seen

FIRST = dict.fromkeys(range(5), 1)  # five of the eight clients took part, all in round 1


def with_accuracies(algorithm, of, **how):
    """A record in which client i has the accuracy `of(i)` in every round."""
    record = made(algorithm, took_part=FIRST, **how)
    scores = [e._replace(score=of(e.client_id)) for e in record.evaluations]
    new = Record(record.folder, record.config, record.history, scores, record.summary)
    new.__dict__.update(took_part=FIRST, matrix_rounds=[])
    return new


@pytest.fixture(scope="module")
def records():
    """Local is better for those that took part, and knows nothing for the others: fine-tuning wins in the mixture."""
    local = with_accuracies("local", lambda i: 0.9 + 0.01 * i if i in FIRST else 0.1)
    tuned = with_accuracies("fedavg_ft", lambda i: 0.88 + 0.01 * i if i in FIRST else 0.8)
    return [local, tuned]


def test_tests_are_made_on_clients_that_both_had_seen(records):
    local, tuned = comparison.rows(records)
    assert (local["seen"], tuned["seen"]) == (pytest.approx(92), pytest.approx(90))
    assert (local["never seen"], tuned["never seen"]) == (pytest.approx(10), pytest.approx(80))
    assert (tuned["clients seen"], tuned["clients never seen"]) == (5, 3)
    assert tuned["gain over Local"] == pytest.approx(-2) and tuned["pairs"] == 5
    assert tuned["p (Local)"] == pytest.approx(1) and tuned["worse than Local %"] == 100
    mixed = comparison.rows(records, pairs="all")[1]
    assert mixed["gain over Local"] == pytest.approx((5 * -2 + 3 * 70) / 8) and mixed["pairs"] == 8
    assert mixed["accuracy"] == tuned["accuracy"] == pytest.approx((5 * 90 + 3 * 80) / 8)  # EV-all stays
    with pytest.raises(InvalidArgument, match="unknown kind of pairs 'sen'; did you mean 'seen'"):
        comparison.rows(records, pairs="sen")


def test_pairs_are_of_clients_that_took_part_on_both_sides():
    one = with_accuracies("local", lambda i: 0.5)
    other = with_accuracies("fedavg_ft", lambda i: 0.75)
    other.__dict__["took_part"] = {0: 1, 1: 1, 6: 1, 7: 1}
    gains = statistics.gains(*paired([other], [one], EV_SEEN))
    assert statistics.num_tested(gains) == 2 and statistics.mean_over_clients(gains) == pytest.approx(0.25)
    assert statistics.num_tested(statistics.gains(*paired([other], [one], EV_UNSEEN))) == 1  # client 5
    assert comparison.rows([one, other])[1]["pairs"] == 2


def test_a_client_is_compared_over_the_seeds_that_have_it_on_both_sides():
    """Client 0 took part in both runs of both seeds, 1 in both of seed 0 alone, and 2 of no seed."""
    good = {"local": (0.5, 0.7), "fedavg_ft": (0.6, 0.9)}
    first = {"local": ({0: 1, 1: 1, 2: 1}, {0: 1, 1: 1}), "fedavg_ft": ({0: 1, 1: 1}, {0: 1, 2: 1})}
    runs = {name: [with_accuracies(name, lambda i, a=a: a + 0.01 * i, seed=s) for s, a in enumerate(of_seeds)]
            for name, of_seeds in good.items()}  # fmt: skip
    for name, records in runs.items():
        for record, its in zip(records, first[name], strict=True):
            record.__dict__["took_part"] = its
    theirs, mine = (runs[name] for name in ("local", "fedavg_ft"))
    gains = statistics.gains(*paired(mine, theirs, EV_SEEN))
    assert gains[:2] == pytest.approx([(0.1 + 0.2) / 2, 0.1])
    assert math.isnan(gains[2]) and statistics.num_tested(gains) == 2
    # Without a seed of its own, a side that has another seed more is compared over those of both.
    third = with_accuracies("local", lambda i: 0.1, seed=2)
    assert statistics.gains(*paired(mine, [*theirs, third], EV_ALL)) == pytest.approx([0.15] * CLIENTS)
    row = comparison.rows([*theirs, *mine], sides=True)[0]
    assert (row["clients seen"], row["clients never seen"]) == (2.5, CLIENTS - 2.5)


def test_notes_say_how_many_and_where_it_is_unknown(records):
    told = " ".join(comparison.notes(records))
    assert "5 clients had taken part, and 3 never" in told and "that both methods had seen" in told
    assert "all clients, seen or not" in " ".join(comparison.notes(records, pairs="all"))
    everybody = [made("local"), made("pflego")]
    assert comparison.notes(everybody) == ["All clients had taken part by round 1."]
    row = comparison.rows(everybody)[1]
    assert (row["clients seen"], row["clients never seen"], row["pairs"]) == (CLIENTS, 0, CLIENTS)
    assert "seen" not in row and "never seen" not in row  # nothing is added but the fact
    unknown = [made("local", took_part=None), made("fedavg_ft")]
    assert told_seen(unknown) == "It is not known which clients of 1 of these runs had taken part."
    assert pairs_protocol(unknown) == EV_ALL and comparison.rows(unknown)[1]["pairs"] == CLIENTS
    assert "by round" not in told_seen(records, EV_ALL._replace(clients="sampled"))


@pytest.mark.slow
def test_the_report_shows_both_sides(records):
    page = " ".join(render(records).split())
    for row in ("Local, 5 seen", "Local, 3 never seen", "FedAvg-FT, 5 seen", "FedAvg-FT, 3 never seen"):
        assert row in page
    assert "5 clients had taken part, and 3 never" in page and "-2.00" in page
    assert "never seen" not in " ".join(render([made("local"), made("fedavg_ft")]).split()).replace("EV-unseen", "")


def test_the_ledger_of_papers_shows_both_sides(records):
    name, experiment = next((n, e) for n, e in ledgers.EXPERIMENTS.items() if e.measures == "accuracy")
    cell = experiment.cells[0]
    entry = json.loads(json.dumps(ledgers.entry(records[0], "laptop", ROUNDS, "command")))
    assert entry["clients"] == [5, 3] and entry["accuracy"]["EV-seen"][0] == 92
    found = {name: {ledgers.key(cell): {"seeds": {"0": entry}}}}
    written = ledger_tables.markdown(found)
    assert ", 5 seen |" in written and "| 92.00 ± " in written and ", 3 never seen |" in written
    entry = ledgers.entry(made("local"), "laptop", ROUNDS, "command")
    assert "EV-seen" not in entry["accuracy"] and entry["clients"] == (CLIENTS, 0)


@pytest.mark.slow
def test_one_split_for_all_seeds_and_older_runs_keep_theirs(tmp_path, monkeypatch):
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))

    def config(seed, **how):
        quick = {"rounds": 1, "clients": 5, "participation": 0.4, "hyperparameters": {"steps": 1}}
        return RunConfig(algorithm="local", seed=seed, **quick, **how)

    for seed in (1, 2):  # as older versions made them: each with the split of its seed
        with Run.create(config(seed), tmp_path / "out" / f"local-s{seed}") as run:
            run.train()
    folders = comparison.compare_runs([config(seed) for seed in (0, 1, 2, 3)], tmp_path / "out")
    found = [Record.read(folder) for folder in folders]
    assert [r.config.data_seed for r in found] == [0, 1, 2, 0]
    hashes = [r.config.federation_hash for r in found]
    assert hashes[0] == hashes[3] and len(set(hashes)) == 3
    assert "one split of the data, that of data seed 0" in " ".join(comparison.notes([found[0], found[3]]))
    assert "2 splits of the data, with the data seeds 0, 1: intervals" in " ".join(comparison.notes(found[:2]))
    assert not any("split" in note for note in comparison.notes(found[:1]))
    later = comparison.compare_runs([config(seed) for seed in (1, 4)], tmp_path / "out")
    assert [Record.read(folder).config.data_seed for folder in later] == [1, 1], "the one split that was there"
    given = comparison.compare_runs([config(3, data_seed=5)], tmp_path / "given")
    assert Record.read(given[0]).config.data_seed == 5
    with pytest.raises(InvalidArgument, match="are the same run"):
        comparison.compare_runs([config(1)], tmp_path / "beside", beside=[folders[1]])
    beside = comparison.compare_runs([replace(config(1), algorithm="fedavg")], tmp_path / "beside", beside=[folders[1]])
    assert Record.read(beside[0]).config.federation_hash == found[1].config.federation_hash


@pytest.mark.slow
def test_one_seed_of_three_with_clients_that_were_never_seen_gives_no_interval():
    """There is none over seeds; one over clients must not stand under a caption that speaks of seeds."""
    three = [with_accuracies("local", lambda i: 0.9 if i in FIRST else 0.5 + 0.02 * i, seed=seed) for seed in range(3)]
    for record in three[1:]:
        record.__dict__["took_part"] = dict.fromkeys(range(CLIENTS), 1)
    (row,) = comparison.rows(three)
    assert row["seeds"] == 3 and row["never seen"] == pytest.approx(62) and math.isnan(row["never seen ±"])
    assert not math.isnan(row["accuracy ±"])
    told = latex(paper_table({"data": [row]}, ["score"])).split("Local & ")[1]
    assert "62.00" in told and "62.00 " + chr(36) not in told
    page = render(three)
    assert "± nan" not in page and "<td>62.00</td>" in page
    (one,) = comparison.rows(three[:1])  # here there is no seed but this one
    over_clients = stats.t.ppf(0.975, 2) * 2 / math.sqrt(3)  # three clients at 60, 62 and 64 %: their std is 2
    assert one["never seen ±"] == pytest.approx(over_clients)


def test_the_note_says_of_whom_the_tests_are_where_one_run_is_unknown(records):
    """Then all clients are compared with themselves."""
    unknown = [records[0], made("fedavg_ft", took_part=None)]
    assert comparison.rows(unknown)[1]["pairs"] == CLIENTS
    (told,) = (note for note in comparison.notes(unknown) if note.startswith("Gains"))
    assert told == "Gains, p and shares of clients that are worse: of all clients, seen or not."
