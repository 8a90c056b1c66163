"""What lets others use a routed checkpoint: its model card, a hub, and a way in for tools that can
only say ``trust_remote_code=True``."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthroute._version import __version__
from depthroute.methods import BASELINE
from depthroute.models.configuration import MODEL_TYPE, SHIM
from depthroute.models.saving import CARD, CARD_MARK, CONFIG, is_own_text

HUB_OPTIONS = ("repo_id", "private", "token", "revision", "create_pr", "commit_message")
_AUTO_MAP = {"AutoConfig": f"{SHIM}.DepthrouteConfig"}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SHIM = '''\
"""For tools that can only say trust_remote_code=True; the classes are those of depthroute."""

import depthroute  # pip install depthroute
from depthroute.models.auto import DepthrouteConfig
'''


def card(
    model: Any, *, name: str, adapter_only: bool = False, training: Mapping[str, Any] | None = None
) -> str:
    """Markdown with the hub's metadata: what the model is, how it was made, how it is loaded.

    ``name`` is what it is loaded by, and ``training`` what came of training, by name.
    """
    config, routing = model.config, model.config.routing_config()
    base = _base(config)
    read = f", instead of one running sum, what `{routing.method}` routes to them over depth"
    if routing.method == BASELINE:
        read = " one running sum, as plain models do"
    metadata = ["library_name: transformers", "tags:", f"- {MODEL_TYPE}", f"- {routing.method}"]
    if base is not None and _HUB_ID.fullmatch(base):
        metadata += [f"base_model: {base}"]
    lines = [
        *("---", *metadata, "---", "", CARD_MARK, ""),
        f"# {config.model_type} with {routing.name}",
        "",
        f"A {config.model_type} decoder whose layers read{read}. "
        + ("These are the routing parameters alone. " if adapter_only else "")
        + f"Written by depthroute {__version__}.",
        "",
        *_how_to_load(name, (base or "ITS BASE") if adapter_only else None, _auto_class(model)),
        *("", "## What it is", "", "| | |", "|---|---|"),
        *(f"| {what} | {value} |" for what, value in _facts(model, base, training or {}).items()),
        "",
    ]
    return "\n".join(lines)


def _base(config: Any) -> str | None:
    """What it was made from: a hub's name, or of a folder the last part alone, as the rest of a
    path is nobody else's business."""
    name = str(config.name_or_path or "")
    if not _HUB_ID.fullmatch(name) or Path(name).exists():
        name = re.sub(r"[^\w. -]", "", Path(name).name)
    return name or None


def _auto_class(model: Any) -> str:
    if model.base_model is model:
        return "AutoModel"
    head = re.search(r"For\w+$", type(model).__name__)  # GPT2LMHeadModel has none
    return f"AutoModel{head[0] if head else 'ForCausalLM'}"


def _how_to_load(name: str, base: str | None, auto_class: str) -> list[str]:
    """With the ``base`` that an adapter is attached to."""
    loading = [f'model = {auto_class}.from_pretrained("{name}")']
    if base is not None:
        loading = [f'base = {auto_class}.from_pretrained("{base}")']
        loading += [f'model = depthroute.load_adapter(base, "{name}")']
    return [
        *("## How to load it", "", "    pip install depthroute", "", "```python"),
        "import depthroute  # transformers does not know this model without it",
        f"from transformers import {auto_class}",
        *("", *loading, "```"),
    ]


def _facts(model: Any, base: str | None, training: Mapping[str, Any]) -> dict[str, Any]:
    parameters = sum(p.numel() for p in model.parameters())
    routing = sum(p.numel() for p in model.routing_parameters())
    settings = ", ".join(f"`{key}={value}`" for key, value in model.config.routing.items())
    facts = {
        "base": base or f"none: {model.config.model_type}, from scratch",
        "routing": settings,
        "start": f"{model.plan.init}: {model.plan.init_reason}",
        "parameters": f"{parameters:,}, of which {routing:,} route at {len(model.sites)} sites",
    }
    if getattr(model, "identity", None) is not None:
        facts["at conversion"] = str(model.identity).replace("|", "\\|")
    return facts | {key: value for key, value in training.items() if value is not None}


def put_shim(folder: Path) -> None:
    """The configuration names a class in a file beside it, whose import is that of depthroute."""
    (folder / f"{SHIM}.py").write_text(_SHIM)
    values = json.loads((folder / CONFIG).read_text()) | {"auto_map": _AUTO_MAP}
    (folder / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def push(
    model: Any,
    repo_id: str,
    *,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    tags: list[str] | None = None,
    **saving: Any,
) -> Any:
    """Upload what ``save_pretrained`` writes, but a card there that is somebody's own."""
    from huggingface_hub import HfApi, ModelCard

    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        model.save_pretrained(folder, card_name=repo_id, **saving)
        if tags:
            ours = ModelCard.load(folder / CARD)
            data: Any = ours.data
            data.tags = [*dict.fromkeys([*data.tags, *tags])]
            ours.save(folder / CARD)
        if api.file_exists(repo_id, CARD, revision=revision):
            theirs = api.hf_hub_download(repo_id, CARD, revision=revision, local_dir=temporary)
            if is_own_text(Path(theirs)):
                (folder / CARD).unlink()
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message or f"Upload {type(model).__name__}",
            commit_description=commit_description,
        )
