"""Fixtures that audits share with the tests of studies."""

from tests.study.conftest import storage

__all__ = ["storage"]
