"""`depthroute serve`: a model behind an OpenAI-compatible endpoint."""

import os
import sys
from typing import Annotated

import typer

from depthroute.cli.app import app
from depthroute.cli.terminal import notes


@app.command(epilog="Example: `depthroute serve ./smol-delta --port 8080 -- --max-model-len 2048`")
def serve(
    model: Annotated[str, typer.Argument(help="Folder or hub id, plain or routed.")],
    options: Annotated[
        list[str] | None, typer.Argument(help="Options of the engine itself, after `--`.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="auto (vllm if it can, else transformers), vllm or transformers.")
    ] = "auto",
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets others in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    dtype: Annotated[
        str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")
    ] = "auto",
) -> None:
    """Serve a model with whichever engine is installed: completions, chat, streaming.

    The folder, the tokenizer and the port are looked at first; then the engine takes over this
    process, and with it Ctrl-C and the exit status.
    """
    from depthroute.serving.command import server

    chosen = server(model, engine, host=host, port=port, dtype=dtype, options=options or ())
    notes().print(f"engine: {chosen.engine} ({chosen.reason})")
    notes().print(f"http://{host}:{port}/v1")
    sys.stdout.flush()
    os.execv(chosen.command[0], chosen.command)
