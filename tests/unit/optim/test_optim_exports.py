from __future__ import annotations

import subprocess
import sys

import pytest

import atoll.optim


def test_the_pure_side_does_not_import_torch():
    code = (
        "import sys, atoll.optim\n"
        "from atoll.optim import manifest, outer_step, run_spec\n"
        "assert 'DiLoCo' in dir(atoll.optim)\n"
        "assert 'torch' not in sys.modules\n"
        "from atoll.optim import DiLoCo\n"
        "assert 'torch' in sys.modules and DiLoCo.__name__ == 'DiLoCo'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there_and_no_other():
    for name in atoll.optim.__all__:
        assert getattr(atoll.optim, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        _ = atoll.optim.nothing
