"""The errors of the modules that run on a device. They import NumPy and an interpreter only, and nothing of tfpfl."""


class InvalidInput(ValueError):
    """An argument or a file that cannot be used. The message is for the user; the command line shows it in one line."""
