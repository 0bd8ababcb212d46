"""Small examples of attention with every number known beforehand (worked_examples.json).

    python examples/worked_examples.py [OUTPUT_DIR]

prints what qkv computes beside what was expected, and writes heat maps.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import qkv
from qkv.plots import attention_heat_map

EXAMPLES = json.loads((Path(__file__).parent / "worked_examples.json").read_text())


@dataclass
class Result:
    """One matrix of one example: ours, and the number expected for each entry."""

    example: str
    quantity: str
    ours: Tensor
    expected: Tensor
    row_labels: list[str]

    @property
    def error(self) -> float:
        return (self.ours - self.expected).abs().max().item()


def tensor(x) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def results() -> list[Result]:
    found: list[Result] = []

    def add(example: str, quantity: str, ours: Tensor, expected, labels=None) -> None:
        expected = tensor(expected)
        labels = labels or [str(i) for i in range(expected.shape[0] if expected.dim() else 1)]
        assert ours.shape == expected.shape, f"{example}, {quantity}: {ours.shape}"
        found.append(Result(example, quantity, ours.detach(), expected, labels))

    # Queries, keys and values are the embeddings themselves.
    for name, causal in (("cat_sat_on_the_mat", False), ("cat_sat_on_the_mat_causal", True)):
        e = EXAMPLES[name]
        x, options = tensor(e["embeddings"]), {"scale": e["scale"], "is_causal": causal}
        add(name, "weights", qkv.attention_weights(x, x, **options), e["weights"], e["tokens"])
        add(name, "output", qkv.attention(x, x, x, **options), e["output"], e["tokens"])

    e = EXAMPLES["your_journey_untrained"]
    module = qkv.nn.ScaledDotProductAttention(scale=e["scale"])
    context, weights = module.forward_with_weights(tensor(e["inputs"]))
    add("your_journey_untrained", "weights", weights, e["weights"], e["tokens"])
    add("your_journey_untrained", "context", context, e["context"], e["tokens"])

    # Learned W_Q, W_K, W_V, with and without a causal mask.
    e = EXAMPLES["your_journey_trainable"]
    inputs, tokens = tensor(e["inputs"]), e["tokens"]
    for name, causal in (
        ("your_journey_trainable", False),
        ("your_journey_trainable_causal", True),
    ):
        module = qkv.nn.SelfAttention(3, 2, causal=causal, dtype=torch.float64)
        with torch.no_grad():
            for linear, key in ((module.w_q, "W_q"), (module.w_k, "W_k"), (module.w_v, "W_v")):
                linear.weight.copy_(tensor(e[key]).T)
        context, weights = module.forward_with_weights(inputs)
        if not causal:
            add(name, "query", module.w_q(inputs), e["query"], tokens)
            add(name, "key", module.w_k(inputs), e["key"], tokens)
            add(name, "value", module.w_v(inputs), e["value"], tokens)
        add(name, "weights", weights, EXAMPLES[name]["weights"], tokens)
        add(name, "context", context, EXAMPLES[name]["context"], tokens)

    # Weights as a soft look-up: with scores log(w), attention returns the w-weighted mean.
    e = EXAMPLES["income_lookup"]
    mask = tensor(e["weights"]).log().unsqueeze(0)
    query, key, value = torch.zeros(1, 1).double(), torch.zeros(3, 1).double(), tensor(e["values"])
    out = qkv.attention(query, key, value.unsqueeze(1), mask)
    add("income_lookup", "weights", qkv.attention_weights(query, key, mask)[0], e["weights"])
    add("income_lookup", "output", out.squeeze(), e["output"])
    only = torch.tensor([[False, True, False]])
    add(
        "income_lookup",
        "one key",
        qkv.attention(query, key, value.unsqueeze(1), only)[0, 0],
        2000.0,
    )

    e = EXAMPLES["masked_self_attention"]
    x, keep = tensor(e["x"]), torch.tensor(e["keep_mask"], dtype=torch.bool)
    add("masked_self_attention", "weights", qkv.attention_weights(x, x, keep), e["weights"])
    add("masked_self_attention", "output", qkv.attention(x, x, x, keep), e["output"])

    for name in ("cross_attention_dot_product", "cross_attention_scaled_dot_product"):
        e = EXAMPLES[name]
        query, key, value = tensor(e["query"]), tensor(e["key"]), tensor(e["value"])
        module = qkv.nn.ScaledDotProductAttention(scale=e["scale"])
        out, weights = module.forward_with_weights(query, key, value)
        add(name, "weights", weights, e["weights"])
        add(name, "output", out, e["output"])

    # The same with features in columns, as many textbooks have it: transpose going in and out.
    e = EXAMPLES["by_hand_columns"]
    x, scale = tensor(e["X"]), e["scale_row_form"]
    q, k, v = (tensor(e[name]) @ x for name in ("W_Q", "W_K", "W_V"))
    assert math.isclose(scale, math.log(3) / 2)
    add("by_hand_columns", "scores", k.T @ q, e["scores"])
    add(
        "by_hand_columns",
        "weights",
        qkv.attention_weights(q.T, k.T, scale=scale).T,
        e["weights_columns"],
    )
    add("by_hand_columns", "Z", qkv.attention(q.T, k.T, v.T, scale=scale).T, e["Z_columns"])
    return found


def cat_heat_map():
    e = EXAMPLES["cat_sat_on_the_mat"]
    x = tensor(e["embeddings"])
    panels = [qkv.attention_weights(x, x, scale=e["scale"], is_causal=c) for c in (False, True)]
    return attention_heat_map(panels, e["tokens"], titles=["every token", "causal"])


def train_heat_map():
    """7 tokens of width 512 through a SelfAttention with d_k = d_v = 64, as it is initialised."""
    e = EXAMPLES["the_train_left_the_station_on_time"]
    tokens = e["tokens"]
    torch.manual_seed(0)
    embedding = {token: 2.5 * torch.randn(e["d_model"]) for token in dict.fromkeys(tokens)}
    x = torch.stack([embedding[token] for token in tokens])
    module = qkv.nn.SelfAttention(e["d_model"], e["d_k"], d_v=e["d_v"])
    out, weights = module.forward_with_weights(x)
    batch, _ = module.forward_with_weights(x.expand(3, -1, -1))
    assert weights.shape == (7, 7) and out.shape == (7, 64) and batch.shape == (3, 7, 64)
    return attention_heat_map(weights, tokens, titles=["untrained self-attention"])


def as_table(r: Result) -> Table:
    """Row by row, ours over what was expected; of large ones the beginning."""
    ours, expected = (
        x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1) for x in (r.ours, r.expected)
    )
    if r.ours.dim() == 1:
        ours, expected = ours.reshape(1, -1), expected.reshape(1, -1)
    columns = min(ours.shape[1], 7)
    shape = " x ".join(map(str, r.ours.shape)) or "a number"
    title = f"{r.example}: {r.quantity} ({shape}), largest difference {r.error:.1e}"
    table = Table(title=title, title_justify="left", title_style="bold", min_width=len(title))
    table.add_column("")
    table.add_column("")
    for c in range(columns):
        table.add_column(str(c), justify="right")
    for row in range(ours.shape[0] if ours.shape[0] <= 7 else 3):
        label = r.row_labels[row] if r.ours.dim() == 2 else str(row)
        for who, x, style in (("qkv", ours, ""), ("expected", expected, "dim")):
            cells = [f"{x[row, c]:.4f}" for c in range(columns)]
            table.add_row(label if who == "qkv" else "", who, *cells, style=style)
    return table


def main(output: Path, console: Console) -> list[Result]:
    """Prints all examples and writes the heat maps into `output`."""
    output.mkdir(parents=True, exist_ok=True)
    found = results()
    for r in found:
        console.print(as_table(r))
    cat_heat_map().savefig(output / "cat_sat_on_the_mat.png")
    train_heat_map().savefig(output / "the_train_left_the_station.png")
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo_output"), Console())
