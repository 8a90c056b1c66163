"""Writing to disk: whole or not at all, never through a link, one writer at a time."""

import os
import signal
import stat
import subprocess
import sys
import textwrap
import time

import pytest

from depthroute import files


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def names(folder):
    return sorted(item.name for item in folder.iterdir())


def tree(folder):
    """Everything in ``folder``: links by where they lead, files by what they hold."""
    return {
        str(p.relative_to(folder)): os.readlink(p) if p.is_symlink() else p.read_text()
        for p in sorted(folder.rglob("*"))
        if p.is_symlink() or p.is_file()
    }


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path):
    path = tmp_path / "summary.json"
    files.write_text(path, "new")
    assert mode(path) == 0o666 & ~umask()
    path.chmod(0o640)
    files.write_text(path, "newer")
    assert (path.read_text(), mode(path)) == ("newer", 0o640)
    assert names(tmp_path) == ["summary.json"]


def umask():
    now = os.umask(0)
    os.umask(now)
    return now


def test_a_link_where_a_file_is_written_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").symlink_to(tmp_path / "precious")
    files.write_text(tmp_path / "run" / "summary.json", "new")
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "run" / "summary.json").is_symlink()


def test_temporary_names_cannot_be_foreseen_and_are_created_exclusively(tmp_path, monkeypatch):
    assert files.unfinished_name("a") != files.unfinished_name("a")
    (tmp_path / "precious").write_text("precious")
    monkeypatch.setattr(files, "unfinished_name", lambda name: "foreseen")
    (tmp_path / "foreseen").symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError):
        files.write_text(tmp_path / "a", "new")
    with pytest.raises(FileExistsError), files.replacing(tmp_path / "folder"):
        pytest.fail("a link was taken for a new folder")
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    files.write_text(tmp_path / "a", "old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write_text(tmp_path / "a", "new")
    assert tree(tmp_path) == {"a": "old"}


def test_what_a_killed_writer_left_is_cleared_and_what_a_living_one_writes_is_not(tmp_path):
    left = tmp_path / files.unfinished_name("a")
    left.write_text("half")
    others = tmp_path / ".a.depthroute-notes"
    others.write_text("somebody's own")
    link = tmp_path / files.unfinished_name("a")
    link.symlink_to(others)
    living = tmp_path / files.unfinished_name("a")
    held = files._open_held(living, os.O_WRONLY | os.O_EXCL, 0o666)
    files.write_text(tmp_path / "a", "new")
    assert set(names(tmp_path)) == {"a", others.name, link.name, living.name}
    os.close(held)
    files.clear(tmp_path, "a")
    assert tree(tmp_path) == {"a": "new", others.name: "somebody's own"}


def test_a_named_file_is_written_where_its_link_leads_and_to_a_device(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "far" / "page.html")
    files.write_named(tmp_path / "link", "page")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "far" / "page.html").read_text() == "page"
    files.write_named("/dev/null", "page")
    assert not os.path.isfile("/dev/null")
    with pytest.raises(IsADirectoryError, match="give a file"):
        files.write_named(tmp_path, "page")
    with pytest.raises(OSError, match="empty"):
        files.destination("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="leads back to itself"):
        files.destination(tmp_path / "loop")


def test_a_replaced_folder_keeps_what_was_there_its_links_and_all_modes(tmp_path):
    old = tmp_path / "m"
    (old / "logs" / "deep").mkdir(parents=True)
    (old / "logs" / "deep" / "a").write_text("a")
    (old / "logs" / "new").write_text("old")
    (old / "weights").write_text("old")
    (old / "weights").chmod(0o600)
    (old / "stale").write_text("stale")
    (old / "link").symlink_to("logs")
    (old / "logs").chmod(0o750)
    old.chmod(0o700)
    with files.replacing(old, lambda one, other: {"stale"}) as folder:
        assert mode(folder) == 0o700
        (folder / "weights").write_text("new")
        (folder / "logs").mkdir()
        (folder / "logs" / "new").write_text("new")
    expected = {"link": "logs", "logs/deep/a": "a", "logs/new": "new", "weights": "new"}
    assert tree(old) == expected
    assert [mode(p) for p in (old, old / "logs", old / "weights")] == [0o700, 0o750, 0o600]
    assert names(tmp_path) == ["m"]


def test_a_folder_is_written_where_its_link_leads(tmp_path):
    (tmp_path / "real").mkdir()
    for name, target in {"link": "real", "dangling": "new"}.items():
        (tmp_path / name).symlink_to(target)
        with files.replacing(tmp_path / name) as folder:
            (folder / "a").write_text(name)
        assert os.readlink(tmp_path / name) == target
        assert tree(tmp_path / target) == {"a": name}


@pytest.mark.parametrize("path", [".", "..", "/", "", "../here", "deeper/..", "file", "file/below"])
def test_a_folder_that_cannot_be_meant_is_refused_in_words(tmp_path, monkeypatch, path):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / "file").write_text("precious")
    before = tree(tmp_path)
    words = "give a folder|is empty|Not a directory|File exists"
    with pytest.raises(OSError, match=words), files.replacing(path):
        pytest.fail("it was accepted")
    assert tree(tmp_path) == before


