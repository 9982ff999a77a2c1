"""Stages: noised releases about a table, made before the arms."""
