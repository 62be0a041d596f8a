"""setuptools' build backend, but for installations that are not editable: these are refused.

They would lack the built-in model, the items and the page of a run.
"""

import sys

from setuptools.build_meta import *  # noqa: F403


def build_wheel(*args, **kw):
    """What `pip install .` asks for. `pip install -e .` asks for `build_editable`."""
    sys.exit("this code is read, run and changed where it stands: pip install -e .")
