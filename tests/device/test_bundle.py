"""Bundles: what is exported is the model that evaluation sees, and what is damaged or impossible is refused."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from helpers.marks import slow_but
from helpers.truth import examples, random_head, relative, relative_l2, varied
from tflite_export import Bundle, BundleError, DeviceClient, ExportError, Runtime, export, verify
from tflite_export.convert import personal
from tflite_export.convert.texts import model_card
from tflite_export.device import layout
from tflite_export.device.head_file import HeadError, SavedHead, head_bytes, load_head, theta_sha256
from tflite_export.device.ops import operations
from tfpfl.data.cohorts import cohort
from tfpfl.models import SplitModel, build_network
from tfpfl.runs.run import Run

INTERPRETER = tf.lite.Interpreter
ROOT = Path(__file__).resolve().parents[2]


def evaluated(folder, client):
    """(test accuracy, loss) of a client's personal model, as tfpfl evaluates it."""
    with Run.open(folder, engine="local") as run:
        training = run.training()
        rows = training.evaluate(training.server_state(), splits=("test",))
    return next((e.accuracy, e.loss) for e in rows if e.client_id == client)


@pytest.mark.slow
def test_the_exported_client_scores_as_in_the_simulation(bundle, run_folder, federation):
    x, y = federation.arrays(4, "test")
    accuracy, loss = evaluated(run_folder, 4)
    found = DeviceClient(bundle, interpreter=INTERPRETER).score(x, y)
    assert found.accuracy == pytest.approx(accuracy)
    assert found.loss == pytest.approx(loss, rel=1e-5)
    whole = Runtime(bundle.path("predict.tflite"), INTERPRETER)("predict", x=x)["probabilities"]
    assert float((whole.argmax(1) == y).mean()) == pytest.approx(accuracy)
    assert -np.log(whole[np.arange(len(y)), y]).mean() == pytest.approx(loss, rel=1e-4)


def test_a_bundle_has_the_files_that_its_layout_names(bundle):
    named = {name for key, value in vars(layout).items() if key.isupper() for name in np.atleast_1d(value)}
    # Only with browser=True, see test_web.py; or with train_from, see test_trunk_bundle.py.
    others = {layout.BROWSER_PROGRAM, layout.CLIENT, layout.TRUNK, layout.TRUNK_FLOAT16, layout.TRUNK_INT8}
    others |= {layout.TRUNK_STATIC, layout.MEMBERS_ABOUT, layout.MEMBERS}  # the last two are a site's
    assert {path.name for path in bundle.folder.iterdir()} == named - others


def test_theta_and_head_lie_where_the_manifest_says(bundle, run_folder):
    with Run.open(run_folder, engine="local") as run:
        server = run.training().server_state()
        (head,) = run.training().client_states([4])
    flat = np.fromfile(bundle.folder / "theta.bin", "<f4")
    for row, weight in zip(bundle.manifest["model"]["theta"], server.theta, strict=True):
        size = int(np.prod(row["shape"]))
        assert np.array_equal(flat[row["offset"] : row["offset"] + size].reshape(row["shape"]), weight)
    saved = load_head(bundle.folder / "head.bin", 200, 3)
    assert np.array_equal(saved.kernel, head.kernel) and np.array_equal(saved.bias, head.bias)
    assert saved.theta_sha256 == hashlib.sha256((bundle.folder / "theta.bin").read_bytes()).hexdigest()


def test_labels_and_preprocessing_are_the_federations(bundle, federation):
    names = [federation.class_names[c] for c in federation.classes(4)]
    assert (bundle.folder / "labels.txt").read_text().split() == names
    assert bundle.manifest["labels"]["class_ids"] == federation.classes(4).tolist()
    raw, _ = federation.raw(4, "test")
    pre = bundle.manifest["preprocessing"]
    x = raw.astype(np.float32) * np.float32(pre["scale"]) + np.float32(pre["shift"])
    assert np.array_equal(x, federation.arrays(4, "test")[0])


