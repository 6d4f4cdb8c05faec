"""Writes the text of a bundle: the model card."""

from tfpfl.data.arrays import LISTED, first_of
from tfpfl.runs.files import markdown


def _whose(about, is_classes: bool) -> list[str]:
    """The line of the card that says whom the head is for; none if a client of its own method never took part."""
    if about.get("shared"):
        return ["* All clients share this model: nothing of it is this client's own."]
    if about.get("took_part") is False:
        return []
    if not is_classes:
        return ["* The head was fitted to one client's examples, and is not for others."]
    return [
        "* The head was fitted to one client's examples: it knows that client's classes only, and is not for others."
    ]


def _of_outputs(model) -> str:
    """How many outputs there are, and of what kind."""
    k = model["num_classes"]
    if "kind" not in model:
        return f"{k} class" if k == 1 else f"{k} classes"
    return f"{k} numbers of the kind {model['kind']}" if k > 1 else f"a number of the kind {model['kind']}"


def _of_trunk(trunk, model) -> list[str]:
    """The line of the card that says what is frozen."""
    if trunk is None:
        return []
    shape = " x ".join(map(str, model["example_shape"]))
    return [
        f"* The lower layers are frozen ({trunk['file']}): an app computes their output, float32 {shape}, once for "
        "each example, keeps it, and gives it to all other programs but predict.tflite."
    ]


def _of_arrays(inputs) -> str:
    """What of an example is which array."""
    each = [
        f"{markdown(a['name'])} ({' x '.join(map(str, a['shape']))}{', whole numbers' * (a['dtype'] == 'int32')}) from "
        f"{a['offset']} on"
        for a in inputs["arrays"]
    ]
    return "several arrays, row-major, one after the other: " + ", ".join(each)


def _columns(names) -> str:
    """The names of a table's columns in the order in which a model takes them."""
    all_of_them = " (manifest.json has all)" if len(names) > LISTED else ""
    return f"{first_of(list(map(markdown, names)))}{all_of_them}, in this order"


def model_card(manifest: dict, personal) -> str:
    """The model card, in Markdown."""
    model, training, about = manifest["model"], manifest["training"], personal.about
    trunk = manifest.get("trunk")
    shape = " x ".join(map(str, trunk["raw_shape"] if trunk else model["example_shape"]))
    name = about.get("client_name", str(about["client"]))
    of = "a client" if about["client"] is None else f"client {about['client']}"  # of arrays it is not known
    lines = [f"# Model of {of}" + (f" ({markdown(name)})" if name != str(about["client"]) else "")]
    lines += [""]
    if about.get("algorithm"):
        took = "took part in training" + (f", first in round {about['first_round']}" if about["first_round"] else "")
        if not about["took_part"]:
            took = f"never took part: its model is the one that {about['algorithm']} gives to such a client"
            took = "may have taken part or not: the run does not show it" if about["took_part"] is None else took
        lines += [
            f"* Trained by {about['algorithm']} on {markdown(about['dataset'])} (federation "
            f"{about['federation_hash'][:12]}), as it is after round {about['round']}; this client has "
            f"{about['num_examples']} training examples and {took}."
        ]
    pre = manifest["preprocessing"]
    lines += [
        f"* Input: {model.get('example_dtype', 'float32')} {shape}"
        + (f": {_of_arrays(model['inputs'])}" if "inputs" in model else "")
        + (f", the columns {_columns(pre['columns'])}" if "columns" in pre else "")
        + (f", x = raw * {pre['scale']} + {pre['shift']} of {pre['stored_dtype']}" if "scale" in pre else "")
        + f". Output: {_of_outputs(model)}, in the order of labels.txt: "
        f"{', '.join(map(markdown, personal.labels))}.",
        *_of_trunk(trunk, model),
        f"* {model['num_backbone_weights']:,} weights in the backbone; {model['num_features']} features; "
        f"{(model['num_features'] + 1) * model['num_classes']:,} weights in the head.",
        "* On the device it can predict and fit its head"
        + (
            f", and take part in PFLEGO rounds (tau {training['tau']}, beta {training['beta']}, rho {training['rho']})."
            if training["rounds"]
            else "; it was exported without rounds."
        )
        + " The clients in C, Kotlin, Swift and Python that come with tfpfl do it: see its docs/native.md and "
        "docs/on_device.md.",
    ]
    if training["rounds"]:
        lines += [
            "* What leaves the device in a round: the gradient of theta and the number of examples. A gradient can "
            "tell about the examples that it was computed on: it is not anonymous, and no differential privacy is "
            "applied."
        ]
    lines += _whose(about, "kind" not in model)
    if manifest["quality"]:
        lines += [
            "",
            "| file | precision | centred cosine | head agreement | accuracy | measured on |",
            "|---|---|---|---|---|---|",
        ]
    for name, q in manifest["quality"].items():
        agreement, accuracy = ("-" if q[n] is None else f"{100 * q[n]:.1f} %" for n in ("head_agreement", "accuracy"))
        lines.append(
            f"| {name} | {q['precision']} | {q['centred_cosine']:.5f} | {agreement} | {accuracy} "
            f"| {q['examples']} examples: {q['on']} |"
        )
    tested = ", ".join(manifest["runtimes"]["tested"])
    lines += [
        "",
        f"Runtimes whose numbers are tested against TensorFlow: {tested}, on x86-64; no phone was used.",
    ]
    return "\n".join(lines) + "\n"
