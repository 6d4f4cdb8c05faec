"""`wire.entry`: numbers of a message that no float can hold are refused, and make nobody fail."""

import pytest

from tflite_export.device.live import wire
from tflite_export.device.live.secure.codec import Codec
from tflite_export.device.live.secure.state import SecureState
from tflite_export.device.live.secure.visits import SecureVisits


@pytest.mark.parametrize("value", [10**400, -(10**4000)], ids=["positive", "negative"])
def test_an_integer_that_is_too_large_for_a_float_is_refused(value):
    """As the weight of an update: the server answered that it had failed, and its log had the stack trace."""
    message = wire.read_json(f'{{"weight": {value}}}'.encode())
    with pytest.raises(wire.WireError, match="weight must be float"):
        wire.entry(message, "weight", float)
    assert wire.entry({"weight": 10**300}, "weight", float) == 1e300
    assert wire.entry({"examples": 10**300}, "examples", int) == 10**300


def test_a_device_refuses_such_a_codec(tmp_path):
    codec = Codec(4, 3, 1.0, 1.0, 10)
    told = {name: getattr(codec, name) for name in ("size", "clients", "max_examples", "exponent", "loss_exponent")}
    work = {"kind": "keys", "round": 1, "attempt": 1, "run": "run", "weight": 1.0}
    work |= {"codec": told | {"clip": 10**400, "max_weight": 1.0}}
    with pytest.raises(wire.WireError, match="clip must be float"):
        SecureVisits(SecureState(tmp_path), 0, wire.Signer()).message(work, None)
