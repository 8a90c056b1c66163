"""Judgement."""

from depthroute.evaluate.perplexity import PerplexityReport, perplexity, text_perplexity
from depthroute.evaluate.tasks import TaskScore, run_tasks

__all__ = ["PerplexityReport", "TaskScore", "perplexity", "run_tasks", "text_perplexity"]
