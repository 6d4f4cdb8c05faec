"""What a run needs besides its data: packages, metrics that are known, and no entry that would change nothing."""

from collections import Counter
from typing import Any

from tfpfl.checks import InvalidArgument, check_type, one_line, warn_user
from tfpfl.data import Federation, Population, load_source
from tfpfl.data.manifest import plain_values
from tfpfl.engines.engine import check_engine
from tfpfl.engines.inputs import OPENED
from tfpfl.models import SplitModel
from tfpfl.runs.aggregators import PRIVATE, check_method_can_have_it
from tfpfl.runs.config import RunConfig
from tfpfl.runs.metrics import ALWAYS, as_metric
from tfpfl.runs.privacy import chance_of_no_clients, default_delta, no_clients, require_accounting
from tfpfl.runs.protocols import LAST_ROUNDS, Protocol, as_protocol


def check_needs(config: RunConfig) -> None:
    """Checks what a new run needs besides its data, before any work is done: packages, and metrics that are known.

    Entries that would be ignored are refused here, and not by `RunConfig`, because older runs may have them.

    Raises:
        Unavailable: the engine, a private aggregator or noise needs a package that is not installed.
        InvalidArgument: it is no `RunConfig`; this process knows no metric of one of the names, an entry would be
            ignored, or the method cannot have the aggregator.
    """
    check_type("the configuration", config, RunConfig, "a tfpfl.RunConfig, as in RunConfig(algorithm='pflego')")
    _check_used(config)
    check_method_can_have_it(config)
    check_engine(config.engine)
    if config.head_init != RunConfig.head_init and config.method.no_head_init:  # in a comparison, others may use it
        warn_user(f"{config.title} does not use head_init={config.head_init}: {config.method.no_head_init}")
    for name in ("aggregator", "max_norm", "clip_norm"):
        if config.method.up == "0" and (value := getattr(config, name)) is not None:
            warn_user(f"{config.title} does not use {name}={value}: its clients send nothing")
    for name in config.metrics:
        if name not in ALWAYS:
            as_metric(name, config.kind)
    if config.aggregator in PRIVATE or config.secure_noise is not None:
        require_accounting()  # the summary needs it, perhaps hours later


def agreeing(config: RunConfig, federation: Federation) -> Federation:
    """The federation of a configuration, after the check that this asks for no other data.

    Raises:
        InvalidArgument: the number of clients, the partition or an argument of it, the data set or an argument of it,
            the data seed, or the fraction for validation is another one; or see `check_labels`.
    """
    check_type("the federation", federation, Federation, OPENED)
    manifest = federation.manifest
    source, partitioner = manifest["source"], manifest["partitioner"]
    asked: dict[str, tuple[Any, Any]] = {}
    if config.clients is not None:
        asked["clients"] = config.clients, federation.num_clients
    of_data = {"dataset": source["name"], "partition": partitioner["name"]}
    of_data |= {"validation": manifest["validation"], "data_seed": manifest["seed"]}
    for name, found in of_data.items():
        if (value := getattr(config, name)) != getattr(RunConfig, name):  # the default may mean that nothing was given
            asked[name] = value, found
    for name, value in config.partition_args.items():
        asked[f"partition_args {name}"] = plain_values(value), partitioner["arguments"].get(name)
    signed = manifest.get("preprocessing", {}).get("shift") == -1
    options = {**(load_source.__kwdefaults__ or {}), "pixels": "signed" if signed else "unit", **source["options"]}
    changes_nothing = {"data_dir", "seed"} - set(source["options"])  # most data sets draw nothing
    for name, value in config.source.items():
        if value is not None and name not in changes_nothing:
            asked[f"source {name}"] = plain_values(value), options.get(name)
    other = [f"{name} is {own!r}, and {its!r} in the data" for name, (own, its) in asked.items() if own != its]
    if other:
        raise InvalidArgument(
            f"the configuration says what the given federation is not: {one_line('; '.join(other))}. Leave these "
            "entries out, or leave the federation out and it is built"
        )
    check_labels(config, federation)
    return federation


def warn_of_small_rounds(config: RunConfig, population: Population) -> None:
    """Warns if a round has one of a few clients because nobody said how many take part, or none, and so no noise."""
    if config.aggregator in PRIVATE and config.method.up != "0":
        chance = chance_of_no_clients(population, [population.num_clients] * config.rounds)
        if chance >= default_delta(population.num_clients):
            warn_user(f"the run will have no epsilon{no_clients(population, chance)}")
    if config.participation != RunConfig.participation or config.sampling != "fixed":
        return
    if population.clients_per_round < 1.5 and population.num_clients > 1:
        warn_user(
            f"a round has 1 of the {population.num_clients} clients, and the others learn nothing in it: with few "
            "clients, take --participation 1"
        )


