"""The example in the README."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_example_prints_the_output_in_its_comment(tmp_path):
    [example] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    ran = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "42"
    assert (tmp_path / "a.py").exists()
