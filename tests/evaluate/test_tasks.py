"""`eval`: the harness's own numbers, from files in the data sets' own fields."""

import gzip
import json
import lzma
import math

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

import depthroute as dr
from bench import tasks as questions
from depthroute.errors import ConfigError, DepthrouteError
from depthroute.evaluate import local_tasks, text_perplexity
from depthroute.evaluate.tasks import parse_tasks, run_tasks
from tests.checkpoints import TEXT, byte_tokenizer, save

CHOICES = {"text": ["the sea", "a stone", "rain", "nothing"], "label": ["A", "B", "C", "D"]}
ITEMS = {
    "hellaswag.validation": {
        "activity_label": "Reading",
        "ctx_a": "A model reads [title] a layer. it",
        "ctx_b": "",
        "endings": ["adds it.", "drops it.", "waits.", "sings a song."],
        "label": "0",
    },
    "arc_easy.test": {"question": "What is wet?", "choices": CHOICES, "answerKey": "A"},
    "arc_challenge.test": {"question": "What falls?", "choices": CHOICES, "answerKey": "C"},
    "piqa.validation": {"goal": "dry a cup", "sol1": "a towel", "sol2": "the sea", "label": 0},
    "winogrande.validation": {
        "sentence": "The cup is in the box because _ is small.",
        "option1": "the cup",
        "option2": "the box",
        "answer": "1",
    },
    "boolq.validation": {"question": "is it", "passage": "It is.", "label": 1},
    "lambada_openai.test": {"text": "the model reads what every layer said"},
}
SUBJECTS = ("anatomy", "astronomy", "marketing")
MMLU = {"question": "Which\u2028one?", "choices": ["one", "two", "three", "four"]}


@pytest.fixture(scope="module")
def task_data(tmp_path_factory):
    """Three items a task; one file plain, one .xz, one .gz as they come."""
    folder = tmp_path_factory.mktemp("tasks")
    openers = [(open, ""), (lzma.open, ".xz"), (gzip.open, ".gz")]
    files = {name: [item] * 3 for name, item in ITEMS.items()}
    files["mmlu.test"] = [MMLU | {"subject": s, "answer": n} for n, s in enumerate(SUBJECTS)]
    for number, (name, items) in enumerate(files.items()):
        opener, suffix = openers[number % 3]
        with opener(folder / f"{name}.jsonl{suffix}", "wt", encoding="utf-8") as handle:
            lines = (json.dumps(item, ensure_ascii=False) + "\n" for item in items)
            handle.writelines(lines)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "delta"
    return save(path, "delta", layers=2, max_position_embeddings=512)


@pytest.fixture(scope="module")
def harness():
    return pytest.importorskip("lm_eval", reason="pip install 'depthroute[eval]'")


