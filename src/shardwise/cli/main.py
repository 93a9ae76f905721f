"""The commands and their options; the files beside this one implement them."""

from __future__ import annotations

import sys
from inspect import cleandoc
from typing import Any

import click

from shardwise import __version__

_MODELS = ("dlrm", "gpt")
_EXAMPLES = """\b
Examples:
  shardwise demo
  shardwise demo --model gpt --ranks 2
  shardwise explain my_model:make --plan plan.toml --mesh dp=2,tp=4
  shardwise check my_model:make --plan plan.toml --ranks 1,2,4,8
  shardwise plan tables.toml --ranks 64 --hosts 8 --memory 80GB -o plan.toml
  shardwise rules aten.mm
  shardwise checkpoint verify runs/step-00000100
"""
_TARGET = """

TARGET names a callable, pkg.module:factory, that returns a module and a sample batch: a tuple is
taken as the module's arguments, a dict as its keyword arguments.
"""


class Commands(click.Group):
    """Prints an error as one message; --debug shows the traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            from shardwise.cli.console import exit_status, message

            click.echo(f"Error: {message(error)}", err=True)
            ctx.exit(exit_status(error))


@click.group(
    cls=Commands, epilog=_EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="shardwise")
@click.option("--debug", is_flag=True, help="Show a traceback with an error.")
def main(debug: bool) -> None:
    """Shard tensors, embedding tables and layers over many devices, with one device's results."""


_plan_option = click.option(
    "--plan",
    metavar="FILE",
    type=click.Path(),
    help="A plan of modules or of tables, TOML or JSON.",
)
_groups_option = click.option(
    "--fully-shard",
    metavar="PATTERN",
    multiple=True,
    help="Fully shard the modules that match, such as layers.*, then the model, along the axis "
    "fsdp, or else the last data axis.",
)
_context_option = click.option(
    "--context",
    metavar="PATTERN",
    multiple=True,
    help="Modules whose attention is split along the axis cp, such as layers.*.self_attn.",
)
_recompute_option = click.option(
    "--recompute",
    metavar="PATTERN",
    multiple=True,
    help="Modules that backward recomputes (activation checkpointing).",
)


@main.command()
@click.option("--model", type=click.Choice(_MODELS), default="dlrm", show_default=True)
@click.option("--ranks", type=click.IntRange(1), default=4, show_default=True)
@click.option("--processes", type=click.IntRange(1), help="Number of real processes, over gloo.")
@click.option("--steps", type=click.IntRange(1), help="Training steps.")
@click.option("--seed", type=int, default=0, show_default=True)
@_plan_option
@click.option(
    "--data", metavar="FILE", type=click.Path(), help="Train on a file in Criteo's format."
)
@click.option("--report", metavar="FILE", default="report.html", show_default=True)
@click.option(
    "--checkpoint-every", metavar="N", type=click.IntRange(1), help="Save after every N steps."
)
@click.option(
    "--checkpoints", metavar="FOLDER", default="checkpoints", show_default=True, type=click.Path()
)
@click.option(
    "--keep", type=click.IntRange(1), default=2, show_default=True, help="Checkpoints to keep."
)
@click.option(
    "--resume", is_flag=True, help="Continue from the latest checkpoint, if there is one."
)
@click.pass_context
def demo(ctx: click.Context, /, **options: Any) -> None:
    """Train a small model on one device and sharded, and compare.

    dlrm is a recommender whose tables are sharded by a mixed plan, on a synthetic click log; gpt a
    tensor-parallel language model on the text that `help()` shows.

    Works under torchrun too; its processes are then the ranks. Exit status 1 if the numbers differ
    from one device's, 3 if the run broke: --resume continues from the last checkpoint.
    """
    from shardwise.cli.console import console
    from shardwise.demo.run import Options, run_demo

    ctx.exit(run_demo(Options(**options), console()))


