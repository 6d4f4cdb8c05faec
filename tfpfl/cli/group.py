"""The group of all commands, here and of tflite_export: which errors are ours, and --trace."""

import click

from tfpfl.checks import TfpflError, unknown


class Group(click.Group):
    """Errors of ours, and Python's own of files, end in one line; anything else is a bug and keeps its trace."""

    ours: tuple[type[Exception], ...] = (TfpflError,)

    def parse_args(self, ctx, args):
        ctx.ensure_object(dict)["trace"] = "--trace" in args  # wherever it stands
        return super().parse_args(ctx, [a for a in args if a != "--trace"])

    def resolve_command(self, ctx, args):
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            ctx.fail(unknown("command", args[0], self.list_commands(ctx)))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except self.ours + (OSError,) as error:
            known = isinstance(error, self.ours) or type(error).__module__ == "builtins"  # FileNotFoundError, ...
            if not known or ctx.obj["trace"]:
                raise
            raise click.ClickException(" ".join(str(error).split())) from error


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="tfpfl")
def main():
    """tfpfl: personalized federated learning on TensorFlow Federated and Keras.

    --trace with any command shows the stack trace of an error.
    """
