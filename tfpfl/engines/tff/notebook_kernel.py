"""A notebook whose own Python has no TensorFlow Federated goes on in one that has.

TFF needs Python 3.11, Colab and most machines have a newer one. `continue_with_tff()` in a cell makes a Python 3.11
environment from this project's lock, once, and from then on runs every cell of the notebook there: what they print and
show appears as usual, but variables are those of the other Python.
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

STAMP = Path(".venv", "installed-from-lock")  # what the Makefile writes last
HERE = "_continue_with_tff"


def continue_with_tff() -> None:
    """Nothing where TFF is installed; elsewhere the cells after this one run in `python_with_tff()`.

    Raises:
        RuntimeError: not in a notebook, or the environment could not be made.
    """
    if find_spec("tensorflow_federated") is not None:
        return
    try:
        shell = get_ipython()  # noqa: F821 - IPython's
    except NameError:
        raise RuntimeError("continue_with_tff is for notebooks; elsewhere start Python 3.11 yourself") from None
    kernel = Kernel(python_with_tff(checkout()))
    shell.user_ns[HERE] = kernel.run
    shell.input_transformers_cleanup.append(lambda lines: [f"{HERE}({''.join(lines)!r})\n"])
    print(f"From here on, cells run in a kernel of Python {kernel.version}.")


def checkout() -> Path:
    """tfpfl's source, which has the lock: `TFPFL_SOURCE`, a folder or what git can clone, or the folder above.

    Raises:
        RuntimeError: there is none.
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
            f"{source} is no checkout of tfpfl, whose requirements.lock has TensorFlow Federated: start the notebook "
            "in its notebooks folder, or let TFPFL_SOURCE name a checkout, or an address that git can clone"
        )
    return folder


def python_with_tff(folder: Path) -> Path:
    """The interpreter of the checkout's .venv, which is made as `make test` makes it; this takes some minutes.

    Raises:
        RuntimeError: there is no Python 3.11 and none could be had, or something could not be installed.
    """
    if not (folder / STAMP).exists():
        print(f"Making a Python 3.11 environment from {folder.name}/requirements.lock, once; some minutes")
        if shutil.which("uv") is None:
            _run([sys.executable, "-m", "pip", "install", "--quiet", "uv"])
        uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
        _run([uv, "python", "find", "--quiet", "--no-project", "3.11"], [uv, "python", "install", "--quiet", "3.11"])
        path = os.pathsep.join([str(Path(uv).parent), os.environ["PATH"]])
        _run(["make", "--silent", "-C", str(folder), str(STAMP)], env={**os.environ, "PATH": path})
    return folder / ".venv" / "bin" / "python"


class Kernel:
    """A Jupyter kernel of another Python, for the cells of this one's notebook. It ends with this process.

    Args:
        python: the interpreter; ipykernel is installed there.
    """

    def __init__(self, python: Path):
        from jupyter_client.kernelspec import KernelSpecManager
        from jupyter_client.manager import KernelManager

        with tempfile.TemporaryDirectory() as folder:
            spec = Path(folder) / "tff" / "kernel.json"
            spec.parent.mkdir()
            command = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            spec.write_text(json.dumps({"argv": command, "display_name": "TFF", "language": "python"}))
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
        """Runs a cell there; what it shows is shown here.

        Raises:
            RuntimeError: it failed; its traceback was shown.
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
    """The first that succeeds of some commands."""
    for command in commands:
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode == 0:
            return
    raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stderr or done.stdout).strip()[-2000:]}")
