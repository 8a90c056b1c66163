"""`depthroute runs`: which there are, how far they are, and how to go on."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from depthroute.cli.app import AsJson, Commands, app
from depthroute.cli.terminal import PlainConsole, output, print_json, print_table

runs = Commands(rich_markup_mode="markdown")
app.add_typer(runs, name="runs")
FOLDER = Path("runs")


@runs.callback(
    invoke_without_command=True, epilog="Example: `depthroute runs --folder experiments`"
)
def list_all(
    context: typer.Context,
    folder: Annotated[Path, typer.Option(help="Where runs are looked for.")] = FOLDER,
    as_json: AsJson = False,
) -> None:
    """List runs: method, steps, loss, state, and the commands that go on with unfinished ones."""
    if context.invoked_subcommand is not None:
        return
    from depthroute.runs.listing import list_runs

    found = list_runs(folder)
    if as_json:
        print_json([run.to_dict() for run in found])
        return
    if not found:
        output().print(f"no runs in {str(folder)!r}; depthroute train or compare makes one")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "method", "steps", "loss", "state"):
        is_number = name in ("steps", "loss")
        table.add_column(
            name, overflow="fold", no_wrap=is_number, justify="right" if is_number else "left"
        )
    for run in found:
        table.add_row(_name(run, folder), _methods(run), _steps(run), _loss(run), run.state)
    print_table(table)
    commands = [run.resume for run in found if run.resume is not None]
    if commands:
        output().print("\n".join(["go on with:", *(f"  {command}" for command in commands)]))


@runs.command(epilog="Example: `depthroute runs show runs/book`")
def show(
    run: Annotated[Path, typer.Argument(help="A run directory, or its name in runs/.")],
    as_json: AsJson = False,
) -> None:
    """Show one run: what was run on what, how far it came, and the commands for what comes next."""
    from depthroute.runs.listing import is_run, read

    if not is_run(run) and is_run(FOLDER / run):  # as the list names it
        run = FOLDER / run
    if not is_run(run):
        from depthroute.runs.directory import RunError

        raise RunError(
            f"{str(run)!r} is no run directory: config.json or metrics.jsonl is missing; "
            "`depthroute runs` lists those there are"
        )
    listed, about = read(run), _about(run)
    if as_json:
        print_json(listed.to_dict() | {"about": about, "next": _next(listed)})
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    changed = datetime.fromtimestamp(listed.changed)
    rows = {"run": str(run), "state": f"{listed.state}, last written {changed:%Y-%m-%d %H:%M:%S}"}
    rows |= {"command": listed.kind, "methods": ", ".join(listed.methods) or "-"}
    rows |= {"steps": _steps(listed), "validation loss": _loss(listed)} | about
    for name, value in rows.items():
        table.add_row(name, str(value))
    PlainConsole().print(table)
    output().print("\n".join(["next:", *(f"  {command}" for command in _next(listed))]))


def _about(path: Path) -> dict[str, str]:
    """What the run was run on, as far as its configuration says it."""
    from depthroute.errors import DepthrouteError
    from depthroute.runs.directory import RunDirectory

    try:
        config = RunDirectory(path).read_json("config.json")
    except DepthrouteError:
        return {}  # its state says so
    preset, environment = config.get("preset"), config.get("environment") or {}
    known = {
        "model": preset.get("name") if isinstance(preset, dict) else config.get("base"),
        "data": (config.get("data") or {}).get("name"),
        "seeds": ", ".join(map(str, config.get("seeds", ()))) or None,
        "device": config.get("device"),
        "settings": ", ".join(
            f"{key}={value}"
            for key, value in (config.get("train") or {}).items()
            if value is not None
        ),
        "depthroute": environment.get("depthroute"),
    }
    return {key: str(value) for key, value in known.items() if value}


def _next(run: Any) -> list[str]:
    import shlex

    if run.resume is not None:
        return [run.resume]
    commands = [["report", str(run.path)]]
    model = run.path / "model"
    if run.state == "finished" and model.is_dir():
        commands += [["generate", str(model), "--prompt", "The"]]
        commands += [["eval", str(model), "--perplexity", "FILE"]]
    return [shlex.join(["depthroute", *words]) for words in commands]


def _name(run: Any, folder: Path) -> str:
    path = run.path
    return str(path.relative_to(folder)) if path != folder and folder in path.parents else str(path)


def _methods(run: Any) -> str:
    if len(run.methods) > 3:
        return f"{run.kind} of {len(run.methods)}"
    return ", ".join(run.methods) or run.kind


def _steps(run: Any) -> str:
    if run.steps_in_all is None:
        return "-"
    done = f"{run.steps:,}"
    return done if run.steps == run.steps_in_all else f"{done} of {run.steps_in_all:,}"


def _loss(run: Any) -> str:
    if run.loss is None:
        return "-"
    return f"{run.loss:.4f}" + ("" if run.best_method is None else f" {run.best_method}")
