"""What the README shows runs."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_every_python_block_of_the_readme_runs(code):
    exec(compile(code, "README.md", "exec"), {})


def test_the_readme_is_short_and_its_links_exist():
    assert len(BLOCKS) == 2
    assert len(README.splitlines()) < 200
    root = Path(__file__).parents[2]
    for target in re.findall(r"\]\(([^)#]+)", README):
        assert (root / target).exists(), target
