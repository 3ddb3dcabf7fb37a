"""Settings that must stand before torch is loaded: the tests' engines wait at barriers as the served one does."""

import os

from paceline.engine.process import OPENMP_ENVIRONMENT

for _name, _value in OPENMP_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
