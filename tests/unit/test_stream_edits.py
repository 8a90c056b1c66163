"""``edited`` is ``push`` with a larger output, at every place of every method with one stream; of
several, tests/property/test_mhc.py."""

import pytest
import torch
from tests.support import METHODS, ONE_STREAM

from depthroute.nn import ResidualStream, Sites

LAYERS, WIDTH = 6, 8


@pytest.mark.parametrize("method", ONE_STREAM)
def test_an_edit_is_a_larger_output_of_the_last_sublayer(method):
    plan = METHODS[method].resolve(LAYERS, width=WIDTH)
    generator = torch.Generator().manual_seed(0)
    sites = Sites(plan, WIDTH)
    for parameter in sites.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    embedding, delta = (torch.randn(2, 3, WIDTH, generator=generator) for _ in range(2))
    routing = sites(embedding)
    start = ResidualStream.start(embedding, plan, sites=routing)
    assert_same(start.edited(delta), ResidualStream.start(embedding + delta, plan, sites=routing))
    stream = start
    for index in range(plan.num_sublayers):
        x, stream = stream.read(routing.at(index))
        output = torch.tanh(x)
        assert_same(stream.push(output).edited(delta), stream.push(output + delta))
        stream = stream.push(output)


def assert_same(here, there):
    assert here.index == there.index
    for a, b in zip(here.tensors(), there.tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
