"""What any test may ask for: data sets that are here only if somebody prepared them, and TensorFlow Federated."""

import importlib.util
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before anything imports TensorFlow

import pytest


@pytest.fixture(scope="session")
def tfds_data():
    """`tfds_data("mnist")`: TFDS_DATA_DIR, which holds this TFDS data set; skips the test where it is not prepared."""

    def folder(name: str) -> Path:
        root = os.environ.get("TFDS_DATA_DIR")
        if not root:
            pytest.skip(f"{name} is needed: TFDS_DATA_DIR is not set")
        if not (Path(root) / name).is_dir():
            pytest.skip(f"{name} is needed: TFDS_DATA_DIR holds no folder of this name")
        return Path(root)

    return folder


@pytest.fixture(scope="session")
def tff():
    """The module tensorflow_federated; skips the test where it is not installed, fails where it does not import."""
    if importlib.util.find_spec("tensorflow_federated") is None:
        pytest.skip("TensorFlow Federated is not installed: requirements.lock has it")
    import tensorflow_federated

    return tensorflow_federated


def pytest_addoption(parser):
    """How hard test_fuzzing.py tries."""
    parser.addoption("--fuzz", type=int, default=1000, help="Cases of damaged files and strange values.")