def warn_of_model(config: RunConfig, model: SplitModel, federation: Federation, population: Population) -> None:
    """Warns of clients that learn less than they could.

    The backbone is a whole classifier, so that features are the logits of its last layer; or only the backbone is
    shared, and nothing of it trains; or one head is shared, and each of its outputs stands for other classes with each
    client.
    """
    if model.ends_linear and model.kind.label.is_classes and model.num_features == federation.num_labels:
        warn_user(
            f"the backbone ends in a layer without activation with {model.num_features} outputs, as many as there are "
            "classes. If it is the last layer of a classifier, leave it out; tfpfl adds one for every client"
        )
    if not model.initial_theta and config.method.up == "b":
        warn_user(
            f"{config.title} shares only the backbone, and no weight of this one is trainable: clients learn nothing "
            "from each other. Set trainable=True for the layers that should learn, or take a method with a shared "
            "head, such as fedavg"
        )
    if config.labels != "local" or config.method.head != "shared":
        return
    own = federation.population(labels="local", client_ids=population.client_ids.tolist())
    if not own.same_classes or own.num_classes.min() < own.num_classes.max():
        warn_user(
            f"{config.title} has one head for clients with different classes, and with --labels local each of its "
            "outputs stands for another class with each client: it learns less than it could. Leave --labels out, or "
            "give global, unless this is what you want to see"
        )


def more_validation(config: RunConfig) -> str:
    """What to do about a federation without validation examples."""
    if config.federation is None:
        return "raise --validation"
    return "make it anew with tfpfl partition --validation 0.2, or with a column for --split"


def check_validation(what: str, config: RunConfig, federation: Federation) -> None:
    """Checks that there are validation examples; `what` says for what, as in 'settings are chosen on'.

    Raises:
        InvalidArgument: there are none.
    """
    if not federation.num_examples("validation").any():
        raise InvalidArgument(f"{what} validation examples, but the federation has none: {more_validation(config)}")


def check_protocol(protocol: Protocol | str, config: RunConfig, federation: Federation) -> None:
    """Checks that there are the examples by which a protocol chooses the round, and those that it scores.

    Raises:
        InvalidArgument: there are none.
    """
    protocol = as_protocol(protocol)
    if protocol.when == "best_validation":
        check_validation("the protocol chooses the round on", config, federation)
    if protocol.split == "validation":
        check_validation("the protocol scores", config, federation)


def check_patience(config: RunConfig, federation: Federation) -> None:
    """Checks that `patience` has validation examples to look at; warns if it cannot stop the run in its rounds.

    Raises:
        InvalidArgument: it has none.
    """
    if config.patience is None:
        return
    if not federation.num_examples("validation").any():
        raise InvalidArgument(
            f"patience={config.patience} looks at validation examples, and the federation has none, so that the run "
            f"would never stop: {more_validation(config)}, or leave patience out"
        )
    every = config.evaluate_every
    evaluated = config.rounds // every if every else min(config.rounds, LAST_ROUNDS)
    if evaluated <= config.patience:
        warn_user(
            f"patience={config.patience} cannot stop this run: of its {config.rounds} rounds {evaluated} count "
            "for it. Evaluate more often (--evaluate-every), or take less patience"
        )


def check_labels(config: RunConfig, federation: Federation) -> None:
    """Checks that `labels` chooses among classes.

    Raises:
        InvalidArgument: the labels are numbers, and it is not what the method has anyway.
    """
    usual = "local" if config.method.head == "personal" else "global"  # as a configuration has it that was filled in
    if federation.targets is not None and config.labels not in (None, usual):
        raise InvalidArgument(
            f"labels={config.labels!r} says of which classes a head has outputs, and the labels of this federation are "
            f"{federation.targets.sort} targets, whose outputs all clients have: leave labels out"
        )


def _check_used(config: RunConfig) -> None:
    """Checks that no entry is given that would be ignored, beside the other ones."""
    for name in ("client_seconds_spread", "jitter"):
        if getattr(config, name) and not config.client_seconds:
            raise InvalidArgument(
                f"{name}={getattr(config, name)} says how client_seconds vary, and client_seconds is 0, so that there "
                f"is no clock: give client_seconds (--client-seconds) too, or leave {name} out"
            )
    if config.sampling == "range" and config.participation not in (RunConfig.participation, 1.0):
        raise InvalidArgument(
            f"participation={config.participation} is not used with sampling='range', where sampling_range says how "
            "many clients a round has: leave participation out"
        )
    for name, times in Counter(text.partition("=")[0] for text in config.aggregator_args).items():
        if times > 1:
            raise InvalidArgument(
                f"aggregator_args has {name} {times} times, and only the last one would count: give it once"
            )
    availability = config.availability()
    joins, leaves = (
        {i: t for t, some in reversed(found) for i in some} for found in (availability.joins, availability.leaves)
    )
    for client in sorted(joins.keys() & leaves.keys()):
        if leaves[client] <= joins[client]:
            raise InvalidArgument(
                f"client {client} leaves in round {leaves[client]} and joins in round {joins[client]}, but who joins "
                f"is not there before. If it shall be there from the start, let it join in round 1 too: 1:{client}"
            )
