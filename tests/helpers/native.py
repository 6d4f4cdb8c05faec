"""Builds the client in C once, and calls it as the Python client is called. Needs NumPy and a C compiler only."""

import ctypes
import fcntl
import hashlib
import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np

from tflite_export.device.client import Personalized, Update
from tflite_export.device.errors import InvalidInput
from tflite_export.device.head_file import SavedHead
from tflite_export.device.kinds import Score

CORE = Path(__file__).resolve().parents[2] / "device_core"
NO_COMPILER = "there is no C compiler (cc) here, or no make"
KINDS = {1: "BundleError", 2: "HeadError", 3: "PayloadError", 4: "OSError"}
ROOM = 1024


def compiler() -> str | None:
    """The C compiler, if there is one."""
    return shutil.which(os.environ.get("CC", "cc")) if shutil.which("make") else None


def build(name: str = "", target: str = "all", **variables: str) -> Path:
    """The folder in the cache into which `make` has built a target; a change of a source makes a new one."""
    cache = Path(os.environ.get("TFPFL_CACHE") or Path.home() / ".cache" / "tfpfl")
    files = sorted(path for path in CORE.rglob("*") if path.is_file())
    content = hashlib.sha256(repr((name, target, variables)).encode())
    for path in files:
        content.update(path.name.encode() + path.read_bytes())
    folder = cache / f"native{name}-{content.hexdigest()[:16]}"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "native.lock", "w") as lock:  # tests run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "built").exists():
            given = [f"{key}={value}" for key, value in variables.items()]
            command = ["make", "-C", str(CORE), "-j2", f"OUT={folder}", target, *given]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            (folder / "built").touch()
    return folder


class NativeError(InvalidInput):
    """What the client in C refused; `kind` is the class of the Python client's error."""

    def __init__(self, status, message):
        super().__init__(message)
        self.kind = KINDS[status]


class Model(ctypes.Structure):
    _fields_ = [
        ("dimensions", ctypes.c_size_t),
        ("example_shape", ctypes.c_uint32 * 7),
        ("example_numbers", ctypes.c_size_t),
        ("num_features", ctypes.c_size_t),
        ("num_classes", ctypes.c_size_t),
        ("num_backbone_weights", ctypes.c_size_t),
        ("batch", ctypes.c_size_t),
        ("tau", ctypes.c_int32),
        ("beta", ctypes.c_double),
        ("head_rate", ctypes.c_double),
        ("safeguard", ctypes.c_int),
        ("rounds", ctypes.c_int),
        ("kind", ctypes.c_char * 80),
        ("trunk", ctypes.c_int),
        ("raw_dimensions", ctypes.c_size_t),
        ("raw_shape", ctypes.c_uint32 * 7),
        ("raw_numbers", ctypes.c_size_t),
        ("whole_numbers", ctypes.c_int),
        ("num_tokens", ctypes.c_uint32),
    ]


