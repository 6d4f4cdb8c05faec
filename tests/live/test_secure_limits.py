"""Secure rounds whose numbers have no room in 32 bits."""

import pytest

from tflite_export.device.live.secure import codec
from tfpfl.checks import InvalidArgument
from tfpfl.live.rules import Rules
from tfpfl.live.secure_rounds import SecureRounds, check_secure


def test_numbers_that_no_codec_can_sum_are_refused_at_the_start(make_run, tmp_path, monkeypatch):
    """Not when the first round opens, after the devices have joined: then no option would help any more."""
    rules = Rules(secure=True, wait_for=10)
    with make_run(tmp_path / "run", participation=1.0) as run:
        with monkeypatch.context() as patched:
            patched.setattr(codec, "LARGEST", run.model.num_backbone_weights - 1)
            with pytest.raises(InvalidArgument, match="no codec for .* A gradient has at most"):
                SecureRounds(run, rules, 0.0)
        few = (2**31 - 1) // 10
        for examples in (few + 1, few):
            run.population.num_examples.setflags(write=True)
            run.population.num_examples[4] = examples
            if examples > few:
                with pytest.raises(InvalidArgument, match="N_i times the clients of a cohort is below"):
                    SecureRounds(run, rules, 0.0)
                assert not (run.folder / "live.sqlite").exists()
        check_secure(run, rules)
