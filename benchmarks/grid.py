"""The points that scripts/bench.sh times: every option, type and shape that has a goal."""

Point = dict  # as attention_benchmark reads it; see point.cpp


def name_of(point: Point) -> str:
    """Says everything: names are what --filter looks at, and what results are compared by."""
    heads = f"H{point['heads']}"
    if "kv_heads" in point:
        heads += f":{point['kv_heads']}"
    shape = f"B{point['batch']} {heads} M{point['queries']} N{point['keys']} D{point['head_dim']}"
    if "value_dim" in point:
        shape += f"/{point['value_dim']}"
    options = [o for o in ("causal", "alibi", "sinks") if point.get(o)]
    options += [f"{o} {point[o]}" for o in ("dropout", "softcap", "window") if o in point]
    options += ["(B, N, H, D)"] if point.get("heads_last") else []
    if "mask" in point:
        mask = point["mask"]
        learned = " learned" if mask.get("requires_grad") else ""
        options.append(f"{mask['dtype']} mask {'x'.join(map(str, mask['shape']))}{learned}")
    return " ".join([point["pass"], point["dtype"], shape, *options, f"threads {point['threads']}"])


def make(*changes: Point) -> Point:
    point = {"pass": "forward", "dtype": "float32", "batch": 1, "heads": 8, "queries": 512}
    point |= {"head_dim": 64, "threads": 2}
    for change in changes:
        point |= change
    point.setdefault("keys", point["queries"])
    point["name"] = name_of(point)
    return point


def square(n: int, d: int, *changes: Point) -> Point:
    return make({"queries": n, "head_dim": d}, *changes)


PASSES = [{"pass": "forward"}, {"pass": "backward"}]
BANDS = [{}, {"causal": True}]
SECOND_ORDER = [{"pass": "double_backward"}, {"pass": "jvp"}, {"pass": "jvp_query"}]


def options(n: int) -> list[Point]:
    """Each beside the same call without it."""
    masks = [[1, 8, n, n], [1, 1, n, n], [1, 1, 1, n]]
    found = [{"mask": {"dtype": t, "shape": s}} for t in ("bool", "float") for s in masks]
    found += [{"alibi": True}, {"sinks": True}, {"softcap": 30.0}, {"dropout": 0.1}]
    return [{**option, "beside_plain": True} for option in found]


def learned_mask(n: int) -> Point:
    mask = {"dtype": "float", "shape": [1, 1, n, n], "requires_grad": True}
    return square(n, 64, {"pass": "backward", "mask": mask, "beside_plain": True})


def second_order(n: int, dtype: str) -> list[Point]:
    """Each beside our own first order, which its goals are about (results.py)."""
    return [square(n, 64, p, {"causal": True, "dtype": dtype}) for p in SECOND_ORDER]


def decoding(rows: int, keys: int, heads: Point, dtype: str) -> Point:
    return make(heads, {"queries": rows, "keys": keys, "dtype": dtype})


TINY = {"batch": 2048, "heads": 4, "queries": 24, "head_dim": 16}
GROUPS = [{"heads": 8}, {"heads": 32, "kv_heads": 8}, {"heads": 16, "kv_heads": 1}]
WINDOW = {"window": [255, 0], "beside_plain": True}


def full() -> list[Point]:
    points = []
    for threads in (1, 2):
        on = {"threads": threads}
        for p in PASSES:
            for band in BANDS:
                for n in (128, 512, 2048):
                    for d in (64, 128):
                        for dtype in ("float32", "bfloat16", "float16"):
                            points.append(square(n, d, p, band, on, {"dtype": dtype}))
    for dtype in ("float32", "bfloat16"):
        points += [square(8192, 64, band, {"dtype": dtype}) for band in BANDS]
    points += [square(8192, 64, {"causal": True, "pass": "backward"})]
    points += [square(8192, 64, WINDOW)]
    points += [square(512, 64, p, {"dtype": "float64"}) for p in PASSES]
    points += [square(1024, d, p) for p in PASSES for d in (40, 80, 96, 256, 7, 100)]
    points += [square(1024, 192, p, {"value_dim": 128}) for p in PASSES]
    for dtype, d in (("float32", 64), ("float32", 128), ("bfloat16", 64)):
        points += [square(1024, d, p, {"dtype": dtype, "heads_last": True}) for p in PASSES]
    for rows in (1, 4):
        for keys in (4096, 32768):
            for heads in GROUPS:
                for dtype in ("float32", "bfloat16", "float16"):
                    points.append(decoding(rows, keys, heads, dtype))
    points += [square(1024, 64, p, option) for p in PASSES for option in options(1024)]
    points += [square(1024, 64, {"dtype": "bfloat16", "dropout": 0.1, "beside_plain": True})]
    points += [learned_mask(1024)]
    points += [make(TINY, p) for p in PASSES]
    points += [make({"queries": 64, "keys": 4096}, p) for p in PASSES]
    for n in (2048, 4096):
        for dtype in ("float32", "bfloat16"):
            points += second_order(n, dtype)
    return points


def quick() -> list[Point]:
    points = []
    for p in PASSES:
        points += [square(n, 64, p, band) for n in (512, 2048) for band in BANDS]
    points += [square(n, 64, band, {"dtype": "bfloat16"}) for n in (512, 2048) for band in BANDS]
    points += [square(512, 64, {"dtype": "float16"})]
    points += [
        decoding(1, 32768, heads, t) for heads in GROUPS[:2] for t in ("float32", "bfloat16")
    ]
    points += [square(1024, 64, option) for option in options(1024)]
    points += [learned_mask(1024), *(make(TINY, p) for p in PASSES)]
    points += second_order(1024, "float32")
    return points
