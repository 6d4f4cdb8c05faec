"""A table as papers have it: methods by data sets, mean ± interval in one cell, the best in bold.

`paper_table` makes it from the rows of `tfpfl.studies.comparison.rows`; `latex`, `markdown` and `terminal` write it.
"""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tabulate import LATEX_ESCAPE_RULES

from tfpfl.checks import InvalidArgument, one_line, unknown
from tfpfl.data.kinds import ScoreName
from tfpfl.runs import files
from tfpfl.runs.metrics import SCORES, direction_of, in_unit, score_of
from tfpfl.runs.protocols import EV_ALL, Protocol, as_protocol
from tfpfl.studies.comparison import columns_for, columns_named, shown
from tfpfl.studies.fitted_table import FittedTable, text
from tfpfl.studies.run_groups import SIDE_WORDS, span

SCORE = ("score",)  # the column of the score, whatever its name is
_OF_SCORES = (*SIDE_WORDS, "EV-", "worst ")  # what the names of columns begin with whose best is that of the score
_HIGHER = ("Jain", "gain over ")
_LOWER = ("std", "Gini", "worse than ", "bytes", "passes", "GFLOP", "s a round")
_BEST = "Bold: the best mean of a column, and every mean that lies within its interval."
_SYMBOLS = {
    **{"±": r"$\pm$", "×": r"$\times$", "≥": r"$\geq$", "≤": r"$\leq$", "–": "--", "—": "---", "…": r"\ldots{}"},
    **{"µ": r"$\mu$", "²": "$^2$", "³": "$^3$", "−": "$-$", "°": r"$^\circ$", "\u00a0": "~"},
}


class PaperCell(NamedTuple):
    """A cell of the table: the mean and half its interval as texts, and whether it is among the best."""

    mean: str
    half: str = ""
    best: bool = False


class PaperTable(NamedTuple):
    """A table of methods by data sets.

    Attributes:
        data: the titles of the data sets; [''] if there is one without a title.
        columns: the columns of each data set.
        methods: the titles of the methods, one row each.
        cells: for each method, the cells of all columns of the first data set, then of the second, ...
        caption: what the numbers are, in whole sentences.
    """

    data: list[str]
    columns: list[str]
    methods: list[str]
    cells: list[list[PaperCell]]
    caption: str


def paper_table(
    rows: Mapping[str, Sequence[dict]],
    columns: Sequence[str] = SCORE,
    protocol: Protocol | str = EV_ALL,
    *,
    more: str = "",
) -> PaperTable:
    """Makes a table of methods by data sets.

    The best mean of a column is bold. So is every other mean that lies within the interval of the best one, because
    these data do not tell them apart. Where fewer is better, as for bytes, the smallest is the best. A metric says its
    direction itself. Columns such as p-values have no best.

    Args:
        rows: {title of a data set: its rows from `tfpfl.studies.comparison.rows`}. A method that a data set lacks has
            '-' there.
        columns: which columns of the rows the table has, such as 'score' (that of the score, under its own name, such
            as 'accuracy') and 'worst 10 %'. The interval of a column is in its cells. Where some clients had never
            taken part, 'seen' and 'never seen' follow the score.
        protocol: how the scores were measured, or its name.
        more: sentences that the caption ends with.

    Raises:
        InvalidArgument: no rows, no columns, or a column that such rows never have. One that only these rows lack, such
            as 'seen' where all clients had taken part, has '-' in its cells.
    """
    protocol = as_protocol(protocol)
    found = [row for some in rows.values() for row in some]
    if not found or not columns:
        raise InvalidArgument("a table needs at least one row and one column")
    known = [name for name in dict.fromkeys(name for row in found for name in row) if not name.endswith(" ±")]
    score = score_of(found[0])
    if any(score_of(row) != score for row in found):
        raise InvalidArgument(
            "the rows are of different kinds, whose scores cannot stand in one table: make two tables"
        )
    columns = columns_named(columns, score.name)
    for column in columns:
        if column not in (*known[1:], *columns_for(score)):
            raise InvalidArgument(unknown("column", column, known[1:]))
    if score.name in columns and set(SIDE_WORDS) <= set(known):
        rest = [name for name in columns if name not in SIDE_WORDS]
        after = rest.index(score.name) + 1
        columns = [*rest[:after], *SIDE_WORDS, *rest[after:]]
    methods = list(dict.fromkeys(row["algorithm"] for row in found))
    cells: list[list[PaperCell]] = [[] for _ in methods]
    for some in rows.values():
        by_method = {row["algorithm"]: row for row in some}
        for column in columns:
            for line, cell in zip(cells, _cells(column, [by_method.get(m, {}) for m in methods], score), strict=True):
                line.append(cell)
    caption = _caption(found, columns, protocol, score, any(cell.best for line in cells for cell in line))
    return PaperTable(list(rows), list(columns), methods, cells, f"{caption} {more}".strip())


