"""What a compressed KV cache costs a real model: python -m gyre.eval MODEL_DIR TEXT"""

from .chart import plot
from .rows import REFERENCE, Row, Setting, settings, table
from .run import evaluate
from .text import read_windows

__all__ = ["REFERENCE", "Row", "Setting", "evaluate", "plot", "read_windows", "settings", "table"]
