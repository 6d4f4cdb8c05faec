"""A source with some of its classes: for a backbone that is trained on some, and federations of the others."""

import numpy as np

from tfpfl.checks import InvalidArgument, unknown
from tfpfl.data.source import Source

# The alphabets of Omniglot's background set, on which Lake et al. train; the other 20 are its evaluation set.
BACKGROUND = tuple(
    """
    Alphabet_of_the_Magi Anglo-Saxon_Futhorc Arcadian Armenian Asomtavruli_(Georgian) Balinese Bengali
    Blackfoot_(Canadian_Aboriginal_Syllabics) Braille Burmese_(Myanmar) Cyrillic Early_Aramaic Futurama Grantha Greek
    Gujarati Hebrew Inuktitut_(Canadian_Aboriginal_Syllabics) Japanese_(hiragana) Japanese_(katakana) Korean Latin
    Malay_(Jawi_-_Arabic) Mkhedruli_(Georgian) N_Ko Ojibwe_(Canadian_Aboriginal_Syllabics) Sanskrit
    Syriac_(Estrangelo) Tagalog Tifinagh
    """.split()
)
HALVES = ("first_half", "second_half")
SETS = ("background", "evaluation")


def with_classes(source: Source, wanted: str) -> Source:
    """The examples of some classes, which are numbered anew from 0 on, in the order that they had.

    Args:
        source: with classes.
        wanted: 'first_half' (the first C // 2 classes) or 'second_half' (the others); for omniglot 'background' (the 30
            alphabets that its makers train on) or 'evaluation' (the other 20); or names of classes, as in 'cat,dog'.

    Raises:
        InvalidArgument: the source has numbers instead of classes, or has no such class; or fewer than 2 remain.
    """
    if source.targets is not None:
        raise InvalidArgument(f"only_classes={wanted!r} chooses classes, and {source.name} has numbers to predict")
    names = list(source.class_names)
    half = len(names) // 2
    if wanted in HALVES:
        chosen = set(names[:half] if wanted == "first_half" else names[half:])
    elif wanted in SETS:
        if not source.name.startswith("omniglot"):
            raise InvalidArgument(f"only_classes={wanted!r} is for omniglot; {source.name} has {', '.join(HALVES)}")
        known = {name for name in names if name in BACKGROUND or name.rpartition("_")[0] in BACKGROUND}
        chosen = known if wanted == "background" else set(names) - known
    else:
        chosen = {name.strip() for name in wanted.split(",")}
        for name in sorted(chosen - set(names)):
            raise InvalidArgument(f"{unknown('class', name, names)}. Or take {', '.join(HALVES)}")
    if len(chosen) < 2:
        raise InvalidArgument(f"only_classes={wanted!r} leaves {len(chosen)} class of {source.name}: take at least 2")
    kept = [i for i, name in enumerate(names) if name in chosen]
    new = np.full(len(names), -1, np.int32)
    new[kept] = np.arange(len(kept))
    train, test = (new[y] >= 0 for y in (source.y_train, source.y_test))

    def rows(array: np.ndarray | None, mask: np.ndarray) -> np.ndarray | None:
        return None if array is None else array[mask]

    return source._replace(
        x_train=source.x_train[train],
        y_train=new[source.y_train[train]],
        x_test=source.x_test[test],
        y_test=new[source.y_test[test]],
        class_names=[names[i] for i in kept],
        key_train=rows(source.key_train, train),
        key_test=rows(source.key_test, test),
        group_train=rows(source.group_train, train),
        options={**source.options, "only_classes": wanted},
    )
