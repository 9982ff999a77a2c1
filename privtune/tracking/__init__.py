"""Trackers: where releases are shown. They accept releases and nothing else."""
