"""The README's Python runs as it stands. (Its C++ is compiled and run by tests/consumer.)"""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_two():
    assert len(BLOCKS) == 2


@pytest.mark.parametrize("block", BLOCKS, ids=["torchscript", "python"])
def test_block(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "readme.py"  # TorchScript reads its source from a file
    file.write_text(block)
    exec(compile(block, file, "exec"), {"__name__": "__main__"})
