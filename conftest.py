"""Puts the project's root on the import path, names the markers, and lets kernels run where there is no CUDA card."""
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")          # before kernels.py is imported


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA card")
    for message in (".*encountered in", "All-NaN slice"):   # NumPy's, in Triton's interpreter
        config.addinivalue_line("filterwarnings", f"ignore:{message}:RuntimeWarning")
