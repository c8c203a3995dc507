"""The package is described in pyproject.toml; this is for tools that look here."""

from setuptools import setup

setup()
