"""Shakespeare's plays by speaking role: the next character of a text (as in LEAF, arXiv 1812.01097)."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tfpfl.checks import InvalidArgument
from tfpfl.data.people.files import read_members
from tfpfl.data.source import Source

WINDOW = 80  # characters, from which the next one is to be predicted
BLOCK = 1_000  # characters: validation takes whole blocks
LEAST = 2_000  # characters of a role; smaller roles are left out
PLAYS, FEWEST = 37, 5  # a text with fewer roles is no play
ALPHABET = " !\"&',-.0123456789:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

# The first line of a speech: 'HAMLET.', 'Ham.' or, in one play, 'THESEUS', perhaps with a stage direction behind it.
_SPEAKER = re.compile(r"\s*(?!ACT\b|SCENE\b)((?:\d )?[A-Z][A-Za-z' ]{0,30}?)(?:\.|(?<=[A-Z]{2})\.?)(?:\s*\[.*\])?\s*")
_DIRECTION = re.compile(r"\[[^]]*\]?")  # what a role does not say


def load_shakespeare(path: Path, step: int = 20) -> Source:
    """Reads the plays of the package `shakespeare` with the roles as natural clients, such as 'hamlet: Ham'.

    A role's speeches are joined in their order. The first 80 % of this text are for training, the rest is for test. An
    example is 80 characters, uint8 tokens, and its class is the character after them. The training text is cut into
    blocks of 1,000 characters before examples are taken, and a validation part has whole blocks, so that no character
    of a role is in two parts. Roles with less than 2,000 characters are left out.

    Args:
        path: the sdist of the package, or the folder of its texts.
        step: characters from one example to the next, >= 1; LEAF has 1, which makes 20 times as many examples.

    Raises:
        InvalidArgument: there are not 37 plays, or `step` is below 1.
    """
    if not isinstance(step, int) or step < 1:
        raise InvalidArgument(f"step must be a whole number of characters >= 1, found {step!r}")
    texts = read_roles(path)
    plays = {play for play, _ in texts}
    if len(plays) != PLAYS:
        raise InvalidArgument(f"{path} has {len(plays)} plays, but the package shakespeare 0.6 has {PLAYS}")
    parts: dict[str, list] = {"train": [], "test": []}
    number = 0
    for (play, role), text in sorted(texts.items()):
        if len(text) < LEAST:
            continue
        cut = len(text) * 4 // 5
        blocks = np.split(text[:cut], range(BLOCK, cut - BLOCK + 1, BLOCK))
        for part, pieces in (("train", blocks), ("test", [text[cut:]])):
            for piece in pieces:
                seen = np.lib.stride_tricks.sliding_window_view(piece, WINDOW + 1)[::step]
                parts[part].append((seen, np.full(len(seen), f"{play}: {role}", object), np.full(len(seen), number)))
                number += 1
    (x, key, block), (x_test, key_test, _) = (
        [np.concatenate(part) for part in zip(*p, strict=True)] for p in parts.values()
    )
    source = Source.from_arrays(
        x[:, :WINDOW],
        x[:, WINDOW].astype(int),
        x_test[:, :WINDOW],
        x_test[:, WINDOW].astype(int),
        name="shakespeare",
        version="0.6",
        class_names=["space", *ALPHABET[1:]],
        scale=1.0,  # tokens, and no pixels
        key=key,
        key_test=key_test,
        options={"step": step},
    )
    return source._replace(group_train=block)


def read_roles(path: Path) -> dict[tuple[str, str], np.ndarray]:
    """The text of every role, as tokens: {(play, role): uint8 [n], places in `ALPHABET`}.

    Of plays that the package has twice, the edition in today's spelling is taken.
    """
    found: dict[tuple[str, str], np.ndarray] = {}
    for name, content in read_members(path, r"texts/[a-z0-9_]+_gut\.txt").items():
        said: dict[str, list[str]] = {}
        for role, speech in speeches(content.decode("latin-1")):
            said.setdefault(role, []).append(speech)
        if len(said) >= FEWEST and "miltondata" not in name:  # else it is a poem, or by another author
            play = Path(name).name.removesuffix("_gut.txt")
            found |= {(play, role): tokens(" ".join(texts)) for role, texts in said.items()}
    return found


def speeches(text: str) -> Iterator[tuple[str, str]]:
    """(role, what it says) of every speech: a paragraph whose first line names the role."""
    for paragraph in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
        first, _, said = paragraph.strip("\n").partition("\n")
        speaker = _SPEAKER.fullmatch(first)
        said = " ".join(_DIRECTION.sub(" ", said).split())
        if speaker and said:
            yield " ".join(speaker[1].split()), said


def tokens(text: str) -> np.ndarray:
    """The places of a text's characters in `ALPHABET`: uint8 [n]. Other characters, such as brackets, are left out."""
    place = np.full(256, 255, np.uint8)
    place[np.frombuffer(ALPHABET.encode("latin-1"), np.uint8)] = np.arange(len(ALPHABET))
    found = place[np.frombuffer(text.encode("latin-1", "ignore"), np.uint8)]
    return found[found != 255]
