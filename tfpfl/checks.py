"""The errors of this package. What else is raised is a bug, or comes from the system or the user's own code."""


class TfpflError(Exception):
    """An error of ours. Its message is for the user: the command line shows it in one line, without a stack trace."""


class InvalidArgument(TfpflError, ValueError):
    """An argument, an option or a file that cannot be used. The message says what was found and what to do."""


class Unavailable(TfpflError, RuntimeError):
    """Something that was asked for is not here, or did not start: TFF, Ray, a worker, an optional package."""
