"""vLLM's answers are those of generate: tokens, and log-probabilities to 1e-3."""

from __future__ import annotations

import pytest
import torch
from examples.serve_real import compared, generated

from tests.serving.engine import TOKENS, answers
from tests.serving.models import PROMPTS, assert_equal, save_routed

pytestmark = pytest.mark.serving

METHODS = [
    "standard", "delta", "delta-block:num_blocks=2", "delta-block:num_blocks=2:heads=4",
    "delta-block:num_blocks=2:init=centered", "delta-block:num_blocks=2:init=gate",
    "attnres-full", "attnres-full:heads=4", "attnres-block:num_blocks=2",
    "attnres-block:num_blocks=2:init=paper", "attnres-block:num_blocks=2:init=reference",
    "attnres-block:num_blocks=2:init=centered", "attnres-block-roles:num_blocks=2",
    "static", "static-block:num_blocks=2", "x0-skip", "x0-skip-learned",
    "depth-attention", "depth-attention:stride=2", "value-residual", "mhc",
]  # fmt: skip
FAMILIES = [
    "mistral", "qwen2", "qwen3", "smollm3", "starcoder2", "granite", "olmo2", "gemma2",
    "gemma3_text", "phi3", "gpt_neox", "cohere2", "mixtral", "qwen3_moe", "exaone4", "olmo3",
    "ernie4_5", "glm4", "gpt_oss",
]  # fmt: skip
PAIRS = [
    *(("llama", method) for method in METHODS),
    *(
        (family, m)
        for family in FAMILIES
        for m in ("attnres-block:num_blocks=2", "depth-attention")
    ),
    ("deepseek_v3", "attnres-block:num_blocks=2"),
    ("deepseek_v3", "delta-block:num_blocks=2"),
    ("qwen3", "depth-attention:key_norm=after_rope"),
    ("gpt_neox", "attnres-block-roles:num_blocks=2"),
    ("phi3", "attnres-block-roles:num_blocks=2"),
]
REFUSED = {
    ("gpt2", "delta"): "vLLM cannot serve this gpt2 model",
    ("kimi_linear", "delta"): "its linear attention keeps a state",
    ("llama4_text", "delta"): "its experts are stored transposed",
    ("lfm2", "delta"): "its convolution keeps a state",
    ("qwen3_next", "delta"): "its linear attention keeps a state",
    ("deepseek_v3", "depth-attention"): "it mixes a latent",
}
BLOCKS = ["delta-block:num_blocks=2", "attnres-block:num_blocks=2", "depth-attention"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Of every pair: what vLLM answers, all in one process, and what generate does."""
    tmp, expected, jobs = tmp_path_factory.mktemp("pairs"), {}, []
    for number, pair in enumerate([*PAIRS, *REFUSED]):
        folder = tmp / str(number)
        model = save_routed(folder, *pair)
        expected[pair] = None if pair in REFUSED else generated(model, PROMPTS, TOKENS)
        jobs.append({"folder": str(folder), "prompts": PROMPTS})
    return dict(zip(expected, zip(answers(jobs, tmp), expected.values(), strict=True), strict=True))


@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_vllm_answers_as_generate(pairs, family, method):
    assert_equal(*pairs[family, method])


@pytest.mark.parametrize(("family", "method"), REFUSED)
def test_what_vllm_cannot_run_is_refused_in_a_sentence(pairs, family, method):
    answer, _ = pairs[family, method]
    assert answer["error"].startswith("ConfigError: ")
    assert REFUSED[family, method] in answer["error"]
    assert "\n" not in answer["error"]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """The three methods on llama: their folders, models and what generate says of long prompts."""
    tmp, made = tmp_path_factory.mktemp("three"), {}
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(3, 97, (48,), generator=generator).tolist()
    prompts = [
        shared + torch.randint(3, 97, (n,), generator=generator).tolist() for n in (3, 9, 20)
    ]
    prompts += [[5, 6, 7] * 8, shared]
    for method in BLOCKS:
        model = save_routed(tmp / method, "llama", method)
        made[method] = str(tmp / method), model, prompts, generated(model, prompts, TOKENS)
    return made


FEATURES = {
    "prefix caching": {"enable_prefix_caching": True, "block_size": 32, "max_num_seqs": 1},
    "chunked prefill": {"enable_chunked_prefill": True, "max_num_batched_tokens": 16},
    "preemption": {"num_gpu_blocks_override": 7, "block_size": 32, "enable_prefix_caching": False},
    "n-gram speculation": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    },
}
SEEN = {
    "prefix caching": "vllm:prefix_cache_hits",
    "preemption": "vllm:num_preemptions",
    "n-gram speculation": "vllm:spec_decode_num_accepted_tokens",
}
"""What vLLM counts when the feature has really been used."""


@pytest.fixture(scope="module")
def featured(three, tmp_path_factory):
    keys = [(feature, method) for feature in FEATURES for method in BLOCKS]
    jobs = [
        {"folder": three[method][0], "prompts": three[method][2], **FEATURES[feature]}
        for feature, method in keys
    ]
    found = answers(jobs[:-3], tmp_path_factory.mktemp("features"))
    for job in jobs[-3:]:  # vLLM speculates once a process
        found += answers([job], tmp_path_factory.mktemp("speculation"))
    return dict(zip(keys, found, strict=True))


@pytest.mark.parametrize("method", BLOCKS)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_of_the_engine_changes_no_token(three, featured, feature, method):
    answer = featured[feature, method]
    assert_equal(answer, three[method][3])
    if feature in SEEN:
        assert answer["metrics"].get(SEEN[feature], 0) > 0, answer["metrics"]


def test_the_cache_is_that_of_the_plain_model(three, tmp_path):
    """Blocks of as many tokens in as much memory: no method adds a byte."""
    save_routed(tmp_path / "plain", "llama", None)
    folders = [str(tmp_path / "plain"), *(three[method][0] for method in BLOCKS)]
    jobs = [{"folder": folder, "prompts": PROMPTS} for folder in folders]
    blocks = [answer["blocks"] for answer in answers(jobs, tmp_path)]
    assert blocks[0] > 0
    assert len(set(blocks)) == 1, blocks


def test_workers_of_a_pipeline_refuse_the_model_in_a_sentence(three, tmp_path):
    """The commands do so before there are any; an engine made in Python shows what they logged."""
    folder, _, prompts, _ = three[BLOCKS[0]]
    job = {"folder": folder, "prompts": prompts, "pipeline_parallel_size": 2}
    (answer,) = answers([job], tmp_path)
    assert "WorkerProc initialization failed" in answer["error"]
    assert "reads several; use tensor_parallel_size" in (tmp_path / "engine.log").read_text()


def test_tensor_parallel_and_compiled_answer_as_generate(three, tmp_path):
    for method, settings in zip(
        BLOCKS,
        ({"tensor_parallel_size": 2}, {"enforce_eager": False}, {"tensor_parallel_size": 2}),
        strict=True,
    ):
        folder, _, prompts, expected = three[method]
        (answer,) = answers(
            [{"folder": folder, "prompts": prompts, **settings}],
            tmp_path,
            VLLM_ENABLE_V1_MULTIPROCESSING="1",
            VLLM_CACHE_ROOT=str(tmp_path / "cache"),
        )
        assert_equal(answer, expected)


def test_a_lora_adapter_answers_as_peft(three, tmp_path):
    import peft

    folder, model, prompts, plain = three["delta-block:num_blocks=2"]
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"])
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = generated(adapted, prompts, TOKENS)
    assert compared(expected, plain)["first differences"]
    job = {"folder": folder, "prompts": prompts, "adapter": str(tmp_path / "adapter")}
    (answer,) = answers([job | {"enable_lora": True, "max_lora_rank": 8}], tmp_path)
    adapted.unload()
    assert_equal(answer, expected)
