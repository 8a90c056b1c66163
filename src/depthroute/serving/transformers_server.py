"""`transformers serve` for routed checkpoints: `python -m` of this module takes its arguments."""

from __future__ import annotations

import transformers
from transformers.cli.transformers import app

from depthroute.models.architecture import ARCHITECTURES


def main() -> None:
    for architecture in ARCHITECTURES.values():
        # the server looks for the class that a checkpoint names in transformers itself
        setattr(transformers, f"Routed{architecture.causal_lm}", transformers.AutoModelForCausalLM)
    app()


if __name__ == "__main__":
    main()
