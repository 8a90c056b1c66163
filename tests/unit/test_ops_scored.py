"""A mix whose sources were scored ahead is the mix, and a stream scores whenever it may."""

from dataclasses import replace

import pytest
import torch

from depthroute import RoutingConfig, nn, ops
from depthroute.errors import DerivativeError
from depthroute.ops import reference

SHAPE, WIDTH, COUNT, READS = (2, 3), 12, 3, 4


def drawn(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    sources = [draw(*SHAPE, WIDTH).requires_grad_() for _ in range(COUNT)]
    queries, gains = draw(READS, WIDTH).requires_grad_(), draw(READS, WIDTH).requires_grad_()
    return sources, queries, gains, draw(*SHAPE, WIDTH).requires_grad_()


def scored(sources, queries, gains, residual, heads, head_norm, offset, scale, together):
    """Reads in windows of ``together``, over sources that were scored once."""
    settings = 1e-6, heads, head_norm == "slice"
    scores = [ops.score(s, queries, gains, *settings).split(together) for s in sources]
    results = []
    for window in zip(*scores, strict=True):
        mixes, sources = ops.scored_mix(window, sources, offset, scale)
        results += mixes
    start = 0.0 if residual is None else scale * residual
    return [(start + x).to(sources[0].dtype) for x in results]


@pytest.mark.parametrize("together", [1, 2, 4])
@pytest.mark.parametrize(("heads", "head_norm"), [(1, "full"), (3, "full"), (3, "slice")])
@pytest.mark.parametrize(("offset", "scale"), [(0, 1.0), (1, 1.0), (-1, 1.0), (0, 3.0)])
@pytest.mark.parametrize("adds", [False, True])
def test_scored_mixes_are_the_definition(together, heads, head_norm, offset, scale, adds):
    sources, queries, gains, residual = drawn()
    residual = residual if adds else None
    tensors = [*sources, queries, gains] + ([residual] if adds else [])
    weights = torch.linspace(0.5, 2.0, READS, dtype=torch.float64)

    def gradients(results):
        total = sum(w * x.sin().sum() for w, x in zip(weights, results, strict=True))
        return torch.autograd.grad(total, tensors)

    options = {"eps": 1e-6, "heads": heads, "head_norm": head_norm, "scale": scale}
    options |= {"centered": offset < 0, "adds_sources": offset > 0, "residual": residual}
    want = [
        reference.depth_mix(sources, q, gain, **options)
        for q, gain in zip(queries, gains, strict=True)
    ]
    got = scored(sources, queries, gains, residual, heads, head_norm, offset, scale, together)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradients(got), gradients(want))


@pytest.mark.parametrize("autocast", [False, True])
def test_narrow_sources_are_mixed_in_single_precision(autocast):
    sources, queries, gains, residual = drawn(torch.bfloat16)
    given = queries.float(), gains.float()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = scored(sources, *given, residual, 1, "full", 1, 1.0, 2)
    wide = [s.double() for s in sources]
    for x, query, gain in zip(got, *given, strict=True):
        want = reference.depth_mix(
            wide, query.double(), gain.double(), residual=residual.double(), adds_sources=True
        )
        assert x.dtype == torch.bfloat16
        torch.testing.assert_close(x.double(), want, rtol=2**-8, atol=2**-9)


def test_a_source_whose_later_gradients_alone_arrive():
    sources, queries, gains, _ = drawn()
    logits = [ops.score(s, queries, gains, 1e-6, 1, False) for s in sources]
    _, handed = ops.scored_mix(logits, sources, 0, 1.0)
    (grad,) = torch.autograd.grad(handed[1].sum(), sources[1])
    torch.testing.assert_close(grad, torch.ones_like(grad))


def test_a_read_that_nothing_comes_of():
    sources, queries, gains, _ = drawn()
    logits = [ops.score(s, queries, gains, 1e-6, 1, False) for s in sources]
    mixes, _ = ops.scored_mix(logits, sources, 0, 1.0)
    got = torch.autograd.grad(mixes[2].sin().sum(), [*sources, queries, gains])
    want = reference.depth_mix(sources, queries[2], gains[2])
    torch.testing.assert_close(
        got, torch.autograd.grad(want.sin().sum(), [*sources, queries, gains])
    )


def test_a_second_derivative_is_refused():
    sources, queries, gains, _ = drawn()
    x = scored(sources, queries, gains, None, 1, "full", 0, 1.0, 2)[0]
    with pytest.raises(DerivativeError, match="second derivative"):
        torch.autograd.grad(x.sum(), queries, create_graph=True)


METHODS = ("delta-block", "delta", "attnres-block", "attnres-full", "delta-block:heads=3")


