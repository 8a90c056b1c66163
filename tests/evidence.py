"""Data files of the evidence page, made of runs that are written for it."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

from bench import evidence as distilling

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import results_data  # noqa: E402

METHODS = ("standard", "delta", "attnres-full")


@contextmanager
def empty_results(tmp_path, monkeypatch):
    """A folder of data files, empty; what is put there is what the page is made of."""
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setattr(results_data, "RESULTS", folder)
    results_data.load.cache_clear()
    yield folder
    results_data.load.cache_clear()


def put(folder, grid, *runs):
    data = distilling.distil(list(runs))
    (folder / f"evidence_{grid}.json").write_text(json.dumps(data))
    results_data.load.cache_clear()
    return data


def of_text(path, sha256="a text", **train):
    """The run of ``path``, said to be of that text and trained with other settings."""
    config = json.loads((path / "config.json").read_text())
    config["data"]["sha256"] = sha256
    config["train"] |= train
    (path / "config.json").write_text(json.dumps(config))
    return path
