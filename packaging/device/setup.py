"""The wheel tfpfl-device: tflite_export.device with NumPy and LiteRT, and no TensorFlow. `make wheels` builds it."""

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
metadata = runpy.run_path(str(HERE.parent / "metadata.py"))


class DeviceFiles(build_py):
    """Takes of the package tflite_export nothing but its entrance, and all of tflite_export.device."""

    def find_package_modules(self, package, package_dir):
        """[(package, module, file)] of what goes into the wheel."""
        found = super().find_package_modules(package, package_dir)
        return [row for row in found if package != "tflite_export" or row[1] == "__init__"]


setup(
    name="tfpfl-device",
    description="Runs and personalizes models of tfpfl on a device, with NumPy and LiteRT and without TensorFlow",
    long_description=metadata["long_description"](HERE / "README.md"),
    **metadata["COMMON"],
    packages=["tflite_export", "tflite_export.device", "tflite_export.device.live", "tflite_export.device.live.secure"],
    package_dir={"": "../.."},  # the repository: there is no copy of the code
    package_data={"tflite_export": ["py.typed"]},
    cmdclass={"build_py": DeviceFiles},
    python_requires=">=3.11,<3.14",
    install_requires=["numpy>=1.25,<3", "ai-edge-litert>=1.1,<3"],
    extras_require={"live": ["cryptography>=41", "urllib3>=2,<3"]},  # rounds with a server
    classifiers=metadata["CLASSIFIERS"],
)
