"""The entries of a run's configuration for secure aggregation: their checks, and the noise of a run for its privacy."""

from collections.abc import Mapping, Sequence
from typing import Any

from tfpfl.algorithms.transforms.secure import CLIP
from tfpfl.checks import InvalidArgument

THRESHOLD = 0.5  # F: the default of secure_threshold, as of `tfpfl serve --secure`

# What cannot be done under secure aggregation, {entry: (its usual value, why)}.
REFUSED: dict[str, tuple[Any, str]] = {
    "aggregator": (
        None,
        "it needs single updates or changes them as floating-point numbers, and the server has only the sum of "
        "integers. secure_clip bounds updates, and secure_noise makes the sum private",
    ),
    "max_norm": (None, "the server sees no update that it could measure. secure_clip bounds each at the client"),
    "clip_norm": (None, "use secure_clip: the client scales its update down before it makes integers of it"),
    "objective": (
        "mean",
        "it weights an update by the client's loss, so that the weights, by whose sum the server divides, say what the "
        "losses are",
    ),
}


def check_secure(config: Any) -> None:
    """Checks the entries secure, secure_clip, secure_noise and secure_threshold of a `RunConfig`, and what else is set.

    Raises:
        InvalidArgument: a number is out of range, needs another entry, or cannot be used under secure aggregation.
    """
    given = {"secure_clip": None, "secure_noise": None, "secure_threshold": THRESHOLD}
    if not config.secure:
        for name, usual in given.items():
            if getattr(config, name) != usual:
                raise InvalidArgument(f"{name} is for secure aggregation: give --secure, too, or leave it out")
        return
    for name in ("secure_clip", "secure_noise"):
        value = getattr(config, name)
        if value is not None and not 0 < value < 1e30:
            raise InvalidArgument(f"{name} must be a positive number, found {value}")
    if not 0.5 <= config.secure_threshold < 1:
        raise InvalidArgument(
            f"secure_threshold must lie in [0.5, 1), found {config.secure_threshold}: with less than a half, a server "
            "could open the masks of a client by asking one half for one mask and the other half for the other"
        )
    if config.secure_noise is not None and config.secure_clip is None:
        raise InvalidArgument(
            f"secure_noise is in units of the clip: give --secure-clip, too. (The default of {CLIP:g} is longer than "
            "any update; update_norm in history.csv of a run with --on-broken reject says how long they are)"
        )
    for name, (usual, why) in REFUSED.items():
        if (value := getattr(config, name)) != usual:
            raise InvalidArgument(f"{name}={value!r} cannot be used with --secure: {why}")


def clipped_unasked(config: Any, history: Sequence[Mapping[str, Any]]) -> str | None:
    """What to say if updates were longer than the default of secure_clip, which nobody chose; else None.

    Args:
        config: a `RunConfig`.
        history: the rows of the rounds, whose 'clipped' is the part of the cohort's examples whose client was clipped.
    """
    rounds = sum(bool(row.get("clipped")) for row in history)
    if not config.secure or config.secure_clip is not None or not rounds:  # a method may have a metric of this name
        return None
    return (
        f"in {rounds} of {len(history)} rounds updates were longer than {CLIP:g}, the default of secure_clip, and were "
        "scaled down: the sums are not those of a run without --secure. Give a --secure-clip above the longest update. "
        "(update_norm in history.csv of a run with --on-broken reject says how long they are)"
    )
