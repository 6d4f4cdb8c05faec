"""Versions of the methods in NumPy, float64, written by somebody who had not read tfpfl's files of these methods.

Nothing here imports tfpfl, TensorFlow or Keras. Every file begins with the paper's rule and with what was decided
where the paper is silent. The papers' full texts were not at hand: the rules are the papers' as the writer knows
them, and facts were looked up in the authors' code. So equations have no numbers, but for GPFL, whose authors'
poster has them.

All take the clients' examples [(x, y), ...], the first weights, and the cohorts, a list of client numbers for each
round. They give a list with one `Round` for each round. `test_independent.py` compares tfpfl's methods with them.
"""