def test_without_an_atomic_exchange_a_kill_between_the_renames_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    target = tmp_path / "m"
    target.mkdir()
    (target / "a").write_text("old")
    with files.replacing(target) as folder:
        (folder / "a").write_text("new")
    assert tree(tmp_path) == {"m/a": "new"}
    target.rename(files._aside(target))  # as the kill leaves it
    with pytest.raises(RuntimeError), files.replacing(target):
        raise RuntimeError
    assert tree(tmp_path) == {"m/a": "new"}


def test_a_lock_is_one_process_s_until_it_ends_and_a_fork_does_not_hold_it(tmp_path):
    path = tmp_path / "lock"
    script = textwrap.dedent(f"""
        import os, sys, time
        from pathlib import Path
        from depthroute import files
        held = files.lock(Path({str(path)!r}))
        child = os.fork()
        if child:
            print(os.getpid(), child, flush=True)
        time.sleep(600)  # the child outlives its parent, and must not hold the lock for it
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        number, child = process.stdout.readline().split()
        with pytest.raises(BlockingIOError, match=f"process {number} is writing there"):
            files.lock(path)
        os.kill(int(number), signal.SIGKILL)
        process.wait()
    assert path.exists()  # stale
    deadline = time.monotonic() + 60
    held = None
    while held is None and time.monotonic() < deadline:
        try:
            held = files.lock(path)
        except BlockingIOError:
            time.sleep(0.05)
    os.kill(int(child), signal.SIGKILL)
    assert held is not None and held.is_held
    held.release()
    assert not path.exists()
    held.release()


def test_two_writers_of_one_folder_do_not_disturb_each_other(tmp_path):
    with files.replacing(tmp_path / "m") as first:
        (first / "a").write_text("first")
        words = f"process {os.getpid()} is writing there"
        with pytest.raises(OSError, match=words), files.replacing(tmp_path / "m"):
            pytest.fail("both were let in")
        with files.replacing(tmp_path / "other") as other:
            (other / "b").write_text("other")
    assert tree(tmp_path) == {"m/a": "first", "other/b": "other"}


def test_a_folder_of_trusted_files_is_nobody_elses(tmp_path, monkeypatch):
    own = files.own_folder(tmp_path / "cache")
    assert own == tmp_path / "cache" and mode(own) == 0o700
    own.chmod(0o777)
    assert files.own_folder(own) == own and mode(own) == 0o755
    monkeypatch.setattr(os, "getuid", lambda: own.stat().st_uid + 1)
    other = files.own_folder(own)
    assert other != own and mode(other) == 0o700
    monkeypatch.undo()
    (tmp_path / "link").symlink_to(own)
    assert files.own_folder(tmp_path / "link") not in (tmp_path / "link", own)
