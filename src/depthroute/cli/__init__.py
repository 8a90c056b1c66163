"""The command line. Thin: options in, one call, one table or JSON out.

One module per group of commands; importing it registers them. Imports that need torch happen
inside the commands, so that `--help` is quick; so are annotations that are no strings, which would
be compiled anew at every start.
"""

from depthroute.cli import (
    about,
    bench,
    compare,
    convert,
    evaluate,
    look,
    plan,
    runs,
    serve,
    train,
)
from depthroute.cli.app import app, main

__all__ = [
    "about",
    "app",
    "bench",
    "compare",
    "convert",
    "evaluate",
    "look",
    "main",
    "plan",
    "runs",
    "serve",
    "train",
]