def _cells(column: str, rows: Sequence[dict], score: ScoreName) -> list[PaperCell]:
    values = [row.get(column, math.nan) for row in rows]
    halves = [row.get(f"{column} ±", math.nan) for row in rows]
    texts = [shown(column, value, score) for value in values]
    sign = _direction(column, score)
    numbers = [sign * v if sign and not isinstance(v, str) and v == v else -math.inf for v in values]
    best = max(numbers, default=-math.inf)
    at = numbers.index(best) if best > -math.inf else None  # numbers that look equal are equally good to a reader
    reach = 0.0 if at is None or not math.isfinite(halves[at]) else halves[at]
    is_best = [
        at is not None and n > -math.inf and (n >= best - reach or t == texts[at])
        for n, t in zip(numbers, texts, strict=True)
    ]
    return [
        PaperCell(text, shown(column, half, score) if math.isfinite(half) else "", bold)
        for text, half, bold in zip(texts, halves, is_best, strict=True)
    ]


def _direction(column: str, score: ScoreName) -> int:
    """1 if more is better, -1 if less is, 0 if neither."""
    if column not in SCORES and (direction := direction_of(column)):  # a metric's own, whatever it is called
        return {"max": 1, "min": -1}.get(direction, 0)
    if column in SCORES or column.startswith(_OF_SCORES):
        return 1 if SCORES.get(column, score).larger_is_better else -1
    return 1 if column.startswith(_HIGHER) else -1 if column.startswith(_LOWER) else 0


def _caption(rows: Sequence[dict], columns: Sequence[str], protocol: Protocol, score: ScoreName, best: bool) -> str:
    words = [f"{in_unit(score, title=True)}: {protocol}." if score.name in columns else ""]
    seeds = sorted({row["seeds"] for row in rows})
    if any(f"{column} ±" in row for row in rows for column in columns):
        several = span(seeds)
        words.append(
            "±: half the 95 % interval over the clients of one seed (Student's t)."
            if seeds == [1]
            else f"±: half the 95 % interval over {several} seeds (Student's t)."
            if seeds[0] > 1
            else f"±: half the 95 % interval, over the seeds where there are several ({several} seeds), otherwise over "
            "clients."
        )
    else:
        words.append(f"Means over {seeds[-1]} seeds." if seeds == seeds[-1:] and seeds[-1] > 1 else "")
    words.append(_BEST if best else "")
    return " ".join(filter(None, words))


