"""Some clients of a run as members of a federation that a page plays by itself: their examples, first heads, settings.

The federation on the page is one of its own. Its members are all its clients and all take part in every round, so that
I / r is 1, and alpha_i = N_i / N with the N_i that are here. The examples are public then, so that a site has them only
if `members` is asked for.

`members.json` says who they are and how a round goes: see `Members.about`. `members.safetensors` holds

    mask uint8 [ceil(Z / 8)]             a bit for each of the Z numbers of all examples, the first one highest: whether
                                         it is not 0. Examples as the federation stores them: member by member, train
                                         before test
    ink uint8 [number of such bits]      the numbers that are not 0. Drawings are mostly paper, so that both together
                                         are a fraction of Z bytes, also where the browser cannot unpack gzip
    labels uint8 [number of examples]    0..K_i-1 in the member's own classes
    kernel_<i> [M, K_i], bias_<i> [K_i]  the first head of member i, as the run gave it
    kernel [M, C], bias [C]              the first head of "one head for all": C classes, the union of the members'
    theta [P]                            with start 'initial': the run's theta before its first round
"""

import json
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save

from tflite_export.convert.browser import ROOM, in_turn
from tflite_export.convert.personal import ExportError, device_training
from tflite_export.convert.program import flatten
from tfpfl.data.layout import is_several

FORMAT = 2
EXAMPLES = 32  # at most so many training and so many test examples of a member: one call of the program
MOST_CLASSES = 64  # of all members together
OWN_CLASSES = 6  # columns that the head for all keeps free for the visitor's own classes
STARTS = ("initial", "trained")
_SERVER = {  # server_opt -> what the page has to know; the rate is rho
    "sgd": {"momentum": 0.0},
    "momentum": {"momentum": 0.9},
    "adam": {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8},
}


class Members(NamedTuple):
    """What `members.json` and `members.safetensors` hold."""

    about: dict
    tensors: dict

    @property
    def room(self) -> int:
        """The number of classes that the page's program needs room for."""
        return len(self.about["classes"]) + OWN_CLASSES

    def files(self) -> tuple[bytes, bytes]:
        """The contents of `members.json` and of `members.safetensors`."""
        about = json.dumps(self.about, ensure_ascii=False, indent=1) + "\n"
        return about.encode(), save({name: np.ascontiguousarray(a) for name, a in self.tensors.items()})


