"""What a routed decoder and a routed causal model have in common: sites, saving, loading."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from torch import nn

from depthroute.errors import DepthrouteError
from depthroute.models import saving
from depthroute.models.architecture import Architecture
from depthroute.models.folder import check_weights
from depthroute.models.loaded import check_tensors, in_one_line
from depthroute.nn import Site, Sites
from depthroute.plan import Plan

if TYPE_CHECKING:
    _Base = transformers.PreTrainedModel
else:
    _Base = object


class RoutedPreTrained(_Base):
    architecture: Architecture

    @property
    def sites(self) -> Sites:
        """Every site in reading order, by name: ``layers.3.attention``, ..., ``final``.

        Those in use, where PEFT keeps a trained copy beside the original.
        """
        return self.base_model.routing.active  # pyright: ignore[reportAttributeAccessIssue]

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
        with in_one_line(pretrained_model_name_or_path):
            if pretrained_model_name_or_path and os.path.isdir(pretrained_model_name_or_path):
                config: Any = kwargs.get("config")
                values = config.to_dict() if hasattr(config, "to_dict") else {}
                check_weights(os.fspath(pretrained_model_name_or_path), values, kwargs)
            kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
            loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model, info = loaded
        check_tensors(pretrained_model_name_or_path, model, info)
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