class Examples(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("numbers", ctypes.c_size_t),
        ("labels", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("targets", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
    ]


class Scores(ctypes.Structure):
    _fields_ = [
        ("loss", ctypes.c_double),
        ("accuracy", ctypes.c_double),
        ("value", ctypes.c_double),
        ("name", ctypes.c_char_p),
    ]

    def score(self) -> Score:
        name = self.name.decode()
        assert self.accuracy == self.value if name == "accuracy" else math.isnan(self.accuracy)
        return Score(self.loss, self.value, name)


class Head(ctypes.Structure):
    _fields_ = [
        ("num_features", ctypes.c_size_t),
        ("num_classes", ctypes.c_size_t),
        ("kernel", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("theta_sha256", ctypes.c_ubyte * 32),
        ("names", ctypes.c_void_p),
        ("names_bytes", ctypes.c_size_t),
    ]


class Fit(ctypes.Structure):
    _fields_ = [
        ("steps", ctypes.c_int32),
        ("beta", ctypes.c_double),
        ("held_out", ctypes.c_double),
        ("other", ctypes.POINTER(Examples)),
        ("on_training", ctypes.c_int),
    ]


class Fitted(ctypes.Structure):
    _fields_ = [
        ("kept", ctypes.c_int),
        ("before", Scores),
        ("after", Scores),
        ("loss_before", ctypes.c_double),
        ("loss", ctypes.c_double),
    ]


class Sent(ctypes.Structure):
    _fields_ = [
        ("payload", ctypes.c_void_p),
        ("payload_bytes", ctypes.c_size_t),
        ("num_examples", ctypes.c_uint64),
        ("loss", ctypes.c_float),
        ("head", Head),
    ]


class Options(ctypes.Structure):
    _fields_ = [("state", ctypes.c_char_p), ("litert", ctypes.c_char_p), ("trunk", ctypes.c_char_p)]


class Native:
    """The functions of the library that need no client."""

    def __init__(self, folder: Path):
        self.path = next(folder.glob("libtfpfl_device.[sd]*"))
        self.library = ctypes.CDLL(str(self.path))
        self.library.tfpfl_error.restype = ctypes.c_char_p
        self.library.tfpfl_payload_bytes.restype = ctypes.c_size_t
        for name in ("tfpfl_describe", "tfpfl_theta", "tfpfl_current_head"):
            getattr(self.library, name).restype = ctypes.c_void_p

    def _raise(self, status, error):
        if status:
            raise NativeError(status, error.value.decode("utf-8", "replace"))

    def check_bundle(self, folder) -> Model:
        model, error = Model(), ctypes.create_string_buffer(ROOM)
        self._raise(self.library.tfpfl_check_bundle(os.fsencode(folder), ctypes.byref(model), error), error)
        return model

    def save_head(self, path, head: SavedHead) -> None:
        error, (c_head, _keep) = ctypes.create_string_buffer(ROOM), head_in(head)
        self._raise(self.library.tfpfl_head_save(os.fsencode(path), ctypes.byref(c_head), error), error)

    def load_head(self, path, num_features, num_classes) -> SavedHead:
        error, head = ctypes.create_string_buffer(ROOM), Head()
        sizes = ctypes.c_size_t(num_features), ctypes.c_size_t(num_classes)
        status = self.library.tfpfl_head_load(os.fsencode(path), *sizes, ctypes.byref(head), error)
        self._raise(status, error)
        found = head_out(head)
        self.library.tfpfl_head_free(ctypes.byref(head))
        return found

    def encode(self, gradient, kind="float32") -> bytes:
        gradient, error = np.ascontiguousarray(gradient, np.float32), ctypes.create_string_buffer(ROOM)
        size = self.library.tfpfl_payload_bytes(ctypes.c_size_t(len(gradient)), kind.encode())
        payload = ctypes.create_string_buffer(size or 1)
        count = ctypes.c_size_t(len(gradient))
        status = self.library.tfpfl_payload_encode(pointer(gradient), count, kind.encode(), payload, error)
        self._raise(status, error)
        return payload.raw[:size]

    def decode(self, payload: bytes, size: int) -> np.ndarray:
        gradient, error = np.zeros(size, np.float32), ctypes.create_string_buffer(ROOM)
        sizes = ctypes.c_size_t(len(payload)), ctypes.c_size_t(size)
        status = self.library.tfpfl_payload_decode(payload, sizes[0], pointer(gradient), sizes[1], error)
        self._raise(status, error)
        return gradient

    def sha256(self, data: bytes) -> str:
        digest = (ctypes.c_ubyte * 32)()
        self.library.tfpfl_sha256(data, ctypes.c_size_t(len(data)), digest)
        return bytes(digest).hex()


def pointer(array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def head_in(head: SavedHead):
    """A head for C, and what must be kept as long as it is used."""
    kernel, bias = (np.ascontiguousarray(a, np.float32) for a in head[:2])
    digest = (ctypes.c_ubyte * 32)(*bytes.fromhex(head.theta_sha256))
    text = None if head.labels is None else json.dumps(head.labels, ensure_ascii=False).encode()
    names = text and ctypes.create_string_buffer(text)
    address = None if names is None else ctypes.addressof(names)
    given = Head(*kernel.shape, kernel.ctypes.data, bias.ctypes.data, digest, address, len(text or b""))
    return given, (kernel, bias, names)


def head_out(head: Head) -> SavedHead:
    m, k = head.num_features, head.num_classes
    kernel, bias = (
        np.ctypeslib.as_array(ctypes.cast(p, ctypes.POINTER(ctypes.c_float)), (n,)).copy()
        for p, n in ((head.kernel, m * k), (head.bias, k))
    )
    labels = tuple(json.loads(ctypes.string_at(head.names, head.names_bytes))) if head.names else None
    return SavedHead(kernel.reshape(m, k), bias, bytes(head.theta_sha256).hex(), labels)


def examples_in(x, y=None):
    """Examples for C, and what must be kept as long as they are used."""
    whole = np.asarray(x).dtype.kind == "i"
    x = np.ascontiguousarray(x, np.int32 if whole else np.float32)
    targets = np.ndim(y) == 2
    y = None if y is None else np.ascontiguousarray(y, np.float32 if targets else np.int32)
    given = Examples(numbers=x.size, count=len(x), **{"tokens" if whole else "x": x.ctypes.data})
    if y is not None:
        setattr(given, "targets" if targets else "labels", y.ctypes.data)
    return given, (x, y)


class NativeClient:
    """A client in C with the methods of `DeviceClient`."""

    def __init__(self, native: Native, bundle, state=None, litert=None, trunk=None, of_state=False):
        """With `of_state`, `bundle` is the folder of a live device."""
        self.library, self._client = native.library, ctypes.c_void_p()
        options = Options(*(None if given is None else os.fsencode(given) for given in (state, litert, trunk)))
        opens = self.library.tfpfl_open_state if of_state else self.library.tfpfl_open
        status = opens(os.fsencode(bundle), ctypes.byref(options), ctypes.byref(self._client))
        try:
            self._done(status)
        except NativeError:
            self.close()
            raise
        self.model = Model.from_address(self.library.tfpfl_describe(self._client))

    def close(self) -> None:
        self.library.tfpfl_close(self._client)
        self._client = ctypes.c_void_p()

    def __del__(self):
        self.close()

    def _done(self, status):
        if status:
            raise NativeError(status, self.library.tfpfl_error(self._client).decode("utf-8", "replace"))

    @property
    def saved_head(self) -> SavedHead:
        return head_out(Head.from_address(self.library.tfpfl_current_head(self._client)))

    @property
    def head(self):
        return self.saved_head[:2]

    @property
    def head_is_stale(self) -> bool:
        return bool(self.library.tfpfl_head_is_stale(self._client))

    @property
    def theta(self) -> np.ndarray:
        address = ctypes.cast(self.library.tfpfl_theta(self._client), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(address, (self.model.num_backbone_weights,)).copy()

    def receive(self, theta) -> None:
        theta = np.ascontiguousarray(theta, np.float32)
        self._done(self.library.tfpfl_receive(self._client, pointer(theta), ctypes.c_size_t(theta.size)))

    def start_from(self, head: SavedHead) -> None:
        given, _keep = head_in(head)
        self._done(self.library.tfpfl_start_from(self._client, ctypes.byref(given)))

    def _rows(self, function, x, columns):
        (given, _keep), out = examples_in(x), np.zeros((len(x), columns), np.float32)
        self._done(function(self._client, ctypes.byref(given), pointer(out)))
        return out

    def examples(self, raw) -> np.ndarray:
        raw = np.ascontiguousarray(raw, np.float32)
        out = np.zeros((len(raw), *self.model.example_shape[: self.model.dimensions]), np.float32)
        sizes = ctypes.c_size_t(raw.size), ctypes.c_size_t(len(raw))
        self._done(self.library.tfpfl_examples_of(self._client, pointer(raw), *sizes, pointer(out)))
        return out

    def features(self, x) -> np.ndarray:
        return self._rows(self.library.tfpfl_features, x, self.model.num_features)

    def predict(self, x) -> np.ndarray:
        return self._rows(self.library.tfpfl_predict, x, self.model.num_classes)

    def score(self, x, y) -> Score:
        (given, _keep), found = examples_in(x, y), Scores()
        self._done(self.library.tfpfl_score(self._client, ctypes.byref(given), ctypes.byref(found)))
        return found.score()

    def personalize(self, x, y, *, steps=None, beta=None, held_out=0.25) -> Personalized:
        (given, _keep), fit, found = examples_in(x, y), Fit(), Fitted()
        self.library.tfpfl_default_fit(self._client, ctypes.byref(fit))
        fit.steps = fit.steps if steps is None else steps
        fit.beta = fit.beta if beta is None else beta
        fit.on_training = held_out is None
        if isinstance(held_out, tuple):
            other, _other = examples_in(*held_out)
            fit.other = ctypes.pointer(other)
        elif held_out is not None:
            fit.held_out = held_out
        done = self.library.tfpfl_personalize(self._client, ctypes.byref(given), ctypes.byref(fit), ctypes.byref(found))
        self._done(done)
        before, after = (s.score() for s in (found.before, found.after))
        return Personalized(bool(found.kept), before, after, found.loss_before, found.loss)

    def round(self, theta, x, y, *, payload="float32") -> Update:
        theta, sent = np.ascontiguousarray(theta, np.float32), Sent()
        given, _keep = examples_in(x, y)
        size, kind = ctypes.c_size_t(theta.size), payload.encode()
        arguments = pointer(theta), size, ctypes.byref(given), kind, ctypes.byref(sent)
        self._done(self.library.tfpfl_round(self._client, *arguments))
        content = ctypes.string_at(sent.payload, sent.payload_bytes)
        update = Update(content, sent.num_examples, sent.loss, head_out(sent.head))
        self.library.tfpfl_update_free(ctypes.byref(sent))
        return update

    def commit(self, update: Update) -> None:
        head, _keep = head_in(update.head)
        sent = Sent(head=head)
        self._done(self.library.tfpfl_commit(self._client, ctypes.byref(sent)))


def linked(source: str, program: Path, *more) -> Path:
    """Compiles a program in C, with these libraries and options of the compiler.

    A function of its own that has the name of one of libc takes its place in the libraries as well.
    """
    places = (f"-I{CORE / place}" for place in ("include", "src", "live"))
    command = [compiler(), "-D_GNU_SOURCE", "-x", "c", "-", "-x", "none", *places, "-rdynamic", "-o", program, *more]
    done = subprocess.run(
        [*map(str, command), "-lm", "-ldl"], input=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return program
