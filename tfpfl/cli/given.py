"""What a command was given: the values of its options as entries of a run's configuration."""

from collections.abc import Collection

import click
from click.core import ParameterSource

from tfpfl.cli.layout import NOTHING
from tfpfl.runs.options import DATA_NAMES, OPTIONS, usual_clients


def data_arguments(kw) -> dict:
    """The entries of a `RunConfig` that describe the federation, from the values of the data options.

    Raises:
        click.UsageError: --federation and another option about the data are given.
    """
    if kw.get("federation") is not None:
        refuse_other_data("--federation")
        return {"federation": str(kw["federation"])}
    dataset, partition = kw["dataset"], kw["partition"]
    always = ("augment",) if dataset == "omniglot" else ()  # `load_source` refuses it for others
    names = [name for name, option in OPTIONS.items() if option.of_source]
    return {
        "dataset": dataset,
        "source": {name: kw[name] for name in names if name in always or kw[name] != OPTIONS[name].default},
        "partition": partition,
        "partition_args": {k[5:]: v for k, v in kw.items() if k.startswith("part_") and v is not None},
        "clients": usual_clients(dataset, partition) if kw["clients"] is None else kw["clients"],
        "validation": kw["validation"],
        "data_seed": kw["data_seed"],
    }


def hyperparameters_of(algorithm: str, preset: str | None, kw: dict) -> dict:
    """The hyperparameters that a command was given.

    Where a preset of the method has a `head_init` of its own, --head-init on the command line replaces that one.
    """
    from tfpfl.algorithms import method_named

    found = {k[6:]: v for k, v in kw.items() if k.startswith("hyper_") and v is not None}
    found = {k: None if v is NOTHING else v for k, v in found.items()}
    if preset is not None and options_given({"head_init"}):
        if "head_init" in method_named(algorithm).presets.get(preset, {}):
            found["head_init"] = kw["head_init"]
    return found


def options_given(names: Collection[str]) -> list[str]:
    """The flags of these options on the command line; with `DATA_NAMES`, also of the partition's arguments."""
    context = click.get_current_context()
    return [
        p.secondary_opts[0] if p.secondary_opts and context.params.get(p.name or "") is False else p.opts[0]
        for p in context.command.get_params(context)
        if (p.name in names or ({*DATA_NAMES} & {*names} and (p.name or "").startswith("part_")))
        and context.get_parameter_source(p.name or "") is ParameterSource.COMMANDLINE
    ]


def refuse_other_data(flag: str, besides: Collection[str] = ()) -> None:
    """Checks that the command has no other option about the data than `flag` and those named in `besides`.

    Raises:
        click.UsageError: there is one.
    """
    if given := options_given({*DATA_NAMES} - {*besides}):
        raise click.UsageError(f"{flag} says what the data are: leave out {', '.join(given)}")


def value_of(text: str):
    """A hyperparameter's value from its text, such as 3, 0.1, true, none, or a word."""
    words = {"true": True, "false": False, "none": None}
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return words.get(text.lower(), text)
