"""Runs the cells of a notebook in a Python that has TensorFlow Federated, if the notebook's own Python has not.

TFF needs Python 3.11; Colab and most machines have a newer one. `continue_with_tff()` in a cell makes a Python 3.11
environment from this project's requirements.lock, once. From then on every cell of the notebook runs there. Output
appears as usual, but variables of earlier cells are not there, because they belong to the first Python.
"""

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

STAMP = Path(".venv", "installed-from-lock")  # the Makefile writes this file when the environment is complete
HERE = "_continue_with_tff"  # the notebook's name for the function that runs a cell in the other kernel


def continue_with_tff() -> None:
    """Runs all later cells of this notebook in `python_with_tff()`; does nothing if TFF is installed here.

    Raises:
        RuntimeError: this is not a notebook, or the environment could not be made.
    """
    if find_spec("tensorflow_federated") is not None:
        return
    try:
        shell = get_ipython()  # noqa: F821 - IPython's
    except NameError:
        raise RuntimeError(
            "continue_with_tff works only in a notebook, and this is none: start Python 3.11 from this project's .venv"
        ) from None
    kernel = Kernel(python_with_tff(checkout()))
    shell.user_ns[HERE] = kernel.run
    shell.input_transformers_cleanup.append(lambda lines: [f"{HERE}({''.join(lines)!r})\n"])
    print(f"From here on, cells run in a kernel of Python {kernel.version}.")


def checkout() -> Path:
    """The folder of tfpfl's source, which has requirements.lock.

    `TFPFL_SOURCE` is a folder, or an address that git clones into `TFPFL_CACHE`; default: the parent folder.

    Raises:
        RuntimeError: the folder has no requirements.lock, or git could not clone it.
    """
    source = os.environ.get("TFPFL_SOURCE") or ".."
    folder = Path(source).resolve()
    if not folder.is_dir():
        cache = Path(os.environ.get("TFPFL_CACHE") or Path.home() / ".cache" / "tfpfl")
        folder = cache / "checkout"
        if not folder.exists():
            _run(["git", "clone", "--quiet", "--depth", "1", source.removeprefix("git+"), str(folder)])
    if not (folder / "requirements.lock").exists():
        raise RuntimeError(
            f"{source} is not a checkout of tfpfl: it has no requirements.lock, from which TensorFlow Federated is "
            "installed. Start the notebook in the folder notebooks of a checkout, or set TFPFL_SOURCE to a checkout or "
            "to an address that git can clone"
        )
    return folder


def python_with_tff(folder: Path) -> Path:
    """The Python interpreter of the checkout's .venv. If there is none, it is made, which takes some minutes.

    Raises:
        RuntimeError: Python 3.11 is missing and could not be installed, or a package could not be installed.
    """
    if not (folder / STAMP).exists():
        print(f"Making a Python 3.11 environment from {folder.name}/requirements.lock; this takes some minutes, once")
        if shutil.which("uv") is None:
            _run([sys.executable, "-m", "pip", "install", "--quiet", "uv"])
        uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
        _run([uv, "python", "find", "--quiet", "--no-project", "3.11"], [uv, "python", "install", "--quiet", "3.11"])
        path = os.pathsep.join([str(Path(uv).parent), os.environ["PATH"]])
        _run(["make", "--silent", "-C", str(folder), str(STAMP)], env={**os.environ, "PATH": path})
    return folder / ".venv" / "bin" / "python"


class Kernel:
    """A Jupyter kernel of another Python that runs the cells of this notebook. It ends when this process ends.

    Args:
        python: the interpreter; the package ipykernel must be installed there.
    """

    def __init__(self, python: Path):
        from jupyter_client.kernelspec import KernelSpecManager
        from jupyter_client.manager import KernelManager

        with tempfile.TemporaryDirectory() as folder:
            spec = Path(folder) / "tff" / "kernel.json"
            spec.parent.mkdir()
            command = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            kernel = {"argv": command, "display_name": "TFF", "language": "python"}
            spec.write_text(json.dumps(kernel), encoding="utf-8")
            self._manager = KernelManager(
                kernel_name="tff", kernel_spec_manager=KernelSpecManager(kernel_dirs=[folder])
            )
            self._manager.start_kernel()
        atexit.register(self._manager.shutdown_kernel, now=True)
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)
        self.run('%matplotlib inline\n%config InlineBackend.figure_formats = ["retina"]')
        self.version = subprocess.run([python, "-V"], capture_output=True, text=True).stdout.split()[-1]

    def run(self, code: str) -> None:
        """Runs a cell in the kernel, and shows its output in this notebook.

        Raises:
            RuntimeError: the cell raised an error; its traceback was shown.
        """
        try:
            reply = self._client.execute_interactive(code, allow_stdin=False, output_hook=_show)
        except KeyboardInterrupt:
            self._manager.interrupt_kernel()
            raise
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"{reply['content'].get('ename', 'the cell')} in the kernel with TFF; see above")


def _show(message) -> None:
    from IPython.display import publish_display_data

    kind, content = message["header"]["msg_type"], message["content"]
    if kind == "stream":
        getattr(sys, content["name"]).write(content["text"])
    elif kind in ("display_data", "execute_result"):
        publish_display_data(content["data"], content["metadata"])
    elif kind == "error":
        sys.stderr.write("\n".join(content["traceback"]) + "\n")


def _run(*commands, env=None) -> None:
    """Runs the commands one after the other until one succeeds; a RuntimeError if none does."""
    for command in commands:
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode == 0:
            return
    raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stderr or done.stdout).strip()[-2000:]}")
