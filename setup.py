"""Package metadata. Ranges here; the exact versions of the TensorFlow Federated stack are in requirements.lock.

The version, the addresses and what else the wheel of the device shares with this one: packaging/metadata.py.
"""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
metadata = runpy.run_path(str(ROOT / "packaging" / "metadata.py"))

setup(
    name="tfpfl",
    description="Personalized federated learning on TensorFlow Federated and Keras",
    long_description=metadata["long_description"](ROOT / "README.md"),
    **metadata["COMMON"],
    packages=find_packages(include=["tfpfl", "tfpfl.*", "tflite_export", "tflite_export.*"]),
    package_data={
        "tfpfl": ["py.typed"],
        "tfpfl.live": ["flower_app/*", "watch_page/*"],
        "tfpfl.studies": ["references.bib"],
        "tfpfl.studies.report": ["page.html"],
        "tfpfl.studies.suite": ["suite.toml"],
        "tflite_export": ["py.typed"],
    },
    python_requires=">=3.11,<3.14",
    # Wide enough for both stacks that are tested: TensorFlow 2.14 with Keras 2 (the lock) and 2.21 with Keras 3.
    install_requires=[
        "tensorflow>=2.14,<2.22",
        "keras>=2.14,<4",
        "tensorboard>=2.14,<3",  # no longer brought by TensorFlow
        "tensorflow-datasets>=4.9.4,<5",
        "numpy>=1.25,<3",
        "scikit-learn>=1.3,<2",
        "scipy>=1.9,<2",
        "tabulate>=0.9,<1",
        "matplotlib>=3.8,<4",
        "click>=8.1,<9",
        "psutil>=5.9,<8",
        "jinja2>=3.1,<4",
        "rich>=13,<16",
        "safetensors>=0.4.3,<1",
        "h5py>=3.9,<4",  # the weights in a file of Keras
        "jsonschema>=4.18,<5",  # the manifest of a federation
    ],
    # No extra brings TensorFlow Federated: its own pins (jaxlib 0.4.14 among them) can no longer be resolved from the
    # package index, and a resolver without an upper bound falls back to a TFF of 2019. `make demo` installs the lock.
    extras_require={
        "ray": ["ray>=2.52,<3"],  # --engine ray
        "tables": ["pyarrow>=14"],  # Parquet files; beside TFF 0.87 a version below 21
        "people": [
            "seglearn==1.2.5",
            "rdata>=0.11,<2",
            "onnx>=1.15,<2",
        ],  # has the watch data; reads R's files; reads the trunk speech_embedding
        "dp": ["dp-accounting>=0.4.3,<1"],  # epsilon of --aggregator dp
        "mlflow": ["mlflow>=2.9,<4"],  # --log mlflow
        "wandb": ["wandb>=0.17,<1"],  # --log wandb
        "optuna": ["optuna>=3.5,<5"],  # tfpfl study with search.kind = "optuna"
        "live": ["aiohttp>=3.9,<4", "cryptography>=41", "prometheus-client>=0.19,<1", "urllib3>=2,<3"],  # tfpfl serve
        "flower": ["flwr>=1.41,<2"],  # the ServerApp that tfpfl flower writes; not beside TensorFlow 2.14
        "yaml": ["pyyaml>=6,<7"],  # tfpfl study FILE.yaml
        "test": ["pytest>=8", "pytest-xdist>=3.5", "hypothesis>=6.100", "onnx>=1.15,<2"],
        "notebooks": ["nbclient>=0.10", "nbformat>=5.10", "ipykernel>=6.29"],
        "docs": ["mkdocs-material>=9.6,<10", "mkdocstrings[python]>=0.29,<2"],
        "lint": ["ruff>=0.5", "mypy>=2,<3"],
    },
    entry_points={"console_scripts": ["tfpfl = tfpfl.cli:main"]},
    classifiers=metadata["CLASSIFIERS"],
)
