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


@pytest.mark.parametrize("page", ["conversion.md", "tutorial-finetune.md"])
def test_why_a_conversion_is_an_identity_is_quoted_as_it_is_printed(page):
    plan = RoutingConfig("delta", num_blocks=4).resolve(30, converting=True)
    text = " ".join((ROOT / "docs" / page).read_text().split())
    assert f"init: {plan.init} ({plan.init_reason})" in text


def test_the_readme_is_short_and_its_links_exist():
    assert len(re.findall("```python", README)) == 2
    assert len(README.splitlines()) < 200
    for target in re.findall(r"\]\(([^)#]+)", README):
        assert (ROOT / target).exists(), target