def test_the_manifest_says_whose_model_it_is_and_since_when_the_client_took_part(bundle, run_folder, federation):
    with Run.open(run_folder, engine="local") as run:
        rounds = [t for t in (1, 2, 3) if 4 in cohort(run.config.seed, t, run.population)]
        run_id = run.config.run_id
    told = {
        "algorithm": "pflego",
        "client": 4,
        "client_name": federation.client_names[4],
        "took_part": bool(rounds),
        "first_round": rounds[0] if rounds else None,
        "round": 3,
        "num_examples": int(federation.num_examples("train")[4]),
        "federation_hash": federation.hash,
        "run_id": run_id,
    }
    assert {name: bundle.manifest[name] for name in told} == told


@pytest.mark.table
@pytest.mark.slow
def test_head_rate_is_the_joint_step_of_the_simulation(bundle, make_run, federation, tmp_path):
    assert bundle.manifest["training"]["head_rate"] == pytest.approx(0.01 * 10 / 5)
    exact = export(make_run(rounds=1, rule="exact", rho=0.01), 4, tmp_path / "b", inference=False)
    alpha = federation.num_examples()[4] / federation.num_examples().sum()
    assert exact.manifest["training"]["head_rate"] == pytest.approx(0.01 * 2 * alpha)


def test_every_file_has_builtin_operations_only(bundle):
    files = sorted(bundle.folder.glob("*.tflite"))
    assert len(files) == 7
    for file in files:
        found = operations(file)
        assert found and not [name for name in found if "custom" in name.lower()]
        assert bundle.manifest["files"][file.name]["operations"] == found


def test_precisions_get_smaller_and_stay_close(bundle):
    quality = bundle.manifest["quality"]
    sizes = [bundle.manifest["files"][name]["bytes"] for name in quality]
    assert sizes[0] > 1.7 * sizes[1] > 1.7 * 1.5 * sizes[2]
    assert quality["backbone.tflite"]["centred_cosine"] > 0.999999
    assert all(q["centred_cosine"] > 0.995 and q["head_agreement"] >= 0.9 for q in quality.values())
    assert all(q["on"].startswith("the client's test") for q in quality.values())


def test_quality_tells_a_wrong_backbone(bundle, federation):
    """The plain cosine of features would not."""
    from tflite_export.convert.backbone import quality

    x, _ = federation.arrays(4, "test")
    reference = DeviceClient(bundle, interpreter=INTERPRETER).features(x)
    head = load_head(bundle.folder / "head.bin", 200, 3)
    wrong = reference.mean(0) + np.random.default_rng(0).permuted(reference - reference.mean(0), axis=0)
    plain = (wrong * reference).sum() / np.linalg.norm(wrong) / np.linalg.norm(reference)
    found = quality(reference, (head.kernel, head.bias), reference=wrong)
    assert plain > 0.6 and found.centred_cosine < 0.3


def test_verify_agrees_and_notices_another_program(bundle, tmp_path):
    found = verify(bundle, interpreter=INTERPRETER)
    assert found.ok and found.runtime == f"tensorflow {tf.__version__}"
    assert {c.signature for c in found.comparisons} == set(bundle.manifest["signatures"])
    assert {c.file for c in found.comparisons} == {n for n in bundle.manifest["files"] if n.endswith(".tflite")}
    with np.load(bundle.path("check.npz")) as file:
        values = dict(file)
    values["round.dtheta"] = values["round.dtheta"] * np.float32(1.001)
    copy = Bundle(shutil.copytree(bundle.folder, tmp_path / "copy"))
    np.savez(copy.folder / "check.npz", **values)
    found = verify(copy, interpreter=INTERPRETER)
    assert [c.output for c in found.comparisons if not c.ok] == ["dtheta", "dtheta"] and not found.ok


@pytest.mark.parametrize("name", ["program.tflite", "theta.bin", "head.bin", "labels.txt"])
def test_one_changed_bit_is_found(bundle, tmp_path, name):
    copy = shutil.copytree(bundle.folder, tmp_path / "copy")
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(BundleError, match=f"{name} is damaged"):
        Bundle(copy)
    (copy / name).unlink()
    with pytest.raises(BundleError, match=f"{name} is missing"):
        DeviceClient(copy, interpreter=INTERPRETER)