def run(sites, plan, ahead, edit=False, shape=SHAPE):
    """Every x, and the gradients of embedding, outputs and parameters."""
    generator = torch.Generator().manual_seed(1)

    def draw():
        return torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64)

    tensors = [draw().requires_grad_() for _ in range(plan.num_sublayers + 1)]
    stream = nn.ResidualStream.start(tensors[0], plan, sites=sites)
    stream = stream if ahead else replace(stream, ahead=None)
    seen = []
    for index in range(plan.num_sublayers):
        x, stream = stream.read(sites.at(index))
        seen.append(x)
        stream = stream.push(tensors[index + 1] + 0.1 * x)
        if edit and index == 5:
            stream = stream.edited(torch.ones_like(x))
    seen.append(stream.finish(sites.at(plan.num_sublayers)))
    sum(x.cos().sum() for x in seen).backward()
    parameters = [p for p in sites.parameters() if p.grad is not None]
    grads = [t.grad for t in (*tensors, *parameters)]
    for parameter in parameters:
        parameter.grad = None
    return [x.detach() for x in seen], grads


def prepared(method):
    plan = RoutingConfig.named(method).resolve(6, width=WIDTH)
    sites = nn.Sites(plan, WIDTH).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in sites.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return plan, sites


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("edit", [False, True])
def test_a_stream_that_scores_ahead_is_the_same_stream(method, edit, monkeypatch):
    plan, sites = prepared(method)
    counted, score = [], ops.score
    monkeypatch.setattr(ops, "score", lambda *given: counted.append(1) or score(*given))
    want = run(sites, plan, ahead=False, edit=edit)
    assert not counted
    got = run(sites, plan, ahead=True, edit=edit)
    assert counted
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_stream_of_no_tokens_goes_to_its_end(method, ahead):
    plan, sites = prepared(method)
    seen, (of_embedding, *others) = run(sites, plan, ahead, shape=(2, 0))
    assert {x.shape for x in (*seen, of_embedding)} == {(2, 0, WIDTH)}
    assert not any(grad.any() for grad in others)


def test_a_finished_source_is_scored_once(monkeypatch):
    plan, sites = prepared("delta-block")
    queries, score = [], ops.score
    monkeypatch.setattr(
        ops, "score", lambda s, q, *rest: queries.append(len(q)) or score(s, q, *rest)
    )
    run(sites, plan, ahead=True)
    choosing = [place for place in plan.places if place.chooses]
    seen_first = [
        min(i for i, p in enumerate(choosing) if p.num_finished > n)
        for n in range(choosing[-1].num_finished)
    ]
    assert queries == [len(choosing) - first for first in seen_first]


def test_what_cannot_be_known_ahead_is_not_scored(monkeypatch):
    plan, sites = prepared("delta-block")
    monkeypatch.setattr(ops, "score", lambda *given: pytest.fail("a source was scored"))
    emb = torch.randn(*SHAPE, WIDTH, dtype=torch.float64)

    def walk(stream, at):
        for index in range(plan.num_sublayers):
            x, stream = stream.read(at(index))
            stream = stream.push(x)

    with torch.no_grad():
        walk(nn.ResidualStream.start(emb, plan, sites=sites), sites.at)
    walk(nn.ResidualStream.start(emb, plan), sites.at)
    _, others = prepared("delta-block")
    walk(nn.ResidualStream.start(emb, plan, sites=sites), others.at)
    stream = nn.ResidualStream.start(emb, plan, sites=sites)
    assert stream.ahead is not None
    walk(stream.with_tensors(stream.tensors()), sites.at)


@pytest.mark.parametrize("method", ["delta-block", "attnres-block"])
@pytest.mark.parametrize("after_push", [False, True])
@pytest.mark.parametrize("at", range(9))
def test_a_stream_that_is_edited_anywhere(method, after_push, at):
    plan, sites = prepared(method)
    embedding = torch.randn(*SHAPE, WIDTH, dtype=torch.float64)

    def seen(is_ahead):
        stream = nn.ResidualStream.start(embedding, plan, sites=sites)
        stream = stream if is_ahead else replace(stream, ahead=None)
        for index in range(plan.num_sublayers):
            x, stream = stream.read(sites.at(index))
            if index == at and not after_push:
                stream = stream.edited(torch.ones_like(x))
            stream = stream.push(x.sin())
            if index == at and after_push:
                stream = stream.edited(torch.ones_like(x))
        return stream.finish(sites.at(plan.num_sublayers))

    torch.testing.assert_close(seen(True), seen(False))


def test_places_that_are_not_read_are_passed_over():
    plan, sites = prepared("delta-block")
    embedding = torch.randn(*SHAPE, WIDTH, dtype=torch.float64)

    def seen(is_ahead):
        stream = nn.ResidualStream.start(embedding, plan, sites=sites)
        stream = stream if is_ahead else replace(stream, ahead=None)
        for index in range(plan.num_sublayers):
            if index % 5:
                x, stream = stream.read(sites.at(index))
                stream = stream.push(x.sin())
            else:
                stream = stream.push(embedding.cos())
        return stream.finish(sites.at(plan.num_sublayers))

    torch.testing.assert_close(seen(True), seen(False))
