"""`depthroute presets` and `depthroute env`: what there is and what is here."""

from typing import Any

from rich.table import Table

from depthroute.cli.app import AsJson, app
from depthroute.cli.terminal import output, print_json, print_table


@app.command(epilog="Example: `depthroute presets --json`")
def presets(as_json: AsJson = False) -> None:
    """List the presets: model shapes with their published training settings."""
    from depthroute.presets import PRESETS

    if as_json:
        print_json([p.to_dict() | {"method": p.routing.name} for p in PRESETS.values()])
        return
    table = Table()
    for name in ("preset", "what it is", "method", "steps", "lr"):
        table.add_column(name, no_wrap=name != "what it is")
    for preset in PRESETS.values():
        recipe, method = preset.recipe, preset.routing.name
        table.add_row(
            preset.name, preset.summary, method, str(recipe.steps or "-"), str(recipe.lr or "-")
        )
    print_table(table)


@app.command(epilog="Example: `depthroute env --json`")
def env(as_json: AsJson = False) -> None:
    """Versions, devices, and which backend each operator uses here and why."""
    from depthroute.runs import environment

    about: dict[str, Any] = environment.describe() | {"backends": environment.backends()}
    if as_json:
        print_json(about)
        return
    console = output()
    commit = f" (commit {about['commit']})" if about["commit"] else ""
    console.print(f"depthroute {about['depthroute']}{commit}")
    console.print(f"python {about['python']} on {about['platform']}")
    for name, version in about["packages"].items():
        console.print(f"{name} {version or 'not installed'}")
    for device in about["devices"]:
        details = ", ".join(f"{k} {v}" for k, v in device.items() if k not in ("device", "name"))
        console.print(f"{device['device']}: {device['name']}, {details}")
    for choice in about["backends"]:
        console.print(f"{choice['op']}: {choice['backend']} ({choice['reason']})")
