"""`depthroute plan`: what a layout of processes costs, before there are any."""

from dataclasses import replace
from typing import Annotated, Any

import typer

from depthroute.checks import check_object
from depthroute.cli.app import AsJson, Preset, app
from depthroute.cli.options import MeshOptions, RoutingOptions, Shape, assigned
from depthroute.cli.terminal import output, print_json
from depthroute.errors import ConfigError

SETTINGS = ("batch_size", "sequence_length", "accumulation", "precision", "gradient_checkpointing")
"""Of training, those that a plan depends on."""


@app.command(
    epilog="Example: `depthroute plan --preset delta-7.57b --pp 8 --chunks 4 --micro-batches 32 "
    "--set precision=bf16`"
)
def plan(
    *,
    preset: Preset = "tiny",
    base: Annotated[
        str | None,
        typer.Option(help="Instead: folder or hub id of a plain model, whose config.json is read."),
    ] = None,
    routing: RoutingOptions,
    freeze_base: Annotated[
        bool, typer.Option("--freeze-base", help="Train the routing parameters alone.")
    ] = False,
    model: Shape = None,
    mesh: MeshOptions,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help=f"key=value, of {', '.join(SETTINGS)}. Repeatable."),
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="GB that a device has; refuse what needs more.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what every stage has and sends, what a rank holds and how long it waits.

    Nothing is loaded and no process is started: sizes are those of the model's own forward without
    numbers, and `depthroute train` with the same flags sends what is said here.
    """
    changes = assigned(settings, "--set")
    check_object("setting of a plan", changes, SETTINGS)
    layout, shape = mesh.layout(), assigned(model, "--model")
    if base is not None and (shape or preset != "tiny"):
        raise ConfigError("--base brings its own shape; leave out --preset and --model")
    if base is None and freeze_base:
        raise ConfigError("--freeze-base is for a pretrained model; add its --base")
    chosen = routing.chosen(None if base is None else "delta")
    from depthroute.parallel.planner import forecast, refuse_too_large

    name, recipe, build = (
        _of_base(base, chosen, freeze_base) if base else _of_preset(preset, shape, chosen)
    )
    values = _settings(recipe, changes, name)

    def make(layout: Any, recomputes: bool) -> Any:
        return forecast(
            build(),
            layout,
            batch_size=values.batch_size,
            length=values.sequence_length,
            accumulation=values.accumulation,
            precision=values.precision,
            recomputes=recomputes,
        )

    whole = build()
    about = {
        "model": name,
        "method": whole.config.routing_config().name,
        "parameters": sum(p.numel() for p in whole.parameters()),
        "routing_parameters": sum(p.numel() for p in whole.routing_parameters()),
        "freeze_base": freeze_base,
        "train": {setting: getattr(values, setting) for setting in SETTINGS},
    }
    result = make(layout, values.gradient_checkpointing)
    if memory is not None:
        refuse_too_large(result, memory, make)
    if as_json:
        print_json(about | result.to_dict())
        return
    console = output()
    console.print(
        f"{name}, {about['method']}: {about['parameters']:,} parameters, "
        f"{about['routing_parameters']:,} of them routing{', the rest frozen' * freeze_base}; "
        f"{values.precision}"
        f"{', recomputed' * values.gradient_checkpointing}"
    )
    console.print(str(result))


def _of_preset(preset: str, shape: dict[str, Any], routing: Any) -> Any:
    """Its name, its recipe, and what builds it on ``meta``."""
    from depthroute import presets

    chosen = presets.with_model(presets.get(preset), shape)
    chosen = replace(chosen, routing=routing or chosen.routing)
    return preset, chosen.recipe, lambda: presets.build(chosen, device="meta")


def _of_base(base: str, routing: Any, freeze_base: bool) -> Any:
    import torch

    from depthroute.models import attention
    from depthroute.models.architecture import architecture_for
    from depthroute.models.convert import converted_config
    from depthroute.models.families import routed_family
    from depthroute.models.loading import plain_config
    from depthroute.train.launch import FINETUNING

    plain = plain_config(base)

    def build() -> Any:
        config = converted_config(plain, routing)
        with torch.device("meta"):
            model = attention.use(
                routed_family(architecture_for(plain)).causal_lm._from_config(config)
            )
        if freeze_base:
            model.freeze_base()
        return model

    return base, FINETUNING, build


def _settings(recipe: Any, changes: dict[str, Any], name: str) -> Any:
    """Those of training; steps and rate, which a plan does not depend on, need not be known."""
    from depthroute.train.settings import from_recipe

    known = replace(recipe, steps=recipe.steps or 1, lr=recipe.lr or 1.0)
    return from_recipe(known, changes, f"preset {name!r}")
