"""A study from one file: methods, data sets, seeds and a search for hyperparameters; see docs/studies.md.

file.py     reads the file and checks every entry
plan.py     what has to be run for one method on one data set, and what its search has found
pool.py     runs it, several processes at a time
worker.py   one run, in its own process
results.py  the tables and files
run.py      `run_study`, which does all of this
"""
