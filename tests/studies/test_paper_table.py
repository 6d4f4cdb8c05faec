"""Tables as papers have them: every cell against the rows it is made of, and LaTeX that compiles."""

import math
import re
import shutil
import subprocess

import pytest
from rich.console import Console

from helpers.made_records import made
from tfpfl.runs.protocols import EV_LOCAL
from tfpfl.studies import comparison
from tfpfl.studies.paper_tables import latex, markdown, paper_table, terminal

HOSTILE = r"50 % & $x$_1^2 #{~\input{/etc/passwd}} <é> θ ± 3×2"


def row(algorithm, accuracy, half=math.nan, seeds=3, **more) -> dict:
    return {"algorithm": algorithm, "seeds": seeds, "accuracy": accuracy, "accuracy ±": half} | more


def best(rows, column="accuracy") -> list:
    """The methods whose cell is bold."""
    table = paper_table({"": rows}, [column])
    return [method for method, (cell,) in zip(table.methods, table.cells, strict=True) if cell.best]


def test_cells_are_those_of_the_comparison():
    """Two data sets and two columns, from made runs: the mean over seeds and Student's interval."""
    runs = {
        name: [made(a, seed, good=good) for a in ("pflego", "local") for seed in (0, 1)]
        for name, good in (("easy", 0.6), ("hard", 0.3))
    }
    rows = {name: comparison.rows(records) for name, records in runs.items()}
    table = paper_table(rows, ["accuracy", "EV-local"])
    assert (table.data, table.methods) == (["easy", "hard"], ["PFLEGO", "Local"])
    for m, cells in enumerate(table.cells):
        found = [(cell.mean, cell.half) for cell in cells]
        assert found == [
            (f"{rows[d][m][c]:.2f}", f"{rows[d][m][c + ' ±']:.2f}")
            for d in ("easy", "hard")
            for c in ("accuracy", "EV-local")
        ]
    assert "half the 95 % interval over 2 seeds (Student's t)" in table.caption
    one = comparison.rows([runs["easy"][0]])
    assert "over the clients of one seed" in paper_table({"": one}, protocol=EV_LOCAL).caption
    mixed = paper_table({"": [row("A", 1.0, 0.1, seeds=1), row("B", 2.0, 0.1)]}).caption
    assert "over the seeds where there are several (1 to 3 seeds), otherwise over clients" in mixed


def test_bold_is_the_best_and_what_its_interval_holds():
    assert best([row("A", 90.0, 1.0), row("B", 89.1, 9.0), row("C", 88.9, 9.0)]) == ["A", "B"]
    assert best([row("A", 90.0), row("B", 89.99)]) == ["A"]  # one seed and no interval
    assert best([row("A", 90.001, 0.0), row("B", 89.999, 0.0), row("C", 89.9, 0.0)]) == ["A", "B"]  # both are 90.00
    assert best([row("A", math.nan), row("B", 10.0, 2.0)]) == ["B"]
    assert best([row("A", math.nan), row("B", math.nan)]) == []
    costs = [row("A", 1.0, passes=2.0, **{"p (Local)": 0.1}), row("B", 2.0, passes=100.0, **{"p (Local)": 0.2})]
    assert best(costs, "passes") == ["A"] and best(costs, "p (Local)") == []
    assert "Bold" not in paper_table({"": costs}, ["p (Local)"]).caption


def test_the_best_of_a_metric_follows_its_direction():
    rows = [row("A", 90.0, ece=5.0, macro_f1=70.0), row("B", 80.0, ece=3.0, macro_f1=60.0)]
    assert best(rows, "ece") == ["B"] and best(rows, "macro_f1") == ["A"]
    rows = [r | {"ece ±": 2.5} for r in rows]
    assert best(rows, "ece") == ["A", "B"]  # within the interval of the best
    assert paper_table({"": rows}, ["ece"]).cells[0][0][:2] == ("5.00", "2.50")


def test_a_method_that_a_data_set_lacks_has_a_dash():
    table = paper_table({"one": [row("A", 1.0)], "two": [row("B", 2.0)]})
    assert [[cell.mean for cell in cells] for cells in table.cells] == [["1.00", "-"], ["-", "2.00"]]


def test_columns_that_are_not_there():
    with pytest.raises(ValueError, match="unknown column 'acuracy'; did you mean 'accuracy'"):
        paper_table({"": [row("A", 1.0)]}, ["acuracy"])
    assert paper_table({"": [row("A", 1.0)]}, ["never seen"]).cells[0][0].mean == "-"  # these rows have none
    with pytest.raises(ValueError, match="unknown column 'algorithm'"):
        paper_table({"": [row("A", 1.0)]}, ["algorithm"])
    with pytest.raises(ValueError, match="at least one row and one column"):
        paper_table({"x": []})


def hostile_table():
    rows = [row(HOSTILE, 91.234, 1.5, std=3.0), row("[Local]", 89.0, 0.5, std=4.0)]
    return paper_table({HOSTILE: rows, "b|c": rows}, ["accuracy", "std"])


def test_latex_has_the_shape_of_a_booktabs_table():
    """As many cells in each line as columns; names are escaped; the caption says what the numbers are."""
    text = latex(hostile_table())
    body = text[text.index(r"\toprule") : text.index(r"\bottomrule")]
    lines = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 4 and r"\begin{tabular}{lcccc}" in text
    assert [len(re.findall(r"(?<!\\)&", line)) for line in lines] == [2, 4, 4, 4]
    assert r"\cmidrule(lr){2-3} \cmidrule(lr){4-5}" in body
    assert r"\textbf{91.23} $\pm$ 1.50" in lines[2] and r"89.00 $\pm$ 0.50" in lines[3]
    assert r"\input{/" not in text and r"50 \% \& \$x\$\_1\^{}2 \#\{\textasciitilde{}\textbackslash{}input" in text
    assert r"$\theta$ $\pm$ 3$\times$2" in text
    assert "xelatex" not in text and "xelatex" in latex(paper_table({"中": [row("A", 1.0)]}))


def test_a_name_does_not_become_an_argument_of_the_line_before():
    text = latex(paper_table({"": [row("A [x]", 1.0), row("[ours] B", 2.0), row("*C", 3.0)]}))
    assert "\nA [x] & " in text and "\n{}[ours] B & " in text and "\n{}*C & " in text


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_pdflatex_compiles_it(tmp_path):
    (tmp_path / "table.tex").write_text(latex(hostile_table()), encoding="utf-8")
    (tmp_path / "paper.tex").write_text(
        "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\\input{table}\\end{document}\n"
    )
    done = subprocess.run(
        ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "paper.tex"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "paper.pdf").stat().st_size > 10_000 and "Missing character" not in done.stdout


def test_markdown_and_the_terminal_have_the_same_cells():
    table = hostile_table()
    lines = markdown(table).splitlines()[:4]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert "| **91.23** ± 1.50 |" in lines[2] and "| 89.00 ± 0.50 |" in lines[3]
    console = Console(width=200, record=True, file=open("/dev/null", "w"))
    console.print(terminal(table, "[red]title"))
    shown = console.export_text()
    assert "91.23 ± 1.50" in shown and "[red]title" in shown and r"\input{/etc/passwd}" in shown
