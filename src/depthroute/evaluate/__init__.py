"""Judgement."""

from depthroute.evaluate.perplexity import PerplexityReport, perplexity, text_perplexity

__all__ = ["PerplexityReport", "perplexity", "text_perplexity"]
