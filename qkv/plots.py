"""Pictures of attention. Needs matplotlib: ``pip install matplotlib``."""

from typing import TYPE_CHECKING, Optional, Sequence

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def attention_heat_map(
    weights: "Tensor | Sequence[Tensor]",
    query_tokens: Sequence[str],
    key_tokens: Optional[Sequence[str]] = None,
    titles: Optional[Sequence[str]] = None,
) -> "Figure":
    """Attention weights as a heat map: queries down, keys across, the numbers in the cells.

    Args:
        weights: (M, N), as from :func:`qkv.attention_weights` for one head; or several, drawn side
            by side.
        query_tokens: M labels.
        key_tokens: N labels; the query's by default.
        titles: one for each matrix.

    Returns:
        The figure; ``figure.savefig("weights.png")`` writes it.
    """
    import matplotlib
    from matplotlib.figure import Figure

    panels = [weights] if isinstance(weights, Tensor) else list(weights)
    keys = query_tokens if key_tokens is None else key_tokens
    for panel in panels:
        if panel.shape != (len(query_tokens), len(keys)):
            raise ValueError(
                f"attention_heat_map: weights must be {(len(query_tokens), len(keys))}, one row a "
                f"query token and one column a key token, but are {tuple(panel.shape)}"
            )
    size = 0.62 * max(len(query_tokens), len(keys)) + 1.6
    figure = Figure(figsize=(size * len(panels) + 0.8, size), layout="constrained", dpi=150)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    largest = max(panel.max().item() for panel in panels)
    colours = matplotlib.colormaps["magma"].copy()
    colours.set_bad("#e9e9ec")  # weights that are exactly 0: masked
    for i, (axis, panel) in enumerate(zip(axes, panels)):
        numbers = panel.detach().double().cpu()
        masked = numbers.masked_fill(numbers == 0, float("nan")).numpy()
        image = axis.imshow(masked, cmap=colours, vmin=0.0, vmax=largest)
        axis.set_xticks(range(len(keys)), keys, rotation=45, ha="left", rotation_mode="anchor")
        axis.set_yticks(range(len(query_tokens)), query_tokens)
        axis.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
        axis.set_xlabel("attends to (key)")
        if i == 0:
            axis.set_ylabel("token (query)")
        if titles is not None:
            axis.set_title(titles[i], pad=12)
        for row, weights_of_row in enumerate(numbers.tolist()):
            for column, weight in enumerate(weights_of_row):
                if weight != 0:
                    colour = "white" if weight < 0.6 * largest else "black"
                    text = {"ha": "center", "va": "center", "fontsize": 8, "color": colour}
                    axis.text(column, row, f"{weight:.2f}", **text)
        for side in axis.spines.values():
            side.set_visible(False)
    figure.colorbar(image, ax=axes[-1], shrink=0.8, label="weight")
    return figure
