"""The group of all commands, also used by tflite_export. It shows our errors in one line, and with --trace in full."""

import logging
import sys
import warnings

import click

from tfpfl.checks import TfpflError, TfpflWarning, check_address_space, one_line, unknown, verbose
from tfpfl.cli.ending import end_now, end_with_signals, exit_code, exit_of
from tfpfl.cli.terminal import show_what_it_can


def _in_one_line(others):
    """Makes the function that shows a warning: ours in one line, all others with `others`."""

    def show(message, category, *args, **kw):
        if issubclass(category, TfpflWarning):
            click.echo(f"Warning: {one_line(' '.join(str(message).split()))}", err=True)
        else:
            others(message, category, *args, **kw)

    return show


class Group(click.Group):
    """A group of commands that shows our errors, and Python's errors of files, in one line.

    So is any error of a method of the user's own. Any other error is a bug and is shown with its stack trace. The
    option --trace shows it for all errors.
    """

    ours: tuple[type[Exception], ...] = (TfpflError,)
    heavy: tuple[str, ...] = ()  # the commands that import TensorFlow, which needs a large address space
    headings: dict[str, tuple[str, ...]] = {}  # heading in the help -> commands; others stand under "Other commands"

    def main(self, args=None, **how):  # type: ignore[override]
        """Runs the command line. Without `args`, this process is the command, and SIGTERM or SIGHUP end it in order.

        What is printed never fails because the terminal lacks a character.
        """
        show_what_it_can()
        quiet_warnings()
        if args is not None:
            return super().main(args, **how)
        end_with_signals()
        try:
            return super().main(**how)
        except SystemExit:
            if exit_code() is not None:
                end_now()
            raise

    def parse_args(self, ctx, args):
        """Takes --trace out of the arguments, and parses the rest."""
        ctx.ensure_object(dict)["trace"] = "--trace" in args  # it may stand anywhere on the command line
        return super().parse_args(ctx, [a for a in args if a != "--trace"])

    def resolve_command(self, ctx, args):
        """Finds the command. For an unknown one, the error names the closest command.

        Raises:
            Unavailable: the command imports TensorFlow, and the address space of this process is too small for it.
        """
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            ctx.fail(unknown("command", args[0], self.list_commands(ctx)))
        if args[0] in self.heavy:
            check_address_space()
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx, formatter):
        """Writes the list of commands, each group under its heading."""
        headed = {name for names in self.headings.values() for name in names}
        others = tuple(name for name in self.list_commands(ctx) if name not in headed)
        for heading, names in {**self.headings, "Other commands" if self.headings else "Commands": others}.items():
            found = [(name, self.commands[name]) for name in names if name in self.commands]
            limit = formatter.width - 6 - max((len(name) for name in self.commands), default=0)
            if rows := [(name, command.get_short_help_str(limit)) for name, command in found if not command.hidden]:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def invoke(self, ctx):
        """Runs the command. Our errors and warnings become one line, unless --trace is given; so does a signal."""
        if own := sys.modules.get("tfpfl.algorithms.own"):
            own.forget_used()
        try:
            with warnings.catch_warnings():
                if not ctx.obj["trace"]:
                    warnings.showwarning = _in_one_line(warnings.showwarning)
                return super().invoke(ctx)
        except KeyboardInterrupt as end:
            raise exit_of(end) from None
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            short = None if ctx.obj["trace"] else self._short(error)
            if short is None:
                raise
            raise click.ClickException(one_line(" ".join(short.split()))) from error

    def _short(self, error: Exception) -> str | None:
        """What is shown of an error in one line; None for a bug of ours, which is shown with its stack trace."""
        own = sys.modules.get("tfpfl.algorithms.own")  # imported if a method of the user's own was loaded
        if isinstance(error, self.ours):
            return str(error)
        if isinstance(error, OSError) and type(error).__module__ == "builtins":  # FileNotFoundError, ...
            if own is None or own.user_place(error) is None:
                return str(error)
        told = own and own.told(error)
        return f"{told}. --trace shows the stack trace" if told else None


def quiet_warnings() -> None:
    """Hides the warnings of TensorFlow's Python code in a command, unless its logger has a level already."""
    logger = logging.getLogger("tensorflow")
    if not verbose() and logger.level == logging.NOTSET:
        logger.setLevel(logging.ERROR)


class Commands(Group):
    """The group of the command `tfpfl`."""

    heavy = (
        *("run", "resume", "evaluate", "new-clients", "demo", "partition"),
        *("compare", "sweep", "reproduce", "report", "algorithms", "model", "predict", "study", "suite"),
        *("advise", "serve", "demo-live", "replay", "flower", "backbone", "pretrain", "worker"),
    )
    headings = {
        "Train and evaluate": ("run", "resume", "evaluate", "new-clients", "model", "predict", "demo"),
        "Compare and search": ("compare", "sweep", "study", "suite", "reproduce", "report", "advise"),
        "Data and methods": ("partition", "datasets", "algorithms", "backbone", "pretrain", "cite"),
        "Several machines": ("worker",),
        "Live rounds on devices": ("places", "serve", "watch", "device", "demo-live", "replay", "flower"),
    }


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.version_option(package_name="tfpfl")
def main():
    """tfpfl: personalized federated learning on TensorFlow Federated and Keras.

    --trace with any command shows the stack trace of an error.
    """
