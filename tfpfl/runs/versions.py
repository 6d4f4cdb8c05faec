"""The versions of the packages that decide a run's numbers, as config.json records them."""

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("tfpfl", "tensorflow", "keras", "tensorflow-federated", "numpy")  # whose versions config.json records


def package_versions() -> dict:
    """The versions of Python and of `PACKAGES`: {name: version}, None for a package that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