@main.command(
    epilog="\b\nExample:\n  shardwise explain my_model:make --plan plan.toml --mesh dp=2,tp=4\n"
)
@click.argument("target")
@_plan_option
@click.option("--mesh", default="tp=4", show_default=True, help="Axes and their sizes.")
@_groups_option
@_context_option
@_recompute_option
@click.option(
    "--optimizer",
    type=click.Choice(["adamw", "adam", "sgd", "adagrad", "rowwise_adagrad"]),
    help="[default: adamw; with --ranks and tables rowwise_adagrad, as in plan]",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--html", metavar="FILE", help="Write the report as a page.")
@click.option(
    "--ranks",
    type=click.IntRange(1),
    help="Count bytes for this many ranks from layouts alone; nothing is allocated.",
)
@click.option(
    "--hosts", type=click.IntRange(1), default=1, help="Number of hosts, with --ranks and tables."
)
@click.option("--batch", type=click.IntRange(1), help="Examples in a step, with --ranks.")
@click.option("--constants", default="cpu", help="cpu, h200, or a file, with --ranks and tables.")
@click.pass_context
def explain(
    ctx: click.Context,
    /,
    ranks: int | None,
    hosts: int,
    batch: int | None,
    constants: str,
    **options: Any,
) -> None:
    """Show what a training step sends and holds.

    Simulates one step and lists every collective, the memory of each rank, and the placements of
    tensors. With --ranks nothing is simulated: a plan of tables is priced, and for a model of
    layers the first and the last rank are played without values, for 10,000 ranks and more.
    """
    from shardwise.cli.model import is_of_tables, run_explain

    of_tables = is_of_tables(options["target"], options["plan"])
    if ranks is None:
        if options["target"].endswith((".toml", ".json")):
            raise click.UsageError("A file of tables is priced for a number of --ranks: give one.")
        _refuse(ctx, ("hosts", "batch", "constants"), "goes with --ranks")
    elif not of_tables:
        _refuse(ctx, ("hosts", "constants"), "is for plans of tables")
    if ranks is not None and of_tables:
        from shardwise.cli.plan import run_price

        steps = ("mesh", "fully_shard", "context", "recompute", "seed", "html")
        _refuse(ctx, steps, "is for a step of a model; with --ranks a plan of tables is priced")
        chosen = options["optimizer"] or "rowwise_adagrad"
        tables = "adam" if chosen == "adamw" else chosen
        run_price(
            options["target"], options["plan"], ranks, hosts, batch, tables, constants,
            options["as_json"],
        )  # fmt: skip
        return
    options["optimizer"] = options["optimizer"] or "adamw"
    if ranks is not None and not _is_given(ctx, "mesh"):
        options["mesh"] = f"dp={ranks}"
    run_explain(**options, ranks=ranks, batch=batch)


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def _refuse(ctx: click.Context, names: tuple[str, ...], why: str) -> None:
    """Raise for an option that would be ignored."""
    for name in names:
        if _is_given(ctx, name):
            raise click.UsageError(f"--{name.replace('_', '-')} {why}.")


@main.command(
    epilog="""\b
Examples:
  shardwise check my_model:make --plan plan.toml --ranks 1,2,4,8
  shardwise check my_model:make --plan plan.toml --mesh dp=2,tp=2
  shardwise check my_model:make --mesh dp=4 --data fully_shard --options clip,late
"""
)
@click.argument("target")
@_plan_option
@click.option(
    "--ranks",
    help="Numbers of ranks, or meshes as dp=2,tp=2 separated by semicolons. "
    "[default: 1,2,4, and none with --mesh]",
)
@click.option("--mesh", help="A mesh (or several) for training steps, with the options below.")
@_groups_option
@_context_option
@_recompute_option
@click.option(
    "--data",
    type=click.Choice(["data_parallel", "fully_shard"]),
    default="data_parallel",
    show_default=True,
    help="How the ranks of data axes train the model.",
)
@click.option(
    "--options",
    default="",
    help="Options of one training run: accumulate,clip,... Default: a run for each that applies.",
)
@click.option("--processes", is_flag=True, help="Use real processes instead of simulated ranks.")
@click.option("--tolerance", type=float, default=1e-4, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.pass_context
def check(ctx: click.Context, /, **options: Any) -> None:
    """Compare a sharded model with one device.

    Compares outputs, gradients, updated parameters and random numbers. With --mesh, it also trains
    the model for three steps, plainly and with accumulation, clipping, copies, frozen parameters
    and so on, and compares all parameters. Exit status 1 if something differs, 2 if something was
    refused.
    """
    from shardwise.cli.model import run_check

    ctx.exit(run_check(**options))


@main.command(
    epilog="""\b
Examples:
  shardwise plan tables.toml --ranks 64 --hosts 8 --memory 80GB -o plan.toml
  shardwise plan my_model:make --ranks 8 --batch 65536
  shardwise plan --calibrate constants.json
"""
)
@click.argument("source", required=False)
@click.option("--ranks", type=click.IntRange(1), default=8, show_default=True)
@click.option("--hosts", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--memory", metavar="SIZE", help="Memory of one rank, such as 80GB; by default unlimited."
)
@click.option("--batch", type=click.IntRange(1), help="Bags per feature in a step, over all ranks.")
@click.option(
    "--optimizer",
    type=click.Choice(["sgd", "adagrad", "rowwise_adagrad", "adam"]),
    default="rowwise_adagrad",
    show_default=True,
)
@click.option(
    "--exchange-dtype",
    type=click.Choice(["bfloat16", "float16"]),
    help="Allow this dtype for sending rows and gradients; it is used if that is faster.",
)
@click.option("-o", "--output", metavar="FILE", help="Write the plan to a .toml or .json file.")
@click.option("--sample", metavar="FILE:NAME", help="A callable that returns batches to measure.")
@click.option(
    "--seconds", type=float, default=60.0, show_default=True, help="Limit of CPU seconds."
)
@click.option(
    "--gap",
    type=float,
    default=0.005,
    show_default=True,
    help="Relative gap to stop at; plans within it count as equal, apart from kernel calls.",
)
@click.option("--constants", default="cpu", show_default=True, help="cpu, h200, or a file.")
@click.option("--calibrate", "calibrate_to", metavar="FILE", help="Measure this machine first.")
@click.option("--compare", "compared", metavar="PLAN", multiple=True, help="Price other plans too.")
@click.option("--no-solver", is_flag=True, help="Only the built-in search, without HiGHS.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--html", metavar="FILE", help="Write the plan as a page.")
def plan(**options: Any) -> None:
    """Find the best plan for tables, with a proof.

    SOURCE is a file of tables, or pkg.module:factory, which returns a model (and a batch) whose
    collections are planned. Prints the cost, a lower bound and what limits the plan.
    """
    from shardwise.cli.plan import run_plan

    run_plan(**options)


for _command in (explain, check):
    _command.help = f"{cleandoc(_command.help or '')}{_TARGET}"


@main.group(
    epilog="""\b
Examples:
  shardwise checkpoint inspect runs/step-00000100
  shardwise checkpoint verify runs/step-00000100
  shardwise checkpoint convert runs/step-00000100 model.safetensors --prefix model.
"""
)
def checkpoint() -> None:
    """Look into checkpoints, check and convert them.

    Shardwise's own, and Hugging Face's.
    """


@checkpoint.command()
@click.argument("path", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def inspect(path: str, as_json: bool) -> None:
    """Show what a checkpoint holds.

    Lists tensors, their chunks and files, and plain values. Reads no tensor.
    """
    from shardwise.cli.checkpoint import run_inspect

    run_inspect(path, as_json)


@checkpoint.command()
@click.argument("path", type=click.Path())
@click.pass_context
def verify(ctx: click.Context, path: str) -> None:
    """Read a checkpoint and list all damage.

    Reads every byte. Exit status 1 if any is damaged.
    """
    from shardwise.cli.checkpoint import run_verify

    ctx.exit(run_verify(path))


@checkpoint.command()
@click.argument("source", type=click.Path())
@click.argument("target", type=click.Path())
@click.option(
    "--prefix", default="", help="Only tensors whose names start so; the prefix is removed."
)
@click.option(
    "--max-file-bytes",
    type=click.IntRange(1),
    default=5 << 30,
    show_default=True,
    help="Largest size of a file in a folder.",
)
def convert(source: str, target: str, prefix: str, max_file_bytes: int) -> None:
    """Rewrite a checkpoint with every tensor whole, in little memory.

    A TARGET that ends in .safetensors is one file, of tensors only; anything else is a folder that
    keeps plain values and has checksums.
    """
    from shardwise.cli.checkpoint import run_convert

    run_convert(source, target, prefix, max_file_bytes)


@main.command()
@click.argument("op", required=False)
def rules(op: str | None) -> None:
    """Count the ops with rules, or show one.

    With OP (mm, aten.mm.default), shows the ways to run it on shards.
    """
    from shardwise.cli.support import run_rules

    run_rules(op)


@main.command()
@click.pass_context
def doctor(ctx: click.Context) -> None:
    """Check what works on this machine, and why something does not."""
    from shardwise.cli.support import run_doctor

    ctx.exit(run_doctor())


@main.command(epilog="\b\nExample:\n  shardwise completion bash >> ~/.bashrc\n")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script for shell completion."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None, "click knows these shells"
    click.echo(found(main, {}, "shardwise", "_SHARDWISE_COMPLETE").source())


if __name__ == "__main__":
    sys.exit(main())
