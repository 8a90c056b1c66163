"""The routed causal language model: a family's own model class with routing on."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from safetensors import SafetensorError
from torch import nn

from depthroute.errors import CheckpointError, DepthrouteError
from depthroute.models import saving
from depthroute.models.architecture import Architecture
from depthroute.models.routed import install, plan_for
from depthroute.nn import Site, Sites
from depthroute.plan import Plan

if TYPE_CHECKING:
    _Base = transformers.PreTrainedModel
else:
    _Base = object


class RoutedCausalLM(_Base):
    """Mixed into a family's ``...ForCausalLM``; forward, loss and generate are the family's."""

    architecture: Architecture

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        install(self, plan_for(config, config.routing_config()))
        self.post_init()

    @property
    def sites(self) -> Sites:
        """Every site in reading order, by name: ``layers.3.attention``, ..., ``final``."""
        return getattr(self, self.architecture.decoder).routing

    @property
    def plan(self) -> Plan:
        return self.sites.plan

    def routing_parameters(self) -> list[nn.Parameter]:
        return list(self.sites.parameters())

    def print_trainable_parameters(self) -> None:
        """Parameters, trainable parameters, and how many of them route."""
        parameters = list(self.parameters())
        total = sum(p.numel() for p in parameters)
        trainable = sum(p.numel() for p in parameters if p.requires_grad)
        routing = sum(p.numel() for p in self.routing_parameters())
        print(
            f"trainable params: {trainable:,} || all params: {total:,} || "
            f"trainable%: {100 * trainable / total:.4f} || routing params: {routing:,} "
            f"({100 * routing / total:.4f}%) at {len(self.sites)} sites"
        )

    def freeze_base(self) -> None:
        """Train the routing alone."""
        self.requires_grad_(False)
        for parameter in self.routing_parameters():
            parameter.requires_grad_(True)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *args: Any,
        adapter_only: bool = False,
        is_main_process: bool = True,
        **kwargs: Any,
    ) -> None:
        """Write configuration and weights, or with ``adapter_only`` the routing alone.

        The folder changes at once when everything is written; an interrupted save leaves what was
        there, and a model that this library did not write is never replaced. Other arguments are
        those of ``PreTrainedModel.save_pretrained``.
        """
        if not is_main_process:
            return super().save_pretrained(save_directory, *args, is_main_process=False, **kwargs)
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", Path(save_directory).name)
        with saving.replacing(save_directory) as folder:
            self.write_into(folder, *args, adapter_only=adapter_only, **kwargs)
        return None

    def write_into(
        self, folder: Path, *args: Any, adapter_only: bool = False, **kwargs: Any
    ) -> None:
        """As :meth:`save_pretrained`, into a folder that is nobody's yet."""
        if adapter_only:
            saving.save_adapter(self, folder)
        else:
            super().save_pretrained(folder, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but a checkpoint with missing or foreign weights is an error."""
        wants_info = kwargs.pop("output_loading_info", False)
        try:
            loaded: Any = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
            )
        except SafetensorError as error:
            raise CheckpointError(
                f"the weights in {str(pretrained_model_name_or_path)!r} cannot be read: {error}. "
                "The file is damaged or was cut short; copy it again"
            ) from error
        model, info = loaded
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            keys = sorted(map(str, info[what]))
            if keys:
                raise CheckpointError(
                    f"the checkpoint {str(pretrained_model_name_or_path)!r} does not fit its "
                    f"configuration: {what.replace('_', ' ')} {keys[0]} ({len(keys)} such); it is "
                    "incomplete or its config.json belongs to another model"
                )
        return (model, info) if wants_info else model

    def merge(self) -> None:
        """Not possible, and this says why."""
        raise DepthrouteError(
            "routing cannot be merged into the base weights: its weights over depth are a softmax "
            "of each token's own activations, so no fixed matrices compute the same. Keep the "
            "routed model, or save_pretrained(adapter_only=True) and attach it to its base"
        )

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Site):
            module.reset_parameters()
        else:
            super()._init_weights(module)


def routed_model_class(architecture: Architecture, config_class: Any) -> Any:
    """``RoutedLlamaForCausalLM`` for the Llama entry, and so on."""
    base = getattr(transformers, architecture.causal_lm)
    name = f"Routed{architecture.causal_lm}"
    body = {
        "__module__": __name__,
        "architecture": architecture,
        "config_class": config_class,
        "config": None,
        "__annotations__": {"config": config_class},
    }
    model_class = type(name, (RoutedCausalLM, base), body)
    setattr(sys.modules[__name__], name, model_class)
    return model_class


def __getattr__(name: str) -> Any:
    """Classes are made when first needed; unpickling in a new process needs them by name."""
    from depthroute.models.architecture import ARCHITECTURES
    from depthroute.models.auto import routed_config_class

    for architecture in ARCHITECTURES.values():
        if name == f"Routed{architecture.causal_lm}":
            routed_config_class(architecture)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
