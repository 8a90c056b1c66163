"""How the processes of a run find each other."""

from concurrent.futures import ThreadPoolExecutor

from torch import distributed

from depthroute.parallel.world import agreed_name


def test_processes_that_are_started_again_agree_on_a_name_whatever_earlier_ones_left():
    store, names = distributed.HashStore(), []
    for _ in range(3):
        with ThreadPoolExecutor(3) as ranks:
            futures = [ranks.submit(agreed_name, store, rank, 3) for rank in (2, 1, 0)]
            (name,) = {future.result(60) for future in futures}
        names.append(name)
        store.set("asks/1", "of one that was killed before it had an answer")
    assert len(set(names)) == 3
