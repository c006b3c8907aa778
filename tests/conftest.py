"""One seed, one thread count and a fresh compiler cache for every test."""

from __future__ import annotations

import os
import tempfile

# before torch is imported: its disk cache does not notice an edited derivative rule
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fmoe-inductor-")

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
