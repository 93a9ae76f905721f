"""The examples in docstrings and in the how-to run as they stand."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import shardwise.parallel

MODULES = ["shardwise.plans"] + [
    found.name for found in pkgutil.iter_modules(shardwise.parallel.__path__, "shardwise.parallel.")
]
HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "howto" / "parallel.md"


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_how_to():
    assert doctest.testfile(str(HOW_TO), module_relative=False).failed == 0
