"""Mistakes planted in what the guarantee rests on, and the tests that must find them.

`make mutants` (or ``python -m tests.mutants [words]``) plants one after the other in a copy of the
project and runs the tests named beside it; it fails if one of them is not found. `table` lists them.
"""
