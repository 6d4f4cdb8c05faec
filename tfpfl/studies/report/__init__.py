"""Compares runs in one HTML file: tables, plots, protocols, costs, configurations and commands.

The file is complete: it contains its style sheet, and plots are SVG with letters as paths. It loads nothing from other
files or from a network. `page.html` is a Jinja template, which escapes every text that it is given;
control characters and marks that turn the direction of reading are written as their codes.
"""

from tfpfl.studies.comparison import BASELINES
from tfpfl.studies.report.page import ReportError, render, write_report

__all__ = ["BASELINES", "ReportError", "render", "write_report"]
