"""The picture of a pipeline is drawn from what runs, and can be read on light and dark pages."""

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("picture", DOCS / "generate_picture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_up_to_date(generator):
    drawn = generator.picture(generator.layout())
    assert generator.PICTURE.read_text() == drawn, "run `python docs/generate_picture.py`"
    assert "(images/pipeline.svg)" in (DOCS / "many-gpus.md").read_text()


def test_the_picture_shows_every_run_and_every_hop_there_and_back(generator):
    which = generator.layout()
    drawing = ElementTree.fromstring(generator.picture(which))
    names = [element.tag.rpartition("}")[2] for element in drawing.iter()]
    assert names.count("rect") == 1 + 2 * len(which.stages) * which.micro_batches
    assert names.count("circle") == 2 * len(which.hops)
    words = " ".join(drawing.itertext())
    for hop in which.hops:
        assert ", ".join(hop.sent) in words
    assert "prefers-color-scheme: dark" in words


def test_another_layout_is_another_picture(generator):
    which = generator.layout()
    other = generator.PipelineLayout.of(
        which.plan, ranks=2, schedule="interleaved", chunks=2, micro_batches=4, cache=False
    )
    assert "embedding, block.0, block.1, block.2;" in generator.picture(other)
