"""Rewrites the tables and pages that come from code: `python docs/tables.py`. A test checks them.

These are the README's table of algorithms, the table in choosing.md, a page for each algorithm, and cells.md.
"""

import re
import runpy
from pathlib import Path

from tfpfl.algorithms import ALGORITHMS

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
LEGEND = (
    "down, up: numbers a client receives and sends in a round; b the backbone, h the head, d = b + h, n those "
    "weights of the backbone that stay with the client, M features, I the clients of the population, C the classes "
    "of the data set, candidates a hyperparameter. A count or another single number is left out. *head*: personal "
    "heads have an output for each class of the client, shared ones for each class of the data set, whoever keeps "
    "them. Where the message is per client, the server keeps d numbers or more for every client; in FedPAC a head, "
    "in pFedHN a short vector."
)


def algorithms() -> str:
    """ALGORITHMS as Markdown."""
    lines = [
        "| `--algorithm` | | head | message | a client keeps | down | up | reference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in ALGORITHMS.items():
        title = f"[{row.title}](docs/algorithms/{name}.md)"
        cells = (f"`{name}`", title, row.head, row.message, row.state, row.down, row.up, short(row.reference))
        lines.append("| " + " | ".join(cells) + " |")
    *most, last = [row.title for row in ALGORITHMS.values() if row.only_classes]
    classes = f"{', '.join(most)} and {last}, which need" if most else f"{last}, which needs"
    needs = f"All train heads of every [kind of labels](docs/labels.md), except for {classes} classes."
    lines += ["", LEGEND, "", needs]
    return "\n".join(lines)


def short(reference: str) -> str:
    """'Nikoloutsopoulos et al., arXiv 2202.09848' of a reference with all authors and the title."""
    authors, colon, rest = reference.partition(": ")
    if not colon:
        return reference
    said, found_in, authors = authors.rpartition(" in ")  # what it is besides, as of a baseline
    first, *others = authors.split(", ")
    return f"{said}{found_in}{first}{' et al.' if others else ''}, {rest.rpartition(', ')[2]}"


def with_section(text: str, name: str, content: str) -> str:
    """The text with what stands between <!-- name --> and <!-- /name --> replaced."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    return re.sub(pattern, lambda m: f"{m[1]}{content}\n{m[2]}", text, flags=re.DOTALL)


def rewrite(path: Path, name: str, content: str) -> None:
    """Replaces a section of a file."""
    text = path.read_text(encoding="utf-8")
    path.write_text(with_section(text, name, content), encoding="utf-8")


if __name__ == "__main__":
    generated = runpy.run_path(str(DOCS / "generated.py"))
    rewrite(README, "algorithms", algorithms())
    rewrite(DOCS / "choosing.md", "table of algorithms", generated["choosing_table"]())
    (DOCS / "algorithms").mkdir(exist_ok=True)
    for old in (DOCS / "algorithms").glob("*.md"):
        old.unlink()
    for path, content in generated["pages"]().items():
        (DOCS / path).write_text(content, encoding="utf-8")
