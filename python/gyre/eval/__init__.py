"""What a compressed KV cache costs a real model: python -m gyre.eval MODEL_DIR TEXT"""

from .chart import plot
from .rows import REFERENCE, Setting, settings, table
from .run import evaluate
from .statistics import Row, ratio
from .text import read_windows

__all__ = ["REFERENCE", "Row", "Setting", "evaluate", "plot", "ratio", "read_windows", "settings", "table"]
