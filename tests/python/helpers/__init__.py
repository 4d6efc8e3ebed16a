"""Shared by the tests: models, comparisons with PyTorch, tables of cases, client processes."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(os.environ.get("GRADD_BUILD", ROOT / "build")).resolve()
