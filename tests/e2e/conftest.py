"""The command line in this process."""

import sys

import pytest

from depthroute import cli


@pytest.fixture
def depthroute(capsys, monkeypatch):
    """The entry point in this process: exit status, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "dumb")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["depthroute", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return call
