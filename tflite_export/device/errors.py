"""The errors of the modules that run on a device. They import NumPy and an interpreter only, and nothing of tfpfl."""


class InvalidInput(ValueError):
    """An argument or a file cannot be used. The command line shows the message in one line."""


class BundleError(InvalidInput):
    """A bundle, or an input for it, cannot be used. The message says what was found."""
