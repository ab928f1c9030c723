"""Calibrates a model's KV cache, so that the same bytes lose less: python -m gyre.calibrate MODEL TEXT

    cache = GyreCache(model.config, k="tq4", v="tq4", calibration="model.gyrecal")
"""

from .budget import Budget
from .file import Calibration, CalibrationWarning

__all__ = ["Budget", "Calibration", "CalibrationWarning"]
