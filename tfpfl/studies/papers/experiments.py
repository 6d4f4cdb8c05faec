"""All experiments of the papers, by name. Those of a paper are in its own file."""

from tfpfl.studies.papers import fedamp_tables, pflego_tables, pgfed_tables

EXPERIMENTS = pflego_tables.EXPERIMENTS | pgfed_tables.EXPERIMENTS | fedamp_tables.EXPERIMENTS