def members_of(run, count: int, *, classes: int | None = None, start: str = "initial") -> Members:
    """The first `count` clients of a run, as members.

    Args:
        run: an open `tfpfl.runs.run.Run` of PFLEGO.
        count: the number of members, >= 2.
        classes: of each member only the examples of its first so many classes, >= 2; None: all.
        start: the theta of round 0 on the page: 'initial', that of the run before its first round; 'trained', the
            run's newest.

    Raises:
        ExportError: the run has fewer clients, or is of another method; its settings, its server's optimizer or its
            labels are none that the page knows; the members have too many classes; a member has no test examples; or
            the examples are not stored as uint8.
    """
    ids = [int(i) for i in run.population.client_ids[:count]]
    if count < 2:
        raise ExportError(f"a federation on the page has at least 2 members, found {count}")
    if len(ids) < count:
        raise ExportError(
            f"{run.folder} has {len(ids)} clients, and {count} members were asked for: give --members {len(ids)}"
        )
    if start not in STARTS:
        raise ExportError(f"the start of the page's federation is one of {', '.join(STARTS)}, found {start!r}")
    if classes is not None and classes < 2:
        raise ExportError(f"a member needs at least 2 classes, found {classes}")
    _check_run(run, ids)
    members: list[dict] = []
    parts: list[tuple] = []
    tensors: dict[str, np.ndarray] = {}
    for client in ids:
        own, found = _member(run, client, classes)
        info = run.population.info(client)._replace(num_classes=np.int32(len(own["class_ids"])))
        kernel, bias = run.algorithm.init_client(info)
        tensors |= {f"kernel_{len(members)}": np.asarray(kernel), f"bias_{len(members)}": np.asarray(bias)}
        members.append(own)
        parts += found
    union = sorted({c for own in members for c in own["class_ids"]})
    most = max(len(own["class_ids"]) for own in members)
    if most > ROOM or len(union) > MOST_CLASSES:
        raise ExportError(
            f"the {count} members of {run.folder} have up to {most} classes and together {len(union)}; the page has "
            f"room for {ROOM} of a member and {MOST_CLASSES} of all. --member-classes 5 takes only the examples of "
            "each member's first 5 classes"
        )
    names = {c: name for own in members for c, name in zip(own["class_ids"], own["classes"], strict=True)}
    kernel, bias = run.model.shared_head(len(union), run.config.hyperparameters.get("head_init"))
    tensors |= {"kernel": np.asarray(kernel), "bias": np.asarray(bias)}
    tensors |= _packed(np.concatenate([x for x, _ in parts]))
    tensors["labels"] = np.concatenate([y for _, y in parts])
    if start == "initial":
        tensors["theta"] = flatten(tuple(np.asarray(w) for w in run.model.initial_theta)).astype(np.float32)
    hyper = run.config.hyperparameters
    about = {
        "format": FORMAT,
        "members": members,
        "classes": [names[c] for c in union],
        "class_ids": union,
        "clients": int(run.population.num_clients),
        "start": start,
        "training": {name: hyper[name] for name in ("tau", "beta", "rho", "rule", "head_rate", "safeguard")},
        "server": {"name": hyper["server_opt"], "rate": hyper["rho"], **_SERVER[hyper["server_opt"]]},
    }
    return Members(about, tensors)


def _check_run(run, ids) -> None:
    """Checks that the page can compute the run's rounds."""
    for client in ids:
        if isinstance(why := device_training(run.config, run.population, client, run.model), str):
            raise ExportError(f"a page cannot play rounds of {run.folder}: {why}")
    hyper = run.config.hyperparameters
    if hyper["server_opt"] not in _SERVER:
        raise ExportError(
            f"a page cannot play rounds of {run.folder}: its server_opt is {hyper['server_opt']!r}, and the page's "
            f"server knows {', '.join(_SERVER)}"
        )
    if run.population.labels != "local":
        raise ExportError(
            f"a page cannot play rounds of {run.folder}: each head has outputs for all classes of the data set "
            "(--labels global), and the page's members have heads for their own classes"
        )
    layout = run.federation.layout
    if is_several(layout.shape) or run.federation.manifest["dtype"] != "uint8":
        raise ExportError(
            f"the examples of {run.folder} are not stored as uint8 (pixels), and the page's members have nothing else"
        )


def _member(run, client: int, classes: int | None) -> tuple[dict, list]:
    """One member: (its entry in members.json, [(raw, labels) of train, of test])."""
    federation, parts = run.federation, []
    class_ids = [int(c) for c in federation.classes(client)][:classes]
    counts = {}
    for split in ("train", "test"):
        raw, labels = federation.raw(client, split, "local")
        rows = np.flatnonzero(labels < len(class_ids))
        rows = rows[in_turn(labels[rows], EXAMPLES)]
        if not len(rows):
            raise ExportError(
                f"client {client} ({federation.client_names[client]}) has no {split} examples to show on the page"
            )
        parts.append((np.asarray(raw[rows], np.uint8), np.asarray(labels[rows], np.uint8)))
        counts[split] = len(rows)
    return {
        "client": client,
        "name": federation.client_names[client],
        "classes": [federation.class_names[c] for c in class_ids],
        "class_ids": class_ids,
        **counts,
        "of": int(federation.num_examples("train")[client]),
    }, parts


def _packed(x: np.ndarray) -> dict[str, np.ndarray]:
    """The examples without the numbers that are 0: {'mask', 'ink'}, see above."""
    flat = x.reshape(-1)
    return {"mask": np.packbits(flat != 0), "ink": flat[flat != 0]}