@pytest.mark.filterwarnings("ignore")  # the harness's own
def test_scores_are_those_of_calling_the_harness_directly(
    harness, depthroute, folder, task_data, tmp_path
):
    """The direct call reads tasks written out in full here, not the generated ones."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    arguments = ["eval", folder, "--tasks", "all", "--task-data", str(task_data), "--json"]
    status, out, err = depthroute(*arguments)
    assert status == 0, err
    ours = {(r["task"], r["metric"]): r for r in json.loads(out)["tasks"]}
    assert {task for task, _ in ours} == set(local_tasks.TASKS)

    (tmp_path / "arc.jsonl").write_text(json.dumps(ITEMS["arc_easy.test"]) + "\n")
    (tmp_path / "lambada.jsonl").write_text(json.dumps(ITEMS["lambada_openai.test"]) + "\n")
    shared = {"dataset_path": "json", "test_split": "test"}
    (tmp_path / "arc.yaml").write_text(
        json.dumps(
            shared
            | {
                "task": "direct_arc",
                "dataset_kwargs": {"data_files": {"test": str(tmp_path / "arc.jsonl")}},
                "output_type": "multiple_choice",
                "doc_to_text": "Question: {{question}}\nAnswer:",
                "doc_to_target": "{{choices.label.index(answerKey)}}",
                "doc_to_choice": "{{choices.text}}",
                "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
            }
        )
    )
    (tmp_path / "lambada.yaml").write_text(
        json.dumps(
            shared
            | {
                "task": "direct_lambada",
                "dataset_kwargs": {"data_files": {"test": str(tmp_path / "lambada.jsonl")}},
                "output_type": "loglikelihood",
                "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
                "doc_to_target": "{{' '+text.split(' ')[-1]}}",
                "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
            }
        )
    )
    direct = harness.simple_evaluate(
        model=HFLM(pretrained=dr.from_pretrained(folder), tokenizer=byte_tokenizer()),
        tasks=["direct_arc", "direct_lambada"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        num_fewshot=0,
    )["results"]
    for metric in ("acc", "acc_norm"):
        assert ours["arc_easy", metric]["value"] == direct["direct_arc"][f"{metric},none"]
    expected = direct["direct_lambada"]["perplexity,none"]
    assert ours["lambada_openai", "perplexity"]["value"] == pytest.approx(expected, rel=1e-5)
    assert ours["mmlu", "acc"]["num_items"] == 3
    assert ours["hellaswag", "acc_norm"]["num_items"] == 3
    model = dr.from_pretrained(folder)
    samples = tmp_path / "samples.jsonl"
    tasks = ("piqa", "lambada_openai")
    limited = run_tasks(model, byte_tokenizer(), tasks, data=task_data, limit=2, samples=samples)
    assert [score.num_items for score in limited] == [2, 2, 2, 2]
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [(row["task"], row["item"]) for row in rows] == [(t, n) for t in tasks for n in (0, 1)]
    assert [len(row["log_likelihoods"]) for row in rows] == [2, 2, 1, 1]
    chosen = [row["log_likelihoods"].index(max(row["log_likelihoods"])) for row in rows[:2]]
    assert [row["acc"] for row in rows[:2]] == [float(c == 0) for c in chosen]
    (found,) = (s.value for s in limited if s.metric == "perplexity")
    assert found == pytest.approx(math.exp(-sum(r["log_likelihoods"][0] for r in rows[2:]) / 2))


@pytest.mark.filterwarnings("ignore")
def test_a_tokenizer_without_special_tokens_takes_the_models(
    harness, folder, task_data, tmp_path, monkeypatch, capfd
):
    """Such as the byte tokenizer that `train` writes. No bar and no program speaks meanwhile."""
    monkeypatch.chdir(tmp_path)  # no repository: git would complain
    told = []
    bare = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend_tokenizer)
    assert bare.bos_token_id is None and bare.eos_token_id is None
    model = dr.from_pretrained(folder)
    model.config.bos_token_id, model.config.eos_token_id = None, [3, 4]
    capfd.readouterr()
    (score, _) = run_tasks(
        model,
        bare,
        ("piqa",),
        data=task_data,
        limit=1,
        progress=lambda done, total: told.append((done, total)),
    )
    assert score.num_items == 1 and told[-1] == (2, 2)
    said = capfd.readouterr().err
    assert "fatal" not in said and "loglikelihood requests" not in said
    model.config.eos_token_id = None
    with pytest.raises(DepthrouteError, match="neither the tokenizer nor the model"):
        run_tasks(model, bare, ("piqa",), data=task_data, limit=1)


@pytest.mark.filterwarnings("ignore")
def test_answers_given_elsewhere_score_as_the_harness_scores_the_model(
    harness, folder, task_data, tmp_path
):
    model, tokenizer = dr.from_pretrained(folder), byte_tokenizer()
    model.config.max_position_embeddings = 24  # some texts are longer, and cut on the left
    tasks, samples = ("mmlu", "hellaswag", "lambada_openai"), tmp_path / "samples.jsonl"
    expected = run_tasks(model, tokenizer, tasks, data=task_data, samples=samples)
    requests = questions.ask(model, tokenizer, tasks, task_data, None)
    requests.save(tmp_path / "requests.npz")
    loaded = questions.Requests.load(tmp_path / "requests.npz")
    assert loaded.fingerprint == requests.fingerprint and loaded.tasks == tasks
    assert max(map(len, loaded.rows)) == 25
    told = []
    answers = questions.answer(
        model, loaded, tokens_per_batch=60, progress=lambda *progress: told.append(progress)
    )
    number = len(loaded.rows)
    assert told[-1] == (number, number) and len(told) > 1
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    known = sorted(value for row in rows for value in row["log_likelihoods"])
    assert sorted(answers["log_likelihoods"]) == pytest.approx(known, rel=1e-5)
    assert answers["is_greedy"].sum() == sum(value for row in rows for value in row["is_greedy"])
    start = torch.tensor([[5, 6, 7]])
    said = model(input_ids=start).logits[0, -1].argmax().item()
    rows = [np.array([5, 6, 7, token], dtype=np.int32) for token in (said, said ^ 1)]
    both = questions.Requests(rows, [1, 1], tasks, None)
    greedy = questions.answer(model, both, tokens_per_batch=60)["is_greedy"]
    assert greedy.tolist() == [True, False]
    file = tmp_path / questions.ANSWERS
    questions.save_answers(file, loaded, answers)
    found = questions.score(model, tokenizer, loaded, file, task_data)
    assert [(s.task, s.metric, s.num_items) for s in found] == [
        (s.task, s.metric, s.num_items) for s in expected
    ]
    assert [s.value for s in found] == pytest.approx([s.value for s in expected], rel=1e-5)

    model.config.max_position_embeddings = 20  # the harness would ask otherwise
    with pytest.raises(DepthrouteError, match="asks something else than request 0"):
        questions.score(model, tokenizer, loaded, file, task_data)
    others = questions.Requests(loaded.rows[::-1], loaded.asked[::-1], tasks, None)
    with pytest.raises(DepthrouteError, match="answers other requests"):
        questions.score(model, tokenizer, others, file, task_data)
    file.write_text("no archive")
    with pytest.raises(DepthrouteError, match=r"answers.npz': .*; make it with .* bench answer"):
        questions.score(model, tokenizer, loaded, file, task_data)


@pytest.mark.parametrize("content", [None, b"", b"text", b"PK\x03\x04"])
def test_requests_that_cannot_be_read_are_one_clear_error(tmp_path, content):
    path = tmp_path / "requests.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DepthrouteError, match=r"requests.npz': .*; make it with .* bench ask"):
        questions.Requests.load(path)
    np.savez(path, tokens=np.zeros(3))
    with pytest.raises(DepthrouteError, match="'lengths is not a file in the archive'"):
        questions.Requests.load(path)


@pytest.mark.filterwarnings("ignore")
def test_many_items_cost_no_more_than_reading_them(harness, folder, tmp_path, monkeypatch):
    """Templates are read once, a question's text once for its answers; the harness is left as it
    was, and what it says of a perplexity's error is known from the items."""
    from jinja2 import Environment
    from lm_eval.utils import env

    number, draw = 200, np.random.default_rng(0)
    for name, item in (("piqa.validation", "goal"), ("lambada_openai.test", "text")):
        lines = [
            json.dumps(ITEMS[name] | {item: f"{n} {ITEMS[name][item]}"}) for n in range(number)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    values = [-float(value) for value in draw.exponential(size=3 * number)]
    compiled, encoded, tokenizer = [], [], byte_tokenizer()
    compiles, encodes = Environment.compile, tokenizer.encode
    monkeypatch.setattr(
        Environment, "compile", lambda *a, **k: (compiled.append(a[1]), compiles(*a, **k))[1]
    )
    monkeypatch.setattr(
        tokenizer, "encode", lambda text, **k: (encoded.append(text), encodes(text, **k))[1]
    )
    scores = run_tasks(
        dr.from_pretrained(folder),
        tokenizer,
        ("piqa", "lambada_openai"),
        data=tmp_path,
        answer=lambda rows: [(values.pop(), True) for _ in rows],
    )
    assert 0 < len(compiled) < 20
    assert len(encoded) == len(set(encoded)) == 3 * number + 2 * number  # whole, and questions
    assert env.from_string("{{1}}") is not env.from_string("{{1}}")
    (found,) = (s for s in scores if s.metric == "perplexity")
    asked = [-float(v) for v in np.random.default_rng(0).exponential(size=3 * number)]
    mean, error = np.mean(asked[:number]), np.std(asked[:number]) / math.sqrt(number)
    assert found.value == pytest.approx(math.exp(-mean))
    assert found.standard_error == pytest.approx(found.value * error, rel=0.1)


def test_perplexity_of_a_file(depthroute, folder, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    arguments = ["eval", folder, "--perplexity", str(tmp_path / "text.txt"), "--window", "64"]
    status, out, err = depthroute(*arguments, "--json")
    assert status == 0, err
    found = json.loads(out)["perplexity"]
    expected = text_perplexity(dr.from_pretrained(folder), byte_tokenizer(), TEXT, window=64)
    assert found["perplexity"] == pytest.approx(expected.perplexity)
    assert found["bits_per_byte"] == pytest.approx(expected.bits_per_byte)
    assert "bits per byte" in depthroute(*arguments)[1]


def test_generated_tasks_change_nothing_but_the_data(harness, task_data, tmp_path):
    from depthroute.evaluate.tasks import harness_folder

    local_tasks.write_definitions(local_tasks.TASKS, task_data, harness_folder(), tmp_path)
    changed = {"include", "dataset_path", "dataset_name", "dataset_kwargs", "task"}
    changed |= {f"{kind}_split" for kind in ("training", "validation", "test", "fewshot")}
    for task in set(local_tasks.TASKS) - {"mmlu"}:
        assert set(json.loads((tmp_path / f"{task}.yaml").read_text())) == changed
    groups = json.loads((tmp_path / "_mmlu.yaml").read_text())["task"]
    assert groups == ["mmlu_other", "mmlu_stem"]
    for subject in SUBJECTS:
        assert set(json.loads((tmp_path / f"mmlu_{subject}.yaml").read_text())) == changed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to do"),
        (["--tasks", "helaswag"], "did you mean 'hellaswag'?"),
        (["--tasks", "piqa", "--task-data", "/nowhere"], "is not a folder"),
        (["--perplexity", "/nowhere.txt"], "cannot read --perplexity"),
        (["--tasks", "piqa", "--samples", "/nowhere/s.jsonl"], "cannot write --samples"),
        (["--perplexity", "t.txt", "--samples", "s.jsonl"], "does nothing without --tasks"),
        (["--tasks", "piqa", "--add-bos"], "does nothing without --perplexity"),
    ],
)
def test_mistakes_are_one_line(depthroute, folder, arguments, message):
    status, out, err = depthroute("eval", folder, *arguments)
    assert (status, out) == (2, "")
    assert message in err and len(err.splitlines()) == 1


