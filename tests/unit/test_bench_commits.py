"""Two trees that take turns: who goes first, what a ratio is of, and the process of one side."""

import pytest

from bench import commits
from depthroute.errors import ConfigError, DepthrouteError

TINY = {"preset": "tiny", "device": "cpu", "dtype": "float32", "eager": True}
TINY |= {"batch_size": 1, "sequence_length": 16, "layers": 2}


class Scripted:
    """Answers with its name and how often it was asked."""

    def __init__(self, name, order):
        self.name, self.order, self.count = name, order, 0

    def does(self, **task):
        self.order.append((self.name, task["do"]))
        self.count += task["do"] == "times"
        return self.name, self.count


def test_both_begin_by_turns():
    order = []
    trees = [Scripted("this", order), Scripted("other", order)]
    pairs = commits.rounds(trees, {"do": "times"})
    assert pairs == [(("this", n), ("other", n)) for n in range(1, commits.ROUNDS + 1)]
    first = [name for name, task in order[::2]]
    assert first == ["other", "this"] * (commits.ROUNDS // 2) + ["other"]


def test_a_ratio_is_of_one_round_and_above_one_where_this_tree_is_slower():
    row = commits.summary([(2.0, 1.0), (30.0, 20.0), (3.0, 3.0)])
    assert row["ratio"] == 1.5
    assert (row["this"], row["other"]) == (3.0, 3.0)
    assert commits.summary([(1.0, 2.0)])["quartiles"] == [0.5, 0.5]


def test_another_folder_and_another_part_are_refused(tmp_path):
    with pytest.raises(DepthrouteError, match="no checkout"):
        commits.run(None, tmp_path, [])
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        commits.run(None, commits.ROOT, [], parts=["step"])


def test_a_side_takes_steps_of_its_tree_and_says_what_it_cannot_do():
    with commits.working(commits.ROOT) as tree:
        tree.does(do="step", settings=TINY, method="delta-block")
        times = tree.does(do="steps", count=3)
        assert len(times) == 3
        assert min(times) > 0
        with pytest.raises(RuntimeError, match="unknown method"):
            tree.does(do="step", settings=TINY, method="no_such_method")
        tree.does(do="forget")  # and goes on
    assert tree.process.poll() is not None
