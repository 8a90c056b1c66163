"""Routed checkpoints in transformers' Auto classes.

Imported while transformers imports its own (see ``depthroute/__init__.py``), so this file alone
may not import models; a family's classes are made, and known to ``AutoModel`` and
``AutoModelForCausalLM``, when the first configuration of it is read.
"""

from __future__ import annotations

from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig

from depthroute.models.architecture import ARCHITECTURES
from depthroute.models.configuration import MODEL_TYPE, check_routing


class DepthrouteConfig(PreTrainedConfig):
    """What ``AutoConfig`` finds for a routed checkpoint; hands over to the family's class."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        from depthroute.models.families import routed_family

        check_routing(config_dict, "this configuration")
        architecture = ARCHITECTURES[config_dict["base_model_type"]]
        return routed_family(architecture).config.from_dict(config_dict, **kwargs)


AutoConfig.register(MODEL_TYPE, DepthrouteConfig, exist_ok=True)
