"""Execution: where trials run."""
