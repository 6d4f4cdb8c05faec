"""A device's data when it joins, and after that: the server counts with the numbers that it says then."""

import json
import time

import numpy as np
import pytest

from helpers.native import NativeError
from helpers.native_live import Proxy, missing
from helpers.phone_bundles import CLASSES, small_bundle
from helpers.scripted import LANGUAGES, Script, begun, examples_of, told_by
from tflite_export.device.errors import InvalidInput
from tflite_export.device.live import wire

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return small_bundle("classification", tmp_path_factory.mktemp("bundle"))


def member_of(folder):
    return json.loads((folder / "member.json").read_text())


def refused(language, script, folder, litert, examples):
    """What a device says that does not start; it asks for nothing."""
    asked = []

    def gate(name, headers):
        asked.append(name)

    script.gate = gate
    with Proxy() as proxy:
        proxy.ask = script
        with pytest.raises((NativeError, InvalidInput)) as found:
            begun(language, script, proxy.address, folder, litert, patience=-1.0, examples=examples)
    assert asked == []
    return str(found.value)


def told(folder, before, now):
    return (
        f"{folder} is of a device that joined with {before}, and its data have {now} now: these stay what they were, "
        "since the server counts with them. Give it the examples that it joined with, or join as another client, with "
        "another folder and that client's token"
    )


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_device_whose_examples_are_others_than_when_it_joined(bundle, litert_library, tmp_path, language):
    """Its visits were refused for ever, and a secure round had no sum any more; nobody said which device it was."""
    folder, other = tmp_path / "device", LANGUAGES[1 - LANGUAGES.index(language)]
    told_by(language, Script(bundle, "visit"), folder, litert_library)
    assert member_of(folder)["examples"] == 9
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    for each in (language, other):
        for train, classes in ((12, CLASSES), (8, CLASSES), (9, CLASSES + 1), (9, CLASSES - 1)):
            said = refused(each, Script(bundle), folder, litert_library, examples_of(train, classes))
            now = f"{train} training examples of {classes} classes"
            assert said == told(folder, f"9 training examples of {CLASSES} classes", now)
    assert before == {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert told_by(other, Script(bundle, "visit"), folder, litert_library) == ["round 1: counted"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_labels_that_lack_a_class_are_no_other_classes(bundle, litert_library, tmp_path, language):
    """Nothing says how many there are: then it is what the device joined with, also when it has to join again."""
    folder, unknown = tmp_path / "device", []
    told_by(language, Script(bundle), folder, litert_library)
    (x, y), script = examples_of()["train"], Script(bundle, "visit")
    y[y == CLASSES - 1] = 0

    def gate(name, headers):
        if name == "work" and not unknown:
            unknown.append(name)
            return 401, {"error": "client 0 has not joined: join with its token first", "time": time.time()}

    script.gate = gate
    data = {"train": (x, y), "classes": 0 if language == "C" else None}
    said = told_by(language, script, folder, litert_library, examples=data)
    assert said == ["joined as client 0", "round 1: counted"] and script.joined[0]["classes"] == CLASSES
    y[0] = CLASSES
    said = refused(language, Script(bundle), folder, litert_library, data)
    assert said.startswith(f"{folder} is of a device that joined with 9 training examples of {CLASSES} classes, and")


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_folder_of_an_earlier_version_learns_the_number_from_a_round(bundle, litert_library, tmp_path, language):
    folder = tmp_path / "device"
    told_by(language, Script(bundle), folder, litert_library)
    old = {"client": 0, "classes": CLASSES, "rounds": 7, "secure": False}
    (folder / "member.json").write_text(json.dumps(old))
    script = Script(bundle, "visit")
    script.update = 422, {"error": "client 0 has 9 examples in this run, and the update says 12"}
    told_by(language, script, folder, litert_library, examples=examples_of(12))
    assert "examples" not in member_of(folder)
    said = refused(language, Script(bundle), folder, litert_library, examples_of(9, CLASSES + 1))
    assert said == told(folder, f"{CLASSES} classes", f"{CLASSES + 1} classes")
    told_by(language, Script(bundle, "visit"), folder, litert_library)
    assert member_of(folder)["examples"] == 9
    refused(language, Script(bundle), folder, litert_library, examples_of(12))


@pytest.mark.parametrize("language", LANGUAGES)
def test_an_update_that_was_on_its_way_says_the_number(bundle, litert_library, tmp_path, language):
    """It counts: so the server has its number, and the data that are larger now are refused at once."""
    folder, script = tmp_path / "device", Script(bundle, "visit")
    script.gate = lambda name, headers: (500, {"error": "lost"}) if name.startswith("update/") else None
    with Proxy() as proxy:
        proxy.ask = script
        device, _ = begun(language, script, proxy.address, folder, litert_library, patience=-1.0)
        with pytest.raises((NativeError, InvalidInput)):
            device.run()
        device.close()
        (folder / "member.json").write_text(json.dumps({"client": 0, "classes": CLASSES}))
        script.gate = lambda name, headers: None
        with pytest.raises((NativeError, InvalidInput), match="joined with 9 training examples of .* 12 training"):
            begun(language, script, proxy.address, folder, litert_library, examples=examples_of(12))
    assert len(script.sent) == 1 and member_of(folder)["examples"] == 9
    assert wire.unpack(script.sent[0][1])[0]["examples"] == 9
    assert not [path for path in folder.iterdir() if path.name.startswith("update")]


@pytest.mark.parametrize("number", ["0", '"9"', "null"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_number_that_is_none(bundle, litert_library, tmp_path, language, number):
    folder = tmp_path / "device"
    folder.mkdir()
    (folder / "member.json").write_text(f'{{"client": 0, "classes": {CLASSES}, "examples": {number}}}')
    said = refused(language, Script(bundle), folder, litert_library, examples_of())
    assert said == f"{folder}/member.json is damaged: delete it, and join again with the token"


def with_x(split, row, value):
    examples = examples_of()
    examples[split][0][row, 3] = value
    return examples


def with_y(split, row, value, **other):
    examples = examples_of() | other
    examples[split][1][row] = value
    return examples


NOT_FINITE = "the examples of {}: example {} holds NaN or infinity: the head is untouched"
OUTSIDE = "the examples of {}: label {} is out of range: this client's are 0..3; the head is untouched"
UNUSABLE = {
    "nan": (lambda: with_x("train", 2, np.nan), NOT_FINITE.format("train", 2)),
    "infinity, where it is only scored": (lambda: with_x("test", 4, -np.inf), NOT_FINITE.format("test", 4)),
    "a class too many": (lambda: with_y("train", 1, CLASSES), OUTSIDE.format("train", CLASSES)),
    "no class": (lambda: with_y("train", 1, -1), OUTSIDE.format("train", -1)),
    "no class, where it is only scored": (lambda: with_y("test", 1, -7), OUTSIDE.format("test", -7)),
    "a class that no training example shows": (
        lambda: with_y("test", 1, CLASSES, classes=None),
        OUTSIDE.format("test", CLASSES),
    ),
    "no class, and nobody says how many there are": (
        lambda: with_y("train", 1, -1, classes=None),
        "the labels y of train hold -1, and classes are numbered from 0. If they are numbers to predict, say so with "
        '"classes": the number of outputs',
    ),
}


@pytest.mark.parametrize("wrong", UNUSABLE)
@pytest.mark.parametrize("language", LANGUAGES)
def test_data_that_cannot_be_used_are_refused_before_the_device_joins(
    bundle, litert_library, tmp_path, language, wrong
):
    """It had joined, and a place was taken for good with its number of examples."""
    make, why = UNUSABLE[wrong]
    examples = make()
    if language == "C":
        examples["classes"] = examples["classes"] or 0
    assert refused(language, Script(bundle), tmp_path / "device", litert_library, examples) == why
    assert not (tmp_path / "device" / "member.json").exists()
