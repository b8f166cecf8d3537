"""``crossdock trace``: look at recorded routing, convert one's own, cut a part out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch import Tensor

from crossdock.dispatch import ExpertPlacement
from crossdock.launch.screen import make_console, make_table
from crossdock.launch.trace import Trace, read_trace, write_trace
from crossdock.launch.trace_convert import read_foreign
from crossdock.launch.yaml_file import shorten
from crossdock.scratch.errors import ConfigError

__all__ = ["app"]

app = typer.Typer(
    help="Recorded routing: show, convert, slice.", no_args_is_help=True, rich_markup_mode=None
)

TracePath = Annotated[Path, typer.Argument(metavar="TRACE", help="A trace (safetensors).")]
OutPath = Annotated[Path, typer.Argument(metavar="OUT", help="The trace to write.")]


@app.command()
def show(
    trace: TracePath,
    ep: Annotated[
        int, typer.Option(min=1, max=4096, help="EP size to show the load of each rank for.")
    ] = 8,
) -> None:
    """Show how skewed it is: by layer, and by rank at an EP size."""
    recorded = read_trace(trace)
    console = make_console()
    console.print(
        f"{trace}: {recorded.num_layers} layers, {recorded.num_tokens} tokens, "
        f"top-{recorded.top_k} of {recorded.num_experts} experts"
    )
    for name, value in recorded.metadata.items():
        console.print(f"  {name}: {value}", style="dim")
    console.print(layer_table(recorded, ep))
    console.print(rank_table(recorded, ep))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help=".npz, .pt or .pth.")],
    out: OutPath,
    num_experts: Annotated[int, typer.Option(min=1, help="E; nothing in the ids tells it.")],
    idx_key: Annotated[str, typer.Option(help="Name of the ids.")] = "topk_idx",
    weights_key: Annotated[str, typer.Option(help="Name of the weights.")] = "topk_weights",
    note: Annotated[str, typer.Option(help="Where it comes from, for the metadata.")] = "",
) -> None:
    """Turn arrays [layers, tokens, top_k], or of one layer [tokens, top_k], into a trace."""
    topk_idx, topk_weights = read_foreign(source, idx_key, weights_key)
    metadata = {"source": note} if note else {}
    _write(
        Trace(
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_experts=num_experts,
            metadata=metadata,
        ),
        out,
    )


@app.command("slice")
def slice_(
    trace: TracePath,
    out: OutPath,
    layers: Annotated[str, typer.Option(metavar="A:B", help="Layers A to B - 1.")] = ":",
    tokens: Annotated[str, typer.Option(metavar="A:B", help="Tokens A to B - 1.")] = ":",
) -> None:
    """Cut layers and tokens out of a trace."""
    _write(read_trace(trace).part(_span("layers", layers), _span("tokens", tokens)), out)


def layer_table(trace: Trace, ep: int) -> Table:
    """Skew of each layer, over experts and over the ranks of an EP group."""
    names = [
        "layer",
        "busiest expert / mean",
        "never chosen",
        "busiest rank / mean",
        "rows / pairs",
    ]
    table = make_table("By layer", names)
    counts = trace.expert_counts()
    for layer in range(trace.num_layers):
        pairs, rows = _load(trace, layer, ep)
        table.add_row(
            str(layer),
            f"{counts[layer].max() / counts[layer].double().mean():.1f}",
            str(int((counts[layer] == 0).sum())),
            f"{pairs.max() / pairs.double().mean():.2f}",
            f"{rows.sum() / pairs.sum():.2f}",
        )
    return table


def rank_table(trace: Trace, ep: int) -> Table:
    """Load of each rank of an EP group, over all layers, with linear placement."""
    title = f"By rank at EP {ep} (linear placement), a layer of {trace.num_tokens} tokens"
    table = make_table(title, ["rank", "rows, mean", "rows, most", "pairs, mean", "pairs, most"])
    loads = [_load(trace, layer, ep) for layer in range(trace.num_layers)]
    pairs = torch.stack([load[0] for load in loads])
    rows = torch.stack([load[1] for load in loads])
    for rank in range(ep):
        table.add_row(
            str(rank),
            f"{rows[:, rank].double().mean():.0f}",
            str(int(rows[:, rank].max())),
            f"{pairs[:, rank].double().mean():.0f}",
            str(int(pairs[:, rank].max())),
        )
    return table


def _load(trace: Trace, layer: int, ep: int) -> tuple[Tensor, Tensor]:
    """[ep] pairs and [ep] rows of each rank in one layer."""
    ids = trace.topk_idx[layer].long()
    owner = ExpertPlacement.linear(trace.num_experts, ep).owner[ids.clamp(min=0)]
    owner = torch.where(ids >= 0, owner, ep)
    pairs = torch.bincount(owner.flatten(), minlength=ep + 1)[:ep]
    goes_to = torch.zeros(len(ids), ep + 1, dtype=torch.bool).scatter_(1, owner, True)
    return pairs, goes_to.sum(0)[:ep]


def _span(name: str, text: str) -> slice:
    first, colon, last = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return slice(int(first) if first else None, int(last) if last else None)
    except ValueError:
        said = f"--{name} {shorten(text)}"
        raise ConfigError(f"{said}: write it as A:B, either may be left out") from None


def _write(trace: Trace, out: Path) -> None:
    write_trace(trace, out)
    shape = f"{trace.num_layers} layers, {trace.num_tokens} tokens, top-{trace.top_k}"
    make_console().print(f"{out}: {shape} of {trace.num_experts} experts")
