"""Runs vLLM over several folders in one process: jobs as JSON on stdin, answers in a file.

A process of its own, because vLLM changes the model classes of the one it is loaded in.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TOKENS = 24
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 120,
    "max_num_seqs": 8,
}


def answers(jobs: list[dict[str, Any]], tmp: Path, **environment: str) -> list[Any]:
    """Of every job, a folder with the engine's settings: the answers and what vLLM says of itself;
    or the error."""
    (tmp / "jobs.json").write_text(json.dumps(jobs))
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1"
        if any("parallel" in k for j in jobs for k in j)
        else "auto",
        **environment,
    }
    log = tmp / "engine.log"
    with log.open("w") as file:
        command = [sys.executable, "-m", "tests.serving.engine", str(tmp)]
        done = subprocess.run(
            command, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT
        )
    assert done.returncode == 0, log.read_text()[-3000:]
    return json.loads((tmp / "answers.json").read_text())


def main(tmp: Path) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    found = []
    for job in json.loads((tmp / "jobs.json").read_text()):
        try:
            found.append(answer(**job))
        except Exception as error:  # vLLM's are of every class, and the test reads them
            found.append({"error": f"{type(error).__name__}: {error}"})
        gc.collect()
        cleanup_dist_env_and_memory()
    (tmp / "answers.json").write_text(json.dumps(found))


def answer(folder: str, prompts: list[list[int]], adapter: str | None = None, **settings: Any):
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    engine = LLM(model=folder, **SETTINGS | settings, disable_log_stats=False)
    wanted = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0
    )
    request = None if adapter is None else LoRARequest("adapter", 1, adapter)
    texts = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.generate(texts, wanted, lora_request=request, use_tqdm=False)
    outputs = [output.outputs[0] for output in outputs]
    cache = engine.llm_engine.vllm_config.cache_config
    metrics = {m.name: m.value for m in engine.get_metrics() if hasattr(m, "value")}
    return {
        "answers": [
            {
                "tokens": list(output.token_ids),
                "log_probabilities": [
                    step[token].logprob
                    for token, step in zip(output.token_ids, output.logprobs, strict=True)
                ],
            }
            for output in outputs
        ],
        "blocks": cache.num_gpu_blocks,
        "metrics": {name: value for name, value in metrics.items() if value},
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
