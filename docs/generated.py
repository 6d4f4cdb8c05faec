"""The pages that are made from code, and a hook of MkDocs.

`algorithms/NAME.md` for every entry of `ALGORITHMS`, the table in choosing.md, and `cells.md` from the papers'
experiments: `python docs/tables.py` writes them into the repository, so that they can be read there. `api.md`, from the
names that the rooms hand on, is made when the site is built.
"""

import html
import inspect
import re
import sys
from functools import cache, partial
from importlib import import_module

import numpy as np

import tfpfl
from tfpfl.algorithms import ALGORITHMS, build_algorithm
from tfpfl.algorithms.contract import ClientData
from tfpfl.cli.options import hyperparameter_texts
from tfpfl.data.population import Population
from tfpfl.runs.cost import count_work
from tfpfl.runs.protocols import protocol
from tfpfl.studies import cite
from tfpfl.studies.papers import EXPERIMENTS, FIGURES, SCALES

ROOMS = (  # what the API reference describes, in this order
    "tfpfl.checks",
    "tfpfl.data",
    "tfpfl.models",
    "tfpfl.algorithms",
    "tfpfl.algorithms.parts",
    "tfpfl.algorithms.transforms",
    "tfpfl.engines",
    "tfpfl.runs",
    "tfpfl.studies",
    "tfpfl.studies.plots",
    "tflite_export",
)
SHARED_TOO = {  # changed by the client before use, or more than its personal models show
    "fedas": "backbone",
    "fedcp": "whole model, and its policy network",
    "fedpac": "backbone; heads, client to client",
    "gpfl": "backbone, and a vector for each class",
}
SHARED = {"model": "whole model", "backbone": "backbone", "head": "head", None: "nothing"}
PREDICTS = {
    "personal": "with its personal model; *EV-all* scores this model",
    "global": "with the global model, the same for all clients; *EV-all* scores this model",
    "fine-tuned": "with the global model after some local steps, which start again from the global model whenever the "
    "client predicts; *EV-all* scores the fine-tuned model",
}


def on_config(config):
    """A place in the navigation for every algorithm."""
    for entry in config.nav:
        if "Algorithms" in entry:
            entry["Algorithms"] = [{row.title: f"algorithms/{name}.md"} for name, row in ALGORITHMS.items()]
    return config


def on_files(files, config):
    """The API reference."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Formulas have no button to copy; and what is in <details> is Markdown, as it is where the repository is read."""
    if page.file.src_uri.startswith("algorithms/"):
        markdown = markdown.replace("```text\n", "``` {.text .no-copy}\n")
    return markdown.replace("<details>", "<details markdown>")


def pages() -> dict:
    """{path in docs/: Markdown} of the pages that are made from code and lie in the repository."""
    made = {f"algorithms/{name}.md": algorithm_page(name) for name in ALGORITHMS}
    return {**made, "cells.md": cells_page()}


