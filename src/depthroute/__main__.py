"""``python -m depthroute``, also behind ``torchrun -m``."""

from depthroute.cli import main

main()
