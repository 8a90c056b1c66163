"""What README and docs show runs."""

import re
from pathlib import Path

import pytest

from depthroute import RoutingConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = {
    f"{page} {number}": code
    for page in ("README.md", "docs/methods.md", "docs/training.md")
    for number, code in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.S)
    )
}
"""Of the pages whose examples need nothing that is not there."""


@pytest.mark.parametrize("name", BLOCKS)
def test_every_python_block_runs_alone(name):
    exec(compile(BLOCKS[name], name, "exec"), {})


def test_the_tutorial_quotes_why_a_conversion_is_an_identity_as_it_is_printed():
    plan = RoutingConfig("delta", num_blocks=4).resolve(30, converting=True)
    page = (ROOT / "docs" / "tutorial-finetune.md").read_text()
    assert f"init: {plan.init} ({plan.init_reason})" in " ".join(page.split())


def test_the_readme_is_short_and_its_links_exist():
    assert len(re.findall("```python", README)) == 2
    assert len(README.splitlines()) < 200
    for target in re.findall(r"\]\(([^)#]+)", README):
        assert (ROOT / target).exists(), target
