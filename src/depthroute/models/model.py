"""Routed models: a family's own decoder (``LlamaModel``) over routed layers, and the family's
causal language model over that. Forward, loss and generate are the family's."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import transformers
from torch import Tensor, nn
from transformers.masking_utils import create_masks_for_generate

from depthroute import ops
from depthroute.config import RoutingConfig
from depthroute.errors import ConfigError, DepthrouteError, NothingToShare
from depthroute.models import attention, depth_attention, saving, sharing
from depthroute.models.adoption import adopted, plain_class
from depthroute.models.architecture import Architecture, architecture_for
from depthroute.models.configuration import has_shim
from depthroute.models.folder import check_weights
from depthroute.models.loaded import check_tensors, in_one_line
from depthroute.models.regions import NORM, Regions
from depthroute.models.routed import LoopedLayers, plain_layer, routed_layer
from depthroute.nn import Site, Sites
from depthroute.ops.private.regions import call_through
from depthroute.plan import Plan

logger = logging.getLogger("depthroute")

if TYPE_CHECKING:
    _Base = transformers.PreTrainedModel
else:
    _Base = object


class RoutedModel(_Base):
    """What a routed decoder and a routed model with a head have in common."""

    architecture: Architecture
    may_have_new_head: ClassVar[bool] = False
    """Whether a checkpoint of another model of the family may be loaded, without its head."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._route(stored_plan(config))
        self.post_init()

    @classmethod
    def adopting(cls, model: Any, config: Any) -> Any:
        """A routed model of what the family's ``model`` holds, with the configuration ``config``
        in place of its own."""
        _refuse_own_forwards(model)
        _refuse_other_classes(cls.architecture, model)
        routed = adopted(cls, model)
        _set_config(routed, config)
        routed._route(stored_plan(config))
        return routed

    def _route(self, plan: Plan) -> None:
        """Put routed modules in the place of the family's, in a model that has none yet."""
        raise NotImplementedError

    @property
    def _decoder(self) -> RoutedDecoder:
        return self.base_model  # pyright: ignore[reportReturnType]

    @property
    def sites(self) -> Sites:
        """Every site in reading order, by name: ``layers.3.attention``, ..., ``final``.

        Those in use, where PEFT keeps a trained copy beside the original.
        """
        return self._decoder.routing.active

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
        routing = list(self.routing_parameters())
        if not routing:
            raise ConfigError(
                "freezing the base trains the routing alone, and that of "
                f"{self.config.routing_config().name} has no parameters; leave it out, or choose "
                "another method"
            )
        self.requires_grad_(False)
        for parameter in routing:
            parameter.requires_grad_(True)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *args: Any,
        is_main_process: bool = True,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write configuration, weights and a model card, or with ``adapter_only=True`` the routing
        alone; with ``shim=True`` also what ``trust_remote_code=True`` needs, see docs/sharing.md.

        The folder changes at once when everything is written; an interrupted save leaves what was
        there, and a model that this library did not write is never replaced. Other arguments are
        those of ``PreTrainedModel.save_pretrained``.
        """
        if not is_main_process:
            return super().save_pretrained(save_directory, *args, is_main_process=False, **kwargs)
        names = sharing.HUB_OPTIONS if push_to_hub else ()
        for_hub = {name: kwargs.pop(name) for name in names if name in kwargs}
        with saving.replacing(save_directory) as folder:
            self.write_into(folder, *args, **kwargs)
        if push_to_hub:
            repo_id = for_hub.pop("repo_id", Path(save_directory).name)
            self.push_to_hub(repo_id, **for_hub, **kwargs)
        return None

    def write_into(
        self,
        folder: Path,
        *args: Any,
        adapter_only: bool = False,
        shim: bool = False,
        card_name: str = "PATH OR HUB ID OF THIS FOLDER",
        training: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """As :meth:`save_pretrained`, into a folder that is nobody's yet; for the card, what it is
        loaded by and what came of training."""
        if adapter_only and shim:
            raise ConfigError(
                "shim=True is for a whole model, which transformers loads; an adapter is attached "
                "by depthroute.load_adapter. Leave out one of shim and adapter_only"
            )
        if adapter_only:
            saving.save_adapter(self, folder)
        else:
            super().save_pretrained(folder, *args, **kwargs)
            if shim or has_shim(self.config):
                sharing.put_shim(folder)
        card = sharing.card(self, name=card_name, adapter_only=adapter_only, training=training)
        (folder / saving.CARD).write_text(card, encoding="utf-8")

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:  # pyright: ignore
        """Upload what :meth:`save_pretrained` writes, model card included. Arguments are those of
        transformers' and of :meth:`save_pretrained`; a card there that is somebody's own stays."""
        return sharing.push(self, repo_id, **kwargs)

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
        check_tensors(pretrained_model_name_or_path, model, info | model._without_new_head(info))
        return (model, info) if wants_info else model

    def _without_new_head(self, info: dict[str, Any]) -> dict[str, Any]:
        """The missing keys, but for those of a head that the checkpoint was never said to have."""
        missing = set(info["missing_keys"])
        if self.may_have_new_head and type(self).__name__ not in (self.config.architectures or ()):
            new = {key for key in missing if not key.startswith(f"{self.base_model_prefix}.")}
            if new:
                logger.warning("new, to be trained: %s", ", ".join(sorted(new)))
            missing -= new
        return {"missing_keys": missing}

    def merge(self) -> None:
        """Not possible, and this says why."""
        raise DepthrouteError(
            "routing cannot be merged into the base weights: a place reads a weighted sum of what "
            "came before, mostly with weights of each token's own, and no matrix of the base "
            "computes that. Keep the routed model, or save_pretrained(adapter_only=True) and "
            "attach it to its base"
        )

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Site):
            module.reset_parameters()
        else:
            super()._init_weights(module)


class RoutedDecoder(RoutedModel):
    """Mixed into a family's decoder."""

    routing: Sites

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # known here alone: positions that are given may restart, those a decoder makes never do
        has_own_positions = kwargs.get("position_ids") is None and len(args) < 3
        with attention.whole_sequences(has_own_positions):
            return super().__call__(*args, **kwargs)

    def _route(self, plan: Plan) -> None:
        spec, config = self.architecture, self.config
        plain = [*getattr(self, spec.layers)][: plan.num_layers // plan.loops]
        _refuse_own_forwards(*self.children(), *plain)
        _refuse_other_classes(spec, *plain)
        attentions = [spec.attention.of(layer) for layer in plain]
        _refuse_attentions(attentions, plan, spec)
        if plan.changes_values:
            depth_attention.enable(attentions, config)
        if plan.key_norm == "after_rope":
            depth_attention.delay_key_norms(attentions, spec.model_type)
        layers = [routed_layer(layer, spec, config) for layer in plain]
        layers[0].decoder = (self,)
        listed = LoopedLayers(layers, plan.loops) if plan.loops > 1 else nn.ModuleList(layers)
        setattr(self, spec.layers, listed)
        weight = next(filter(_is_wide, self.parameters()))
        sites = Sites(plan, config.hidden_size)
        self.routing = sites.to(device=weight.device, dtype=weight.dtype)
        names = {type(layer).__name__ for layer in layers}
        self._no_split_modules = names | set(self._no_split_modules or ())

    def reverted(self, config: Any) -> Any:
        """The family's decoder of what this one holds, with the configuration ``config``."""
        spec = self.architecture
        _refuse_own_forwards(self, *self.children(), *getattr(self, spec.layers))
        if self.plan.loops > 1:
            raise ConfigError(
                "a looped model has no plain counterpart: its layers are run "
                f"{self.plan.loops} times with the same weights"
            )
        plain = adopted(plain_class(type(self), RoutedDecoder), self)
        layers = [plain_layer(layer) for layer in getattr(self, spec.layers)]
        depth_attention.restore_key_norms([spec.attention.of(x) for x in layers])
        setattr(plain, spec.layers, nn.ModuleList(layers))
        del plain.routing
        plain._no_split_modules = _family_names(self._no_split_modules)
        _set_config(plain, config)
        return plain


class RoutedHead(RoutedModel):
    """Mixed into a family's decoder with a head, as ``...ForSequenceClassification``."""

    decoder_class: ClassVar[type[RoutedDecoder]]
    may_have_new_head = True

    def _route(self, plan: Plan) -> None:
        decoder: Any = self.base_model
        if not isinstance(decoder, RoutedDecoder):  # which AutoModel makes of the configuration
            decoder = self.decoder_class.adopting(decoder, self.config)
            setattr(self, self.base_model_prefix, decoder)
        self._no_split_modules = {
            *(decoder._no_split_modules or ()),
            *(self._no_split_modules or ()),
        }

    def reverted(self, config: Any) -> Any:
        """The family's model of what this one holds, with the configuration ``config``."""
        _refuse_own_forwards(self)
        plain = adopted(plain_class(type(self), RoutedHead), self)
        setattr(plain, self.base_model_prefix, self._decoder.reverted(config))
        plain._no_split_modules = _family_names(self._no_split_modules)
        _set_config(plain, config)
        return plain


class RoutedCausalLM(RoutedHead):
    """Mixed into a family's ``...ForCausalLM``."""

    may_have_new_head = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if RoutedCausalLM in cls.__bases__:
            cls.forward = _also_loss(cls.forward)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers. What the routing reads of its parameters is made once for all
        tokens."""
        with self.sites.holding(self.dtype):
            return super().generate(*args, **kwargs)  # pyright: ignore

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers: many prompts at a time, through a paged cache."""
        with attention.as_in_transformers(self):
            return super().generate_batch(*args, **kwargs)  # pyright: ignore

    def create_masks_for_generate(
        self, *, inputs_embeds: Tensor, attention_mask: Any, past_key_values: Any, **given: Any
    ) -> Any:
        """What ``generate`` hands to ``forward`` beside a cache that can be compiled with it."""
        inherited = getattr(super(), "create_masks_for_generate", None)
        is_token = inputs_embeds.shape[1] == 1
        if inherited is None and is_token and attention.is_left_to(self, past_key_values):
            return attention.whole_padding(attention_mask, past_key_values)
        given |= {"inputs_embeds": inputs_embeds, "past_key_values": past_key_values}
        make = inherited or create_masks_for_generate
        return make(attention_mask=attention_mask, **given)

    def summed_loss(
        self,
        targets: Tensor,
        *args: Any,
        chunk: int | None = None,
        tokens: slice | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Cross-entropy of ``targets`` in nats, summed, without whole logits: those of ``chunk``
        tokens are made at a time. ``tokens`` are those of each sequence that count, left out all.
        Other arguments are the decoder's.

        What lies between head and loss is what the architecture says, and the head a linear layer;
        :func:`depthroute.train.loss.obstacle` knows where that is not so.
        """
        head: Any = self.get_output_embeddings()
        hidden = self._decoder(*args, **kwargs)[0]
        if tokens is not None:
            hidden, targets = hidden[:, tokens], targets[:, tokens]
        options = self.architecture.logit_options(self.config)
        return ops.linear_cross_entropy(
            hidden, head.weight, targets, head.bias, chunk=chunk, **options
        )


def _also_loss(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` that given ``targets`` returns their summed loss: as a call of the model, which
    DDP, FSDP2 and hooks see."""

    @wraps(forward)  # generation asks for the signature
    def forward_or_loss(self: Any, *args: Any, targets: Tensor | None = None, **kwargs: Any) -> Any:
        if targets is None:
            return forward(self, *args, **kwargs)
        return self.summed_loss(targets, *args, **kwargs)

    return forward_or_loss


def compile_regions(model: nn.Module, backend: Any = "inductor", **options: Any) -> None:
    """Compile, in place, what the layers of a routed ``model`` have in common.

    ``options`` are those of :func:`torch.compile`; every region is one graph. Parameters keep their
    names, and a copy is not compiled, as after ``Module.compile``; calling it again starts anew.
    With a cache (``generate``) layers run uncompiled. A region that torch would compile more often
    than its limit allows raises.
    """
    decoders = [part for part in model.modules() if isinstance(part, RoutedDecoder)]
    if not decoders:
        raise ConfigError(
            f"compile_regions was given a {type(model).__name__}; give a routed model (of "
            "from_config or convert, method='standard' for a plain one), or use torch.compile"
        )
    if "fullgraph" in options:
        raise ConfigError("every region is compiled with fullgraph=True; leave fullgraph out")
    for decoder in decoders:
        regions, spec = Regions(backend=backend, **options), decoder.architecture
        for layer in getattr(decoder, spec.layers):
            layer.regions = regions
        call_through(getattr(decoder, spec.final_norm), partial(regions.call, NORM))


def recompute_layers(model: Any) -> None:
    """Keep only what each layer is given, and run it again in backward."""
    name = "activation_checkpointing_enable"
    if not hasattr(model, name):  # before transformers 5.23, which warns of the old name
        name = "gradient_checkpointing_enable"
    getattr(model, name)({"use_reentrant": False})


def plan_for(config: Any, routing: RoutingConfig, *, converting: bool = False) -> Plan:
    """The plan of a Hugging Face configuration whose ``num_hidden_layers`` counts every visit."""
    spec = architecture_for(config)
    return routing.resolve(
        config.num_hidden_layers,
        width=config.hidden_size,
        eps=getattr(config, spec.eps),
        converting=converting,
        sublayers=spec.sublayers(config),
    )


def stored_plan(config: Any) -> Plan:
    """That of a model's own configuration."""
    return plan_for(config, stored_routing(config, config.routing_config()))


def stored_routing(config: Any, routing: RoutingConfig) -> RoutingConfig:
    """``routing`` as it was saved. Two phases that share nothing are refused where they are asked
    for; what was saved with them before leaves the choice to the plan."""
    try:
        plan_for(config, routing)
    except NothingToShare:
        return replace(routing, evaluation="auto", group_size=None)
    return routing


def _set_config(model: Any, config: Any) -> None:
    """Point every module that holds a configuration of the model at the new one."""
    old = type(model.config)
    for module in model.modules():
        if isinstance(module.__dict__.get("config"), old):
            module.config = config


def _family_names(names: Any) -> set[str]:
    """Of modules that a device map keeps whole, without those of routed ones."""
    return {name for name in names or () if not name.startswith("Routed")}


def _refuse_own_forwards(*modules: nn.Module) -> None:
    """Where somebody has put a ``forward`` on a module itself, another class is in vain.

    The one that was put there would go on calling the class's of before.
    """
    for module in modules:
        if "forward" in vars(module):
            raise ConfigError(
                f"the model's {type(module).__name__} has a forward of its own, as accelerate "
                "gives it for a device_map over several devices or mixed precision, and patches "
                "do; convert or revert the model first, then spread, offload or patch it (a routed "
                "model that was saved is loaded with device_map like any other). What training in "
                "mixed precision leaves behind goes with `del model.forward`"
            )


def _refuse_other_classes(spec: Architecture, *modules: nn.Module) -> None:
    """A class of somebody else may compute anything, and the family's would take its place."""
    family = sys.modules[getattr(transformers, spec.causal_lm).__module__]
    for cls in map(type, modules):
        if getattr(family, cls.__name__, None) is not cls:
            raise ConfigError(
                f"the model's {cls.__module__}.{cls.__qualname__} is no class of "
                f"{family.__name__}, so what it computes would be lost; convert the family's own "
                "model, then compile, wrap or change it"
            )


def _is_wide(parameter: Tensor) -> bool:
    """Whether routing can be kept in its dtype; quantised weights are bytes or whole numbers."""
    return parameter.is_floating_point() and parameter.element_size() > 1


def _refuse_attentions(attentions: list[Any], plan: Plan, spec: Architecture) -> None:
    """Those that the plan's method cannot change as it would have to."""
    if plan.value_reads and spec.values is None:
        raise ConfigError(
            "routing.value_reads=true projects the values of an input of their own, and "
            f"{spec.model_type} makes keys and values of one latent; leave it out"
        )
    linear = ", ".join(str(i) for i, a in enumerate(attentions) if spec.is_linear(a))
    where = f"layers {linear} of this {spec.model_type} model have no keys and values"
    if linear and plan.changes_values:
        what = "routing.value_reads=true" if plan.value_reads else f"method={plan.method!r}"
        raise ConfigError(
            f"{what} changes the values of softmax attention, and {where}; use method='attnres' "
            "or 'delta', without value_reads"
        )
    if linear and plan.loops > 1:
        raise ConfigError(
            f"routing.loops={plan.loops} needs a cache with keys and values of every visit, and "
            f"{where}, whose one state the visits would overwrite; leave loops out"
        )
