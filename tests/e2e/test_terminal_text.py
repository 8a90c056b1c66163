"""What models, folders and files say reaches a terminal as text: never as escapes or markup."""

import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
import threading
import tty
import warnings

import pytest
from rich.console import Console
from tests.runs import write_run
from tests.support import routed_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from depthroute import cli
from depthroute.cli.options import Watching
from depthroute.cli.terminal import PlainConsole
from depthroute.runs.display import comparison_table, measuring_bar, progress_bar
from depthroute.runs.summary import summarise
from depthroute.visible import visible, visible_line

TITLE = "\x1b]0;owned\x07"
HOSTILE = [f"{TITLE}\x1b[2J\x9b31m\u202e\r\x08[red]{n}[/]" for n in range(320)]
OBEYED = [b"\x1b]", b"\x1b[2J", b"\x07", b"\xc2\x9b", "\u202e".encode(), b"\x08"]


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """A model whose every token is a terminal escape."""
    folder = tmp_path_factory.mktemp("stranger")
    tokenizer = Tokenizer(models.WordLevel({t: n for n, t in enumerate(HOSTILE)}, HOSTILE[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    routed_model("delta", vocab_size=320).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def terminal(monkeypatch):
    """The entry point with a terminal for both outputs: exit status and the bytes it was sent."""

    def call(*arguments):
        reader, writer = pty.openpty()
        tty.setraw(writer)  # newlines stay newlines
        received = bytearray()

        def drain():
            while True:
                try:
                    received.extend(os.read(reader, 4096) or b"\0")
                except OSError:
                    return

        thread = threading.Thread(target=drain)
        thread.start()
        with open(writer, "w", encoding="utf-8") as stream:
            assert stream.isatty()
            monkeypatch.setattr(sys, "stdout", stream)
            monkeypatch.setattr(sys, "stderr", stream)
            monkeypatch.setattr(sys, "argv", ["depthroute", *arguments])
            with pytest.raises(SystemExit) as ended:
                cli.main()
            monkeypatch.undo()
        thread.join()
        os.close(reader)
        return ended.value.code or 0, bytes(received)

    return call


def test_generate_shows_a_models_escapes_as_text_on_a_terminal(terminal, stranger):
    prompt = f"a {TITLE}\nb"
    status, sent = terminal("generate", str(stranger), "--prompt", prompt, "--max-new-tokens", "3")
    assert status == 0
    assert not any(escape in sent for escape in OBEYED)
    assert sent.count(rb"\x1b]0;owned\x07") == 4 and sent.count(b"[red]") == 3
    assert rb"\x9b31m\u202e\r\x08" in sent
    assert rb"a \x1b]0;owned\x07" + b"\nb" in sent


def test_generate_leaves_text_as_it_is_for_a_file(depthroute, stranger):
    status, out, err = depthroute(
        "generate", str(stranger), "--prompt", "a", "--max-new-tokens", "2"
    )
    assert status == 0, err
    assert out.count(TITLE) == 2


def test_inspect_shows_the_name_of_a_folder_as_text(terminal, stranger, tmp_path):
    folder = tmp_path / f"m{TITLE}[red]x[not-a-tag]:smile:"
    folder.symlink_to(stranger)
    (tmp_path / "text.txt").write_text("a b c d e")
    status, sent = terminal("inspect", str(folder), "--text", str(tmp_path / "text.txt"))
    assert status == 0
    assert not any(escape in sent for escape in OBEYED if escape != b"\x1b[2J")
    assert rb"m\x1b]0;owned\x07[red]x[not-a-tag]:smile: (delta:init=paper): loss" in sent


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", f"x{TITLE}", "--text", f"/no/{TITLE}"),
        ("generate", f"./x{TITLE}\nsecond", "--prompt", "a"),
        ("report", f"no{TITLE}"),
        ("compare", "--methods", f"delta:{TITLE}=1"),
        ("train", "--data", f"{TITLE}.txt", "--preset", f"p{TITLE}"),
        ("convert", "--base", f"./b{TITLE}", "--out", "o"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_errors_quote_what_was_given_as_text_in_one_line(terminal, arguments):
    status, sent = terminal(*arguments)
    assert status == 2
    error = sent[sent.index(b"error: ") :]
    assert not any(escape in error for escape in OBEYED)
    assert error.count(b"\n") == 1 and error.endswith(b"\n")


def test_names_of_paths_are_no_markup(depthroute, tmp_path):
    run = write_run(tmp_path / "run", ("standard", "delta"))
    page = tmp_path / f"a[red]{TITLE}.html"
    for out in (page, tmp_path / "[b]not closed[" / "x.html"):
        status, printed, err = depthroute("report", str(run), "--out", str(out))
        assert status == 0, err
        assert f"written: {visible(str(out))}" in printed


def test_the_table_of_a_comparison_shows_the_name_of_its_data_as_text(tmp_path):
    run = write_run(tmp_path / "run", ("standard", "delta"))
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    config = json.loads((run / "config.json").read_text())
    config["data"]["name"] = f"{TITLE}[red]words[/] :smile:"
    page = io.StringIO()
    console = PlainConsole(file=page, width=400, force_terminal=True, color_system="standard")
    console.print(comparison_table(summarise(config, records)))
    assert TITLE not in page.getvalue()
    assert "[red]words[/]" in page.getvalue() and ":smile:" in page.getvalue()


def test_log_lines_warnings_and_tracebacks_are_text():
    """transformers quotes the configuration of the folder it loads."""
    code = (
        "import logging, sys, warnings\n"
        "from depthroute.cli.terminal import guard\n"
        "guard()\n"
        "logging.warning('a %s', '\\x1b[31m')\n"
        "warnings.warn('b \\x1b[31m')\n"
        "print('c \\udcff')\n"
        "raise ValueError('d \\x1b[31m')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert ended.returncode == 1
    assert b"\x1b" not in ended.stderr and ended.stderr.count(rb"\x1b[31m") >= 3
    assert ended.stdout == b"c \\udcff\n"


@pytest.fixture(autouse=True)
def _guards_are_taken_down(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    factory = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(factory)


def test_visible_spells_out_what_is_obeyed_and_nothing_else():
    kept = "tab\tline\nä 漢 😀 👩\u200d👧 ـ\u200c |±█"
    assert visible(kept) == kept
    for character in [*map(chr, range(32)), *map(chr, range(127, 160)), "\u202e", "\u2066"]:
        is_kept = character in "\t\n"
        assert (visible(character) == character) is is_kept
        assert is_kept or visible(character).startswith("\\")
    assert visible("\ud800\u2028\ufeff\U000e0041") == r"\ud800\u2028\ufeff\U000e0041"
    assert visible_line("one\n  two\n") == "one two"


def test_a_bar_says_how_long_it_takes_and_only_where_it_is_known_how_much_is_left():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    bar = measuring_bar(console)
    bar.add_task("loading", total=None)
    bar.add_task("perplexity", total=4, completed=1)
    console.print(bar)
    loading, perplexity = console.file.getvalue().splitlines()[:2]
    assert "0:00:00" in loading and "left" not in loading
    assert "(-:--:-- left)" in plain(perplexity)


def test_a_long_name_takes_more_lines_beside_a_bar_whose_figures_are_whole():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    bar = progress_bar(console)
    name = "delta:heads=4:init=centered lr=0.032 seed 1000"
    bar.add_task(name, total=4, completed=3, loss="4.417", rate="5,990")
    console.print(bar)
    assert " 75% loss 4.417 5,990 tokens/s left -:--:--" in plain(console.file.getvalue())


@pytest.mark.parametrize("columns", ["60", "40"])
@pytest.mark.parametrize("words", [("presets",), ("runs",)])
def test_a_list_is_whole_in_a_narrow_terminal(depthroute, monkeypatch, tmp_path, columns, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")  # a dumb one is taken to have 80
    run = tmp_path / "runs" / "one-of-a-name-that-is-long"
    run.mkdir(parents=True)
    config = {"kind": "train", "methods": {"delta:num_blocks=28": {}}, "seeds": [0]}
    config |= {"train": {"steps": 1234}}
    (run / "config.json").write_text(json.dumps(config))
    (run / "metrics.jsonl").touch()
    status, out, err = depthroute(*words)
    assert status == 0, err
    lines = plain(out).partition("go on with:")[0].splitlines()
    assert max(map(len, lines)) <= int(columns) and "\N{HORIZONTAL ELLIPSIS}" not in out
    if words == ("presets",):
        assert {"delta-7.57b", "  method      delta:num_blocks=28"} <= set(lines)
    elif columns == "60":
        assert [line.split() for line in lines if "delta" in line or "ocks" in line] == [
            ["one-of-a-name", "delta:num_bl", "0", "of", "1,234", "-", "stopped"],
            ["-that-is-long", "ocks=28"],
        ]
    else:
        assert {"one-of-a-name-that-is-long", "  method  delta:num_blocks=28"} <= set(lines)
        assert "  steps   0 of 1,234" in lines


def test_validating_has_a_line_while_it_lasts():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    watching = Watching(console)
    watch = watching.watch()
    watch.on_start(0, 6)
    watch.on_validation(3, 8)
    assert [task.description for task in watching.bar.tasks] == ["step", "validating"]
    assert watching.bar.tasks[1].completed == 3 and watching.bar.tasks[1].total == 8
    watch.on_validation(8, 8)
    assert [task.description for task in watching.bar.tasks] == ["step"]
    watching.end()


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
