"""Refuse an installation that is not editable: it would lack the model, the items and the page."""

import sys

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class RefusedWheel(bdist_wheel):
    """`pip install .` builds a wheel; `pip install -e .` does not."""

    def run(self):
        sys.exit("this code is read, run and changed where it stands: pip install -e .")


setup(cmdclass={"bdist_wheel": RefusedWheel})
