"""docs/commands.md is what the command line says."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate_commands.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_commands_is_up_to_date(generator):
    expected, written = generator.page(), (DOCS / "commands.md").read_text()
    assert written == expected, "run `python docs/generate_commands.py`"


def test_the_page_names_every_command_with_an_example(generator):
    page = generator.page()
    names = generator.named_commands()
    assert {"train", "bench ops", "bench step"} <= names.keys()
    for name in names:
        assert f"\n## {name}\n" in page
        assert f"Example: `depthroute {name}" in page
    assert "`--json`" in page and "`--set TEXT`" in page and "--as-json" not in page


def test_the_picture_of_the_report_page_is_there_and_small():
    page = (DOCS / "report.md").read_text()
    assert "(images/report.png)" in page
    picture = (DOCS / "images" / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) < 400_000
