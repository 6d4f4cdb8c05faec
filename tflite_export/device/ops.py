"""Reads from a .tflite file which operations it needs, with TensorFlow's or LiteRT's schema."""

import struct
from pathlib import Path

from tflite_export.device.errors import InvalidInput


def operations(content: bytes | Path) -> dict:
    """{operation: the newest version of it that the file needs}, over all subgraphs.

    A builtin operation has its name in the schema, such as CONV_2D. Others are called 'custom:NAME'; those of Flex are
    'custom:Flex...'.
    """
    schema = _schema()
    names = {v: k for k, v in vars(schema.BuiltinOperator).items() if not k.startswith("_")}
    found: dict[str, int] = {}
    model = _model(schema, content)
    for i in range(model.OperatorCodesLength()):
        code = model.OperatorCodes(i)
        builtin = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
        custom = code.CustomCode()
        name = f"custom:{custom.decode()}" if custom else names.get(builtin, f"builtin {builtin}")
        found[name] = max(code.Version(), found.get(name, 0))
    return dict(sorted(found.items()))


def minimum_runtime(content: bytes | Path) -> str | None:
    """The oldest version of TensorFlow Lite that can run the file, as the converter says; None if it does not."""
    model = _model(_schema(), content)
    for i in range(model.MetadataLength()):
        entry = model.Metadata(i)
        if entry.Name() == b"min_runtime_version":
            return model.Buffers(entry.Buffer()).DataAsNumpy().tobytes().rstrip(b"\0").decode()
    return None


def check_builtin(content: bytes | Path) -> None:
    """Raises `InvalidInput` if a file is no model, or needs an operation that is not builtin (Flex or custom)."""
    try:
        needed = operations(content)
    except (struct.error, IndexError, ValueError, TypeError, AttributeError) as error:  # of the reader of the format
        raise InvalidInput("this is no .tflite file, or it is damaged") from error
    custom = [name for name in needed if name.startswith("custom:")]
    if custom:
        raise InvalidInput(f"the file needs operations that runtimes do not have: {', '.join(custom)}")


def _model(schema, content):
    if isinstance(content, Path):
        content = content.read_bytes()
    return schema.Model.GetRootAsModel(content, 0)


def _schema():
    try:
        from ai_edge_litert import schema_py_generated
    except ImportError:
        from tensorflow.lite.python import schema_py_generated
    return schema_py_generated
