"""Patches a real sentence encoder, proves it, compares its embeddings, times it; under five minutes on two cores."""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from ..diagnosis import doctor
from ..patching import patch
from ..proof import prove_patched
from ..proof.rule import Judge
from . import chart, minilm
from .timing import Timing, race

DTYPES = (torch.float32, torch.bfloat16)
PROVEN = 6  # sentences in the batch of the proof, which runs in float64 as well
TIMED = 32  # rows of each batch: sentences, padded, or one after another with nothing to pad


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo.

    Returns:
        0, or 1 where the proof or an embedding fails, or something is missing (one sentence on stderr says what).
    """
    parser = argparse.ArgumentParser(
        prog="python -m tfm_kernels.demo",
        description=__doc__,
        epilog="example:\n  python -m tfm_kernels.demo --seconds 5",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="to time each of four comparisons, default 15")
    parser.add_argument(
        "--out", type=Path, default=Path("demo_report"), help="folder of the report, the proofs in full and the chart"
    )
    options = parser.parse_args(arguments)
    try:
        return _run(options.seconds, options.out)
    except minilm.DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
    except OSError as error:
        print(f"demo: the report cannot be written to {options.out} ({error})", file=sys.stderr)
    except KeyboardInterrupt:
        print("demo: stopped by the keyboard", file=sys.stderr)
    return 1


def _run(seconds: float, out: Path) -> int:
    started = time.perf_counter()
    folder = minilm.model_folder()
    out.mkdir(parents=True, exist_ok=True)
    from tqdm import tqdm

    print(doctor(), end="\n\n")
    model, tokenizer = minilm.load(folder)
    lines = minilm.sentences()
    spread = lines[:: len(lines) // TIMED][:TIMED]  # from short to long and to short again, as the file has them
    padded, full = minilm.padded_batch(tokenizer, spread), minilm.full_batch(tokenizer, lines, TIMED)
    batches = {"padded": padded, "unpadded": full}
    print(f"all-MiniLM-L6-v2 on {torch.get_num_threads()} threads; {len(spread)} of {len(lines)} sentences")
    for name, batch in batches.items():
        print(f"  {name:9}{tuple(batch['input_ids'].shape)}, {minilm.fill(batch):.0%} of it tokens")

    fused = copy.deepcopy(model)
    print(f"\n{patch(fused, freeze=True)}\n")
    with tqdm(
        total=len(DTYPES) * (2 * len(batches) + 1), unit="part", bar_format="{l_bar}{bar}| {elapsed}{postfix}"
    ) as bar:
        # first: where the proof has left memory, the original's largest results cost fewer page faults than they do in
        # a process that only encodes
        timings = []
        for dtype in DTYPES:
            pair = copy.deepcopy(model).to(dtype), copy.deepcopy(fused).to(dtype)
            for name, batch in batches.items():
                bar.set_postfix_str(f"timing, {_name(dtype)}, {name}")
                timings.append(_race(f"{_name(dtype)}, {name}", *pair, batch, seconds, bar))
        proofs, embeddings = [], []
        for dtype in DTYPES:
            bar.set_postfix_str(f"proof, {_name(dtype)}")
            proofs.append(_proof(fused, tokenizer, lines, dtype))
            bar.update()
        for dtype in DTYPES:
            for name, batch in batches.items():
                bar.set_postfix_str(f"embeddings, {_name(dtype)}, {name}")
                embeddings.append({"batch": name, **_embeddings(model, fused, batch, dtype)})
                bar.update()
        bar.set_postfix_str("done")

    for proof in proofs:
        print(f"\n{proof if proof.passed else proof.table()}")
    proven = all(proof.passed for proof in proofs) and all(found["passed"] for found in embeddings)
    print("\nembeddings of the batches that are timed, as they are timed; errors against float64")
    print(f"{'':24}{'least cosine':>14}{'Hugging Face':>14}{'patched':>10}{'allowed':>10}")
    for found in embeddings:
        print(
            f"{found['dtype'] + ', ' + found['batch']:24}{found['least_cosine']:>14.7f}{found['stock_error']:>14.2e}"
            f"{found['patched_error']:>10.2e}{found['allowed_error']:>10.2e}{'' if found['passed'] else '  FAIL'}"
        )
    if not proven:
        timings = []  # how fast a wrong result comes is of no interest
    else:
        print(f"\n{'inference':22}{'Hugging Face, SDPA':>20}{'patched':>12}{'times faster':>14}{'rounds':>8}")
    for timing in timings:
        print(
            f"{timing.label:22}{timing.stock * 1e3:>17.0f} ms{timing.patched * 1e3:>9.0f} ms{timing.speedup:>14.2f}"
            f"{timing.rounds:>8}"
        )
    compared = [json.loads(proof.to_json()) for proof in proofs]
    report = {
        "model": "all-MiniLM-L6-v2",
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "batches": {n: {"shape": list(b["input_ids"].shape), "fill": minilm.fill(b)} for n, b in batches.items()},
        "proofs": [{name: value for name, value in proof.items() if name != "rows"} for proof in compared],
        "embeddings": embeddings,
        "timings": [asdict(timing) for timing in timings],
        "seconds": time.perf_counter() - started,
    }
    for name, content in (("report.json", report), ("proofs.json", compared)):
        (out / name).write_text(json.dumps(content, indent=1) + "\n")
    written = f"{out / 'report.json'}, proofs.json"
    if not proven:
        written += " (without times, because the proof or an embedding failed)"
    elif chart.draw(timings, out / "speed.png"):
        written += " and speed.png"
    else:
        written += " (no chart: no matplotlib here)"
    print(f"\nwrote {written}; {report['seconds']:.0f} seconds in all")
    return 0 if proven else 1


def _proof(fused: nn.Module, tokenizer, lines: list[str], dtype: torch.dtype):
    """On sentences of all lengths, cut to 64 tokens: their float64 run and every module alone take most of the time."""
    chosen = lines[:: len(lines) // PROVEN][:PROVEN]
    batch = tokenizer(chosen, padding=True, truncation=True, max_length=64, return_tensors="pt")
    return prove_patched(fused, dict(batch), dtype=dtype, count=1)


def _embeddings(model: nn.Module, fused: nn.Module, batch: minilm.Batch, dtype: torch.dtype) -> dict:
    """The embeddings of one batch by both, and their errors against the float64 original's, held to prove()'s rule."""
    original = copy.deepcopy(model).to(dtype)
    stock, patched = minilm.embed(original, batch), minilm.embed(copy.deepcopy(fused).to(dtype), batch)
    exact = minilm.embed(original.double(), batch)
    named = ({"embeddings": found} for found in (exact, stock, patched))
    (row,) = Judge(dtype, limit=1.05).compare("output", *named, module="")
    return {
        "dtype": _name(dtype),
        "sentences": len(stock),
        "least_cosine": float((stock * patched).sum(-1).min()),
        "largest_difference": float((stock - patched).abs().max()),
        "stock_error": row.stock,
        "patched_error": row.patched,
        "allowed_error": row.allowed,
        "passed": row.passed,
    }


def _race(label: str, stock: nn.Module, patched: nn.Module, batch: minilm.Batch, seconds: float, bar) -> Timing:
    """One timing, the bar growing by one part while it goes on."""
    before = bar.n

    def tick(part: float) -> None:
        bar.n = before + part
        bar.refresh()

    with torch.inference_mode():
        found = race(label, lambda: stock(**batch), lambda: patched(**batch), seconds, tick)
    tick(1.0)
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main())