def algorithm_page(name: str) -> str:
    """Everything about one algorithm, as Markdown."""
    row = ALGORITHMS[name]
    own = sys.modules[inspect.unwrap(row.builder).__module__]
    table = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for option, parameter in row.hyperparameters.items():
        flag = f'<code class="nowrap">--{option.replace("_", "-")}</code>'
        kind = inspect.formatannotation(parameter.annotation).replace(" | ", " or ")
        cells = (flag, kind, f"`{parameter.default}`", argument_text(name, option))
        table.append("| " + " | ".join(cells) + " |")
    presets = [
        f"* `--preset {preset}`: " + ", ".join(f"`{option} = {value!r}`" for option, value in values.items())
        for preset, values in row.presets.items()
    ]
    (forward, backward), head_steps, *_ = work(name)
    facts = [
        f"| Head | {row.head} |",
        f"| Message | {'each client gets its own' if row.message == 'per client' else 'all clients get the same'} |",
        f"| Numbers that a client receives in a round | {row.down} |",
        f"| Numbers that a client sends in a round | {row.up} |",
        f"| A client keeps between rounds | {row.state} |",
        f"| Passes through the backbone in one visit, forward + backward | {forward:g} + {backward:g} |",
        f"| Steps on the head alone in one visit, on features that are computed already | {head_steps:g} |",
        f"| A client predicts | {PREDICTS[row.evaluates]} |",
        f"| Labels | {'classes only: ' + row.only_classes if row.only_classes else 'every [kind](../labels.md)'} |",
    ]
    for (option, value), label in row.evaluates_if.items():
        facts.append(f"| with `{option} = {value!r}` | {PREDICTS[label]} |")
    network = " --network conv_bn" if row.batch_norm else " --adapters lora:4" if row.personal else ""
    command = f"tfpfl run --algorithm {name} --dataset digits{network} --participation 0.5 --rounds 60"
    of_n = "n is the number of scales and offsets of normalization layers; " if row.batch_norm else ""
    of_n = f"n is the number of weights of {row.personal} in all adapters; " if row.personal else of_n
    of_n += "M is the number of features; " if "M" in row.down + row.up else ""
    of_n += "C is the number of classes; " if "C" in row.down + row.up else ""
    parts = [
        f"# {row.title}",
        f"{row.reference}. `--algorithm {name}`, `tfpfl.build_algorithm({name!r}, ...)`.",
        "## What it does",
        docstring_blocks(told(row.builder)),
        "## Background, and where it differs from the paper",
        docstring_blocks(own.__doc__),
        f"From `{own.__name__.replace('.', '/')}.py`.",
        "## At a glance",
        "\n".join(["| | |", "|---|---|", *facts]),
        f"b is the number of weights of the backbone, h of the head, d = b + h; {of_n}I is the number of clients. A "
        "number takes 4 bytes in float32. A visit is a client's work in one round; passes and steps are counted during "
        "a client's first visit, with the default hyperparameters.",
        "## Hyperparameters",
        "\n".join(table) if row.hyperparameters else "None.",
        *(["### Presets", "\n".join(presets)] if presets else []),
        "## Example",
        f"```\n{command}\n```",
        f"`tfpfl run --algorithm {name} --help` lists the {len(row.hyperparameters)} hyperparameters of `{name}` and "
        "all other options.",
        "## Citation",
        f"`tfpfl cite {name}` prints this.",
        f"```bibtex\n{cite.bibtex([name])}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def told(builder) -> str:
    """A builder's docstring up to its arguments: what the algorithm is, and its update rule."""
    return inspect.getdoc(builder).split("\nArgs:\n")[0]


def docstring_blocks(text: str) -> str:
    """A docstring: what is indented there stays as it is, "* " begins an item, the rest becomes paragraphs."""
    blocks = []
    for line in inspect.cleandoc(text).splitlines():
        of_item = blocks and blocks[-1][0] == "li" and line.startswith("  ")
        kind = "li" if line.startswith("* ") or of_item else "pre" if line.startswith(" ") else "p" if line else ""
        if kind and blocks and blocks[-1][0] == kind and not line.startswith("* "):
            blocks[-1][1].append(line)
        else:
            blocks.append((kind, [line]))
    made = []
    for kind, lines in blocks:
        if kind == "pre":
            made.append("```text\n" + inspect.cleandoc("\n" + "\n".join(lines)) + "\n```")
        elif kind:
            # As HTML: w_i, <g, v> and |w| are no Markdown.
            text = with_code(html.escape(" ".join(line.strip() for line in lines).removeprefix("* "), quote=False))
            text = re.sub(r"(?<![\w*])\*(\w+)\*(?!\w)", r"<em>\1</em>", text)
            made.append(f"<{kind}>{text}</{kind}>")
    return re.sub(r"<li>.*?</li>(\n\n<li>.*?</li>)*", in_list, "\n\n".join(made))


def in_list(items: re.Match) -> str:
    """Items that follow one another, as one list."""
    return "<ul>\n" + items[0].replace("\n\n", "\n") + "\n</ul>"


def with_code(text: str) -> str:
    """`name` as HTML."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def argument_text(name: str, option: str) -> str:
    """What a hyperparameter is, with links to the algorithms that the text names."""
    texts = hyperparameter_texts(name, lambda other: f"[{ALGORITHMS[other].title}]({other}.md)")
    return with_code(html.escape(texts[option], quote=False).replace("|", "\\|"))


@cache
def work(name: str):
    """Of a first visit to a small network, with the default hyperparameters."""
    model, population = small(name)
    rng = np.random.default_rng(0)
    x, y = rng.random((8, 3), np.float32), np.arange(8, dtype=np.int32) % 2
    data = ClientData(x, y, population.info(0), np.array([0, 1], np.int32))
    return count_work(partial(built, name, population), model, data)


def built(name, population, model):
    return build_algorithm(name, model, population)


@cache
def small(name: str):
    """A network with one hidden layer, with what this method needs, and six clients."""
    import keras

    row = ALGORITHMS[name]
    layers = [keras.Input((3,)), keras.layers.Dense(4, activation="tanh")]
    backbone = keras.Sequential(layers + [keras.layers.BatchNormalization()] * (row.batch_norm is not None))
    model = tfpfl.SplitModel(backbone, adapters="lora:2" if row.personal else None)
    return model, Population([8] * 6, [2] * 6, num_labels=2)


def choosing_table() -> str:
    """ALGORITHMS by what is shared, what is kept and what it costs."""
    lines = [
        "| algorithm | shared | a client keeps | predicts with | down | up | passes |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in ALGORITHMS.items():
        forward, backward = work(name).passes
        cells = (
            f"[{row.title}](algorithms/{name}.md)",
            shared(name),
            row.state,
            {"global": "shared"}.get(row.evaluates, row.evaluates),
            row.down,
            row.up,
            f"{forward:g} + {backward:g}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shared(name: str) -> str:
    """What all clients have in common: a global model, or else the part that all personal models share."""
    if name in SHARED_TOO:
        return SHARED_TOO[name]
    model, population = small(name)
    algorithm = built(name, population, model)
    if algorithm.message_per_client:
        made = algorithm.adapt is not None and algorithm.adapt.message is not None
        return "a network that makes the models" if made else "models, client to client"
    if ALGORITHMS[name].batch_norm:
        return "all but the normalization"
    if part := ALGORITHMS[name].personal:
        return f"all but {part} of the adapters"
    return SHARED["model" if algorithm.global_model is not None else algorithm.shares]


def cells_page() -> str:
    """Every cell of every table and figure of the papers: what is run, and how it is measured."""
    parts = [
        "# Cells of the papers' tables",
        "What `tfpfl reproduce` runs for every cell of every table: the method with all its hyperparameters, and how "
        "the number is measured. What the cell sets is **bold**; the rest are the method's defaults. Entries that all "
        "cells of a table share stand above it. [Reproduction](reproduction.md) has the numbers, and says what is "
        "known about the differences from the papers.",
    ]
    for name, found in {**EXPERIMENTS, **FIGURES}.items():
        sizes = [f"{scale} {size_text(found.sizes[scale])}" for scale in SCALES]
        parts += [f"## {name}: {found.title}", f"{found.source}. {found.note}".rstrip(), f"Sizes: {'; '.join(sizes)}."]
        if found.cells:
            parts += cells_table(found)
    return "\n\n".join(parts) + "\n"


def size_text(size) -> str:
    """How much is run at a scale, in words."""
    rounds = f"{size.rounds} round{'s' if size.rounds != 1 else ''}"
    return f"{rounds}, {size.seeds} seed{'s' if size.seeds != 1 else ''}" + (f" ({size.said})" if size.said else "")


def cells_table(found) -> list:
    """The entries that all cells share, and a row for every cell."""
    shared = {k: v for k, v in found.cells[0].config.items() if all(c.config.get(k, ...) == v for c in found.cells)}
    shared = {k: v for k, v in shared.items() if k not in ("algorithm", "hyperparameters")}
    lines = ["| column | method | entries of its own | hyperparameters | protocol |", "|---|---|---|---|---|"]
    for cell in found.cells:
        own = {k: v for k, v in cell.config.items() if k not in {*shared, "algorithm", "hyperparameters"}}
        title = f"[{ALGORITHMS[cell.method].title}](algorithms/{cell.method}.md)"
        measured = cell.protocol or getattr(found, "protocol", "")
        measured = f'<span title="{protocol(measured)}">`{measured}`</span>' if measured else "-"
        method = title + (f", {cell.label}" if cell.label else "")
        cells = (cell.column, method, entries(own), hyperparameters(cell), measured)
        lines.append("| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |")
    return [f"All cells: {entries(shared)}.", "\n".join(lines)]


def entries(config: dict) -> str:
    """Entries of a configuration in words."""
    return ", ".join(f"{name} {plain(value)}" for name, value in config.items()) or "-"


def plain(value) -> str:
    """A value without quotes and braces."""
    if isinstance(value, dict):
        return "(" + ", ".join(f"{k} {plain(v)}" for k, v in value.items()) + ")" if value else "-"
    return " to ".join(map(str, value)) if isinstance(value, tuple) else "default" if value is None else str(value)


def hyperparameters(cell) -> str:
    """All hyperparameters of a cell's method; those that the cell sets are bold."""
    given = cell.config["hyperparameters"]
    defaults = {name: p.default for name, p in ALGORITHMS[cell.method].hyperparameters.items()}
    all_of_it = defaults | given
    return ", ".join(f"**{k} {v}**" if k in given else f"{k} {v}" for k, v in all_of_it.items())


def api_page() -> str:
    """The public names of every room, each as mkdocstrings has it, and once."""
    parts = [
        "# API reference",
        "Import a name from `tfpfl` or from its room, as in `from tfpfl.runs import Run`. The files inside a room may "
        "change. Rooms stand in their order: each imports only those before it.",
        "## tfpfl",
        "These names can be imported from `tfpfl` itself. They are loaded when they are first used, so that "
        "`import tfpfl` takes no time.",
        "\n".join(["| name | room |", "|---|---|", *map(root_name, sorted(tfpfl.__all__, key=str.lower))]),
    ]
    for name in ROOMS:
        room = import_module(name)
        parts += [f"## {name}", docstring_blocks(room.__doc__)]
        for member in sorted(room.__all__, key=str.lower):
            parts += described(room, member)
    parts += ["## tfpfl.models.tree", "::: tfpfl.models.tree\n    options: {show_root_heading: false}"]
    return "\n\n".join(parts) + "\n"


def root_name(name: str) -> str:
    """A row of the table of `tfpfl`'s own names: the name, which leads to its description, and its room."""
    room = f"tfpfl.{tfpfl._HOME[name]}"
    if name == "ALGORITHMS":  # described by hand, so that it is an anchor of the page and no cross-reference
        return f"| [`{name}`](#{room}.{name}) | `{room}` |"
    return f"| [`{name}`][{room}.{name}] | `{room}` |"


def described(room, name: str) -> list:
    """The description of a public name, as Markdown."""
    if name == "ALGORITHMS":  # its value would fill pages
        return [
            f"### ALGORITHMS {{ #{room.__name__}.ALGORITHMS }}",
            "The list of algorithms, `{name: Method}`: see [Choosing an algorithm](choosing.md).",
        ]
    return [f"::: {room.__name__}.{name}", *fields_of(getattr(room, name))]


def fields_of(value) -> list:
    """A table of a class's fields, whose shapes and units are comments, which mkdocstrings leaves out."""
    if not inspect.isclass(value) or not getattr(value, "__annotations__", None):
        return []
    field = r"^    (\w+): ([^#=\n]+?)(?: = ([^#\n]+?))?(?:  # (.*))?$"
    rows = re.findall(field, inspect.getsource(value), re.MULTILINE)
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, kind, default, text in rows:
        cells = (f"`{name}`{{ .nowrap }}", code(kind), code(default), with_code(html.escape(text, quote=False)))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return ["\n".join(lines)] if rows else []


def code(text: str) -> str:
    """As HTML, in which a cell of a table may have a |."""
    return f"<code>{html.escape(text)}</code>".replace("|", "&#124;") if text else ""