def latex(table: PaperTable, label: str = "tab:results") -> str:
    r"""The table as LaTeX, to be read with \input. It needs the package booktabs.

    Names and captions are escaped, so that LaTeX sees no command in them. A letter that pdflatex may lack, such as of
    Chinese, is left as it is; then the file's first lines say to use lualatex or xelatex.

    Args:
        table: from `paper_table`.
        label: the name for \ref.
    """
    width, several = len(table.columns), len(table.columns) > 1
    titles = [_tex(name) for name in table.data]
    if several or titles == [""]:
        second = [_tex(name) for _ in titles for name in table.columns]
    else:
        second = titles
    lines = [r"\begin{tabular}{l" + "c" * width * len(titles) + "}", r"\toprule"]
    if several and titles != [""]:
        lines.append(" & ".join(["", *(rf"\multicolumn{{{width}}}{{c}}{{{name}}}" for name in titles)]) + r" \\")
        ends = ((2 + i * width, 1 + (i + 1) * width) for i in range(len(titles)))
        lines.append(" ".join(rf"\cmidrule(lr){{{a}-{b}}}" for a, b in ends))
    lines += [" & ".join(["Method", *second]) + r" \\", r"\midrule"]
    for method, cells in zip(table.methods, table.cells, strict=True):
        name = _tex(method)
        if name.lstrip()[:1] in ("[", "*"):
            name = "{}" + name  # otherwise the end of the line before would take it for its own argument
        lines.append(" & ".join([name, *map(_tex_cell, cells)]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    body = "\n".join(lines)
    caption = _tex(table.caption)
    hint = "" if _for_pdflatex(body + caption) else "% It has letters that pdflatex lacks: use lualatex or xelatex.\n"
    return (
        "% Written by tfpfl. Read it with \\input; the preamble needs \\usepackage{booktabs}.\n"
        f"{hint}\\begin{{table}}\n\\centering\n\\caption{{{caption}}}\n\\label{{{label}}}\n\\medskip\n{body}\n\\end{{table}}\n"
    )


def _tex_cell(cell: PaperCell) -> str:
    mean = rf"\textbf{{{_tex(cell.mean)}}}" if cell.best else _tex(cell.mean)
    return mean + (rf" $\pm$ {_tex(cell.half)}" if cell.half else "")


def _tex(text: str) -> str:
    return "".join(_tex_letter(c) for c in one_line(text))


def _tex_letter(c: str) -> str:
    if c in LATEX_ESCAPE_RULES:
        return LATEX_ESCAPE_RULES[c]
    if c in _SYMBOLS:
        return _SYMBOLS[c]
    size, _, name = unicodedata.name(c, "").removeprefix("GREEK ").partition(" LETTER ")
    name = name.lower().replace("lamda", "lambda")
    if size == "SMALL" and name in _GREEK:
        return rf"$\{name}$"
    if size == "CAPITAL" and name in _CAPITALS:
        return rf"$\{name.capitalize()}$"
    return c


_CAPITALS = ("gamma", "delta", "theta", "lambda", "xi", "pi", "sigma", "upsilon", "phi", "psi", "omega")
_GREEK = (*_CAPITALS, *("alpha beta epsilon zeta eta iota kappa mu nu rho tau chi".split()))


def _for_pdflatex(text: str) -> bool:
    """Whether pdflatex, without packages for languages, has all letters of the text."""
    return all(ord(c) < 0x100 and c not in "«»ÐÞðþ" for c in text)


def markdown(table: PaperTable) -> str:
    """The table as Markdown, with its caption below."""
    head = _head(table)
    lines = [["method", *head], ["---", *("---:" for _ in head)]]
    for method, cells in zip(table.methods, table.cells, strict=True):
        lines.append([files.markdown(method), *(_text(cell, "**") for cell in cells)])
    body = [" | ".join(["", *line, ""]).strip() for line in [[*map(files.markdown, lines[0])], *lines[1:]]]
    return "\n".join(body) + f"\n\n{files.markdown(table.caption)}\n"


def terminal(table: PaperTable, title: str = "") -> FittedTable:
    """The table for a terminal, with its caption below."""
    made = FittedTable(title=text(title), caption=text(table.caption))
    made.add_columns("method")
    made.add_columns(*map(text, _head(table)), justify="right")
    for method, cells in zip(table.methods, table.cells, strict=True):
        made.add_row(text(method), *(f"[bold]{_text(cell)}[/]" if cell.best else _text(cell) for cell in cells))
    return made


def _head(table: PaperTable) -> list[str]:
    if table.data == [""]:
        return table.columns
    if len(table.columns) == 1:
        return table.data
    return [f"{name}: {column}" for name in table.data for column in table.columns]


def _text(cell: PaperCell, bold: str = "") -> str:
    mean = f"{bold}{cell.mean}{bold}" if cell.best else cell.mean
    return mean + (f" ± {cell.half}" if cell.half else "")
