"""The library in C, built once; LiteRT's C library, from an environment that TFPFL_LITERT's tests make."""

import pytest

from helpers import litert
from helpers.native import NO_COMPILER, Native, build, compiler

NO_LITERT = "there is no C library of LiteRT here: set TFPFL_LITERT to versions from 2.0 on, such as 2.3.0"


@pytest.fixture(scope="session")
def programs():
    """The folder with the library, and with the programs of device_core/tests and device_core/examples."""
    if compiler() is None:
        pytest.skip(NO_COMPILER)
    return build()


@pytest.fixture(scope="session")
def native(programs):
    """The functions in C."""
    return Native(programs)


@pytest.fixture(scope="session")
def litert_library():
    """The C library of one version of LiteRT, the newest that there is."""
    found = litert.present_libraries()
    if not found:
        pytest.skip(NO_LITERT)
    return found[max(found, key=lambda version: tuple(int(n) if n.isdigit() else 99 for n in version.split(".")))]