def test_data_are_judged_before_the_model_is_loaded(depthroute, tmp_path):
    (tmp_path / "piqa.validation.jsonl").write_text("{}\n")
    arguments = ["--tasks", "piqa", "--task-data", str(tmp_path)]
    assert "line 1 lacks goal, label" in depthroute("eval", "/no/model", *arguments)[2]
    status, _, err = depthroute("eval", "/no/model", "--perplexity", __file__)
    assert status == 2 and "cannot load '/no/model': there is no such folder" in err


def test_a_missing_task_file_says_what_was_looked_for(tmp_path):
    with pytest.raises(ConfigError, match=r"piqa\.test\.jsonl and piqa\.validation\.jsonl"):
        local_tasks.find(tmp_path, "piqa")
    (tmp_path / "piqa.validation.jsonl.xz").write_bytes(b"not xz")
    with pytest.raises(ConfigError, match="cannot read"):
        local_tasks.write_definitions(("piqa",), tmp_path, _any_harness(tmp_path), tmp_path / "o")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"goal": "dry", "sol1": "a", "label": 0}\n', "line 1 lacks sol2"),
        ("[1]\n", "line 1 is no JSON object"),
        ("", "holds no items"),
    ],
)
def test_items_without_their_fields_are_refused_before_the_model_runs(tmp_path, content, message):
    (tmp_path / "piqa.validation.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        local_tasks.write_definitions(("piqa",), tmp_path, _any_harness(tmp_path), tmp_path / "o")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("hellaswag.validation", {"endings": "abc"}),
        ("hellaswag.validation", {"label": ""}),
        ("arc_easy.test", {"choices": ["a", "b"]}),
        ("arc_challenge.test", {"answerKey": "E"}),
        ("piqa.validation", {"label": 2}),
        ("winogrande.validation", {"sentence": "no gap"}),
        ("boolq.validation", {"label": None}),
        ("lambada_openai.test", {"text": "word"}),
        ("mmlu.test", {"choices": ["one", "two"]}),
    ],
)
def test_fields_of_another_shape_are_named(tmp_path, name, change):
    item = {**ITEMS, "mmlu.test": MMLU | {"subject": "anatomy", "answer": 0}}[name]
    task = name.split(".")[0]
    (tmp_path / f"{name}.jsonl").write_text(json.dumps(item) + "\n")
    local_tasks.check([task], tmp_path)
    (tmp_path / f"{name}.jsonl").write_text(json.dumps(item | change) + "\n")
    with pytest.raises(ConfigError, match=f"line 1 does not fit task '{task}', which needs"):
        local_tasks.check([task], tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_without_the_hub_the_error_names_the_way_out(harness, depthroute, folder, monkeypatch):
    import lm_eval
    import lm_eval.tasks

    def offline(**_):
        raise ConnectionError("Couldn't reach 'baber/piqa' on the Hub")

    monkeypatch.setattr(lm_eval, "simple_evaluate", offline)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **_: None)  # reads thousands of files
    status, _, err = depthroute("eval", folder, "--tasks", "piqa")
    assert status == 2 and "--task-data DIR" in err.splitlines()[-1]


def _any_harness(folder):
    (folder / "piqa").mkdir()
    (folder / "piqa" / "piqa.yaml").write_text("{}")
    return folder


def test_task_names():
    assert parse_tasks("all") == local_tasks.TASKS
    assert parse_tasks("piqa, mmlu,piqa") == ("piqa", "mmlu")
    with pytest.raises(ConfigError):
        parse_tasks(",")
