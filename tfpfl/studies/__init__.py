"""Studies: several runs side by side, or one run looked at afterwards.

A name is imported when it is first used. So a comparison does not wait for the import of what only a report needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfpfl.studies.battery import check_algorithm as check_algorithm
    from tfpfl.studies.comparison import compare_runs as compare_runs
    from tfpfl.studies.comparison import rows as rows
    from tfpfl.studies.few_shots import shot_curve as shot_curve
    from tfpfl.studies.new_clients import adapt_clients as adapt_clients
    from tfpfl.studies.new_clients import adapt_new_clients as adapt_new_clients
    from tfpfl.studies.out_of_person import calibration as calibration
    from tfpfl.studies.out_of_person import exchange as exchange
    from tfpfl.studies.paper_tables import PaperTable as PaperTable
    from tfpfl.studies.paper_tables import latex as latex
    from tfpfl.studies.paper_tables import paper_table as paper_table
    from tfpfl.studies.records import Record as Record
    from tfpfl.studies.report import write_report as write_report
    from tfpfl.studies.run_groups import RunGroup as RunGroup
    from tfpfl.studies.run_groups import group_runs as group_runs
    from tfpfl.studies.run_groups import paired as paired
    from tfpfl.studies.search import search_hyperparameters as search_hyperparameters
    from tfpfl.studies.study.results import StudyResults as StudyResults
    from tfpfl.studies.study.run import run_study as run_study

# name -> the module that defines it; a test holds this against the imports above
_HOME = {
    "check_algorithm": "battery",
    "compare_runs": "comparison",
    "rows": "comparison",
    "shot_curve": "few_shots",
    "adapt_clients": "new_clients",
    "adapt_new_clients": "new_clients",
    "calibration": "out_of_person",
    "exchange": "out_of_person",
    "PaperTable": "paper_tables",
    "latex": "paper_tables",
    "paper_table": "paper_tables",
    "Record": "records",
    "write_report": "report",
    "RunGroup": "run_groups",
    "group_runs": "run_groups",
    "paired": "run_groups",
    "search_hyperparameters": "search",
    "StudyResults": "study.results",
    "run_study": "study.run",
}
__all__ = list(_HOME)


if not TYPE_CHECKING:  # to a type checker every name would exist, a typo too

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'tfpfl.studies' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
        value = getattr(import_module(f"tfpfl.studies.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