def test_a_changed_manifest_and_other_folders_are_refused(bundle, tmp_path):
    copy = shutil.copytree(bundle.folder, tmp_path / "copy")
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"tau": 50', '"tau": 51'))
    with pytest.raises(BundleError, match="was changed"):
        Bundle(copy)
    path.write_text(json.dumps({**bundle.manifest, "format": 99}))
    with pytest.raises(BundleError, match="format 99"):
        Bundle(copy)
    path.write_text("{")
    with pytest.raises(BundleError, match="cannot be read"):
        Bundle(copy)
    with pytest.raises(BundleError, match="no manifest.json"):
        Bundle(tmp_path)


@pytest.mark.parametrize(
    "changes, said, not_said",
    [
        ({}, "took part in training, first in round", "All clients share"),
        ({"took_part": False, "first_round": None}, "never took part: its model is the one that pflego", "was fitted"),
        ({"took_part": None, "first_round": None}, "the run does not show it", "never took part"),
        ({"shared": True}, "All clients share this model", "was fitted"),
    ],
)
def test_the_card_says_whose_model_it_is(bundle, changes, said, not_said):
    about = {**bundle.manifest, "took_part": True, "first_round": 2} | changes
    card = model_card(bundle.manifest, SimpleNamespace(about=about, labels=["a", "b", "c"]))
    assert said in card and not_said not in card and "# Model of client 4 (phone 4)\n\n" in card


@pytest.mark.parametrize("client", [None, 10, -1, "phone", "phone 10"])
def test_an_unknown_client_is_refused(run_folder, tmp_path, client):
    said = "say which of the 10 clients" if client is None else f"no client '{client}'.* 10 clients.*0 to 9"
    with pytest.raises(ExportError, match=said):
        export(run_folder, client, tmp_path / "b")
    assert not list(tmp_path.iterdir())


def test_a_class_without_a_name_is_refused(run_folder, monkeypatch):
    monkeypatch.setattr(personal, "class_names", lambda *_: ["a", "b", ""])
    with pytest.raises(ExportError, match="class 2 has an empty name"):
        personal.personal_model(run_folder, 4)


@pytest.mark.parametrize("part", ["theta", "head"])
def test_a_model_whose_fine_tuning_diverged_is_not_taken_for_the_converters_fault(run_folder, monkeypatch, part):
    weights = personal.ClientModels.weights

    def diverged(self, client):
        found = weights(self, client)
        return found._replace(**{part: tuple(w * np.nan for w in getattr(found, part))})

    monkeypatch.setattr(personal.ClientModels, "weights", diverged)
    with pytest.raises(ExportError, match=r"client 4 \(phone 4\) predicts holds NaN or infinity: .* has diverged"):
        personal.personal_model(run_folder, 4)


@pytest.mark.slow
def test_what_cannot_take_part_in_rounds_is_refused_by_its_reason(make_run, tmp_path):
    fedavg = make_run("fedavg", rounds=1)
    with pytest.raises(ExportError, match="fedavg has no program"):
        export(fedavg, 4, tmp_path / "b", rounds=True)
    with pytest.raises(ExportError, match="inner_opt is 'newton'"):
        export(make_run(rounds=1, inner_opt="newton", tau=3), 4, tmp_path / "b", rounds=True)


def test_a_run_without_rounds_is_refused(federation, tmp_path):
    from tfpfl.runs.config import RunConfig

    config = RunConfig(federation=str(federation.path), network="mlp200")
    with Run.create(config, tmp_path / "run", federation) as run, pytest.raises(ExportError, match="no rounds yet"):
        export(run, 4, tmp_path / "b")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", slow_but(["fedavg", "ditto", "fedper", "fedavg_ft"], "ditto"))
