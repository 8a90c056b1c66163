"""Whether the sdist and the wheel install and run in an empty environment: ``make test-wheel``.

With the standard library alone, and from a folder that holds nothing of the repository.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "build" / "dist"
CONVERSION = """
import torch, transformers, depthroute as dr
assert "site-packages" in dr.__file__, dr.__file__
shape = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3)
config = transformers.LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1)
plain, ids = transformers.LlamaForCausalLM(config).eval(), torch.arange(12)[None]
routed = dr.convert(plain, dr.RoutingConfig("delta", num_blocks=2), verify=ids)
routed.save_pretrained("routed")
again = transformers.AutoModelForCausalLM.from_pretrained("routed").eval()
assert torch.equal(again(ids).logits, routed(ids).logits)
"""
COMPARISON = ("compare", "--preset", "tiny", "--methods", "standard,delta", "--steps", "2")
COMPARISON += ("--seeds", "1", "--out", "run")


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        builder = environment(folder / "builder")
        run(builder, "-m", "pip", "install", "--quiet", "build")
        shutil.rmtree(DIST, ignore_errors=True)
        run(builder, "-m", "build", "--outdir", DIST, ROOT)
        (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
        check_contents(wheel)
        python = environment(folder / "empty")
        constraints = ROOT / "constraints.txt"
        run(python, "-m", "pip", "install", "--quiet", "--no-compile", "-c", constraints, wheel)
        use(python, folder / "wheel", wheel)
        run(python, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", sdist)
        use(python, folder / "sdist", wheel)
    print(f"{wheel.name} and {sdist.name} install and run")


def environment(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def run(python: Path, *arguments: object, cwd: Path | None = None) -> str:
    command = [str(python), *map(str, arguments)]
    print("$", *command, flush=True)
    ended = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        sys.exit(f"{' '.join(command)}\nended with {ended.returncode}:\n{ended.stdout}")
    return ended.stdout


def check_contents(wheel: Path) -> None:
    """All modules and data of the package, and nothing beside it."""
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "depthroute"
    files = [f for f in package.rglob("*") if f.suffix in (".py", ".html", ".typed")]
    missing = {f.relative_to(package.parent).as_posix() for f in files} - names
    foreign = {n for n in names if not n.startswith("depthroute")}
    if missing or foreign:
        sys.exit(f"{wheel.name} lacks {sorted(missing)} and holds {sorted(foreign)} beside")


def use(python: Path, folder: Path, wheel: Path) -> None:
    """What a user does first; each ends with status 0 and leaves what it says."""
    folder.mkdir()
    command = ("-m", "depthroute")
    version = run(python, *command, "--version", cwd=folder).split()[-1]
    if f"-{version}-" not in wheel.name:
        sys.exit(f"depthroute --version says {version} and the wheel is {wheel.name}")
    run(python, *command, "presets", cwd=folder)
    run(python, "-W", "ignore", "-c", CONVERSION, cwd=folder)
    run(python, *command, *COMPARISON, cwd=folder)
    run(python, *command, "report", "run", "--out", "page.html", cwd=folder)
    left = [folder / "page.html", folder / "run" / "summary.json", folder / "routed" / "README.md"]
    if missing := [str(path) for path in left if not path.is_file()]:
        sys.exit(f"not written: {', '.join(missing)}")


if __name__ == "__main__":
    main()
