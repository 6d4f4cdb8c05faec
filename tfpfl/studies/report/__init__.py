"""A comparison of runs as one HTML file: tables, pictures, protocols, costs, configurations and commands.

The file needs nothing else: its style is in it, pictures are SVG with letters as paths, and nothing is loaded from
anywhere. `page.html` is a Jinja template that escapes all it is given.
"""

from tfpfl.studies.report.page import BASELINES, ReportError, render, write_report

__all__ = ["BASELINES", "ReportError", "render", "write_report"]