def test_other_algorithms_export_for_inference(make_run, federation, tmp_path, algorithm):
    folder = make_run(algorithm, rounds=2)
    bundle = export(folder, 5, tmp_path / "b")
    assert verify(bundle, interpreter=INTERPRETER).ok
    with Run.open(folder, engine="local") as run:
        x, y = federation.arrays(5, "test", run.population.labels)
    accuracy, loss = evaluated(folder, 5)
    found = Runtime(bundle.path("predict.tflite"), INTERPRETER)("predict", x=x)["probabilities"]
    assert float((found.argmax(1) == y).mean()) == pytest.approx(accuracy)
    assert -np.log(found[np.arange(len(y)), y]).mean() == pytest.approx(loss, rel=1e-4)
    assert len((bundle.folder / "labels.txt").read_text().splitlines()) == found.shape[1]
    client = DeviceClient(bundle, interpreter=INTERPRETER)
    with pytest.raises(BundleError, match="takes part in no rounds"):
        client.round(client.theta, x, y)


@pytest.mark.slow
def test_a_model_by_hand(tmp_path):
    model = SplitModel(build_network("omniglot_4conv", (28, 28, 1)))
    theta, head = varied(model), random_head(model, 7)
    x, _ = examples(model, 20, 7)
    given = {"training": {"tau": 5}, "labels": list("abcdefg"), "train": (x, None)}
    bundle = export((model, theta, head), out=tmp_path / "b", **given)
    assert verify(bundle, interpreter=INTERPRETER).ok
    assert bundle.manifest["training"]["tau"] == 5 and "backbone_int8.tflite" in bundle.manifest["quality"]
    expected = model.features(theta, x).numpy()
    phi = Runtime(bundle.path("backbone.tflite"), INTERPRETER)("features", x=x)["phi"]
    assert relative(phi, expected) < 1e-5
    half = Runtime(bundle.path("backbone_float16.tflite"), INTERPRETER)("features", x=x)["phi"]
    assert relative_l2(half, expected) < 1e-2
    for given, reason in (
        ({"labels": ["a", "b"]}, "7 outputs, but there are 2"),
        ({"training": {"gamma": 1}}, "unknown in training: gamma"),
    ):
        with pytest.raises(ExportError, match=reason):
            export((model, theta, head), out=tmp_path / "c", **given)
    with pytest.raises(ExportError, match="exists already"):
        export((model, theta, head), out=tmp_path / "b")
    with pytest.raises(ExportError, match="a head on 64 features"):
        export((model, theta, head._replace(kernel=head.kernel[1:])), out=tmp_path / "c")
    with pytest.raises(ExportError, match="NaN"):
        export((model, theta, head._replace(bias=head.bias * np.nan)), out=tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir()] == ["b"]  # nothing half-made is left


def test_a_head_of_another_width_is_refused(bundle, tmp_path):
    head = SavedHead(np.zeros((200, 5), np.float32), np.zeros(5, np.float32), theta_sha256(bundle.theta()))
    (tmp_path / "head.bin").write_bytes(head_bytes(head))
    with pytest.raises(HeadError, match="5 classes on 200 features; this client has 3"):
        DeviceClient(bundle, tmp_path / "head.bin", interpreter=INTERPRETER)


def test_the_card_names_the_clients_for_apps(bundle):
    """The pages that it names exist, and no file of a bundle is code that an app would have to copy."""
    card = (bundle.folder / "MODEL_CARD.md").read_text()
    pages = re.findall(r"docs/\w+\.md", card)
    assert pages == ["docs/native.md", "docs/on_device.md"] and "C, Kotlin, Swift and Python" in card
    assert all((ROOT / page).exists() for page in pages)
    assert {path.suffix for path in bundle.folder.iterdir()} <= {".json", ".tflite", ".bin", ".txt", ".npz", ".md"}


def test_the_device_side_imports_no_tensorflow():
    code = (
        "import sys, tflite_export.device.client, tflite_export.device.verification, tflite_export.device.bench;"
        "print([m for m in ('tensorflow', 'tfpfl', 'keras', 'click') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
