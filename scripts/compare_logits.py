#!/usr/bin/env python3
"""Compares quern's logits and greedy tokens with transformers in float32, or with stored vectors.

    compare_logits.py MODEL --quern build/quern                      random prompt, runs both sides
    compare_logits.py MODEL --ids ids.txt --logits out.npy [--generated tokens.txt]
    compare_logits.py --all --quern build/quern                      every checkpoint of tests/vectors/parity
    compare_logits.py MODEL --golden X.golden.safetensors --quern build/quern

where the two files come from
    quern run -m MODEL --ids ids.txt -n 32 --temp 0 --dump-logits out.npy > tokens.txt

MODEL is a Qwen3.5/3.6-MoE directory in any format of reference_model.py. Running transformers needs torch, transformers
and safetensors; --golden and --all need numpy only. Prints the relative error |ours - ref| / |ref| over all compared
positions, the worst position, how often the best token agrees, and the greedy tokens; exits 1 when the error is above
--tolerance or a greedy token differs.
"""

import argparse
import json
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

import numpy as np

VECTORS = pathlib.Path(__file__).resolve().parent.parent / "tests" / "vectors" / "parity"
DTYPES = {"F32": np.float32, "I32": np.int32}


def read_golden(path):
    data = pathlib.Path(path).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    out = {}
    for name, t in json.loads(data[8:8 + size]).items():
        if name != "__metadata__":
            begin, end = t["data_offsets"]
            raw = data[8 + size + begin:8 + size + end]
            out[name] = np.frombuffer(raw, DTYPES[t["dtype"]]).reshape(t["shape"])
    return out


def read_ids(path):
    text = sys.stdin.read() if str(path) == "-" else pathlib.Path(path).read_text()
    return np.array([int(n) for n in re.findall(r"\d+", text)], dtype=np.int32)


def run_quern(quern, model, ids, count, extra):
    """quern's [T, V] logits of the prompt and the tokens it generates greedily."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "ids.txt").write_text(" ".join(str(i) for i in ids) + "\n")
        command = [str(quern), "run", "-m", str(model), "--ids", str(folder / "ids.txt"), "-n", str(count),
                   "--temp", "0", "--dump-logits", str(folder / "out.npy"), *extra]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\nexit {done.returncode}\n{done.stderr[-2000:]}")
        tokens = np.array([int(n) for n in re.findall(r"\d+", done.stdout)], dtype=np.int32)
        return np.load(folder / "out.npy"), tokens


def run_reference(model, ids, count, device):
    import reference_model

    reference = reference_model.load(model, device)
    logits = reference_model.logits(reference, ids).numpy()
    return logits, np.array(reference_model.greedy(reference, ids, count)[0] if count else [], dtype=np.int32)


def compare(title, ours, theirs, positions, our_tokens, their_tokens, tolerance):
    """Prints one line (more when something differs); true when within tolerance and all tokens equal."""
    ours = ours[positions].astype(np.float64)
    theirs = theirs.astype(np.float64)
    if ours.shape != theirs.shape:
        print(f"{title}: logits have shape {ours.shape}, the reference {theirs.shape}")
        return False
    if not np.isfinite(ours).all():
        print(f"{title}: NaN or infinite logits first at position {positions[np.argmin(np.isfinite(ours).all(-1))]}")
        return False
    error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    rows = np.linalg.norm(ours - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)
    worst = int(rows.argmax())
    agree = float((ours.argmax(-1) == theirs.argmax(-1)).mean())
    ok = error <= tolerance
    line = f"{title}: error {error:.2e}, worst position {positions[worst]} {rows[worst]:.2e}, best token {agree:.1%}"
    if our_tokens is not None:
        same = len(our_tokens) == len(their_tokens) and bool((our_tokens == their_tokens).all())
        line += f", greedy {len(their_tokens)} tokens " + ("equal" if same else "DIFFER")
        ok = ok and same
        if not same:
            line += f"\n  ours {our_tokens.tolist()}\n  ref  {their_tokens.tolist()}"
    print(line + ("" if ok else "  FAIL"), flush=True)
    return ok


def against_golden(arguments, model, golden, title):
    g = read_golden(golden)
    if arguments.quern:
        ours, tokens = run_quern(arguments.quern, model, g["prompt_ids"], len(g["greedy_ids"]), arguments.extra)
    else:
        ours = np.load(arguments.logits)
        tokens = read_ids(arguments.generated) if arguments.generated else None
    return compare(title, ours, g["logits"], g["positions"], tokens, g["greedy_ids"], arguments.tolerance)


def against_transformers(arguments):
    if arguments.ids:
        ids = read_ids(arguments.ids)
    else:
        config = json.loads((pathlib.Path(arguments.model) / "config.json").read_text())
        vocab = config.get("text_config", config)["vocab_size"]
        vocab = max(2, vocab - 300 if vocab > 1000 else vocab - 8)  # the last rows are control tokens or padding
        ids = np.random.default_rng(arguments.seed).integers(0, vocab, arguments.length).astype(np.int32)
    if arguments.quern:
        ours, tokens = run_quern(arguments.quern, arguments.model, ids, arguments.new, arguments.extra)
    else:
        ours = np.load(arguments.logits)
        tokens = read_ids(arguments.generated) if arguments.generated else None
    count = arguments.new if tokens is None or arguments.quern else len(tokens)
    theirs, expected = run_reference(arguments.model, ids, count if tokens is not None else 0, arguments.device)
    return compare(str(arguments.model), ours, theirs, np.arange(len(ids)), tokens, expected, arguments.tolerance)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog=__doc__.split("\n", 1)[1],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="checkpoint directory")
    parser.add_argument("--all", action="store_true", help="all checkpoints of tests/vectors/parity (needs --quern)")
    parser.add_argument("--quern", help="the quern binary: run it here instead of reading its files")
    parser.add_argument("--ids", help="prompt token ids, any separators")
    parser.add_argument("--logits", help="the .npy of --dump-logits, float32 [T, V]")
    parser.add_argument("--generated", help="file with quern's generated ids, - for stdin")
    parser.add_argument("--golden", help="stored vectors instead of transformers")
    parser.add_argument("--length", type=int, default=200, help="random prompt length (200)")
    parser.add_argument("--new", type=int, default=32, help="greedy tokens (32)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="torch device of the reference")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="further arguments for quern run")
    arguments = parser.parse_args()
    if arguments.all:
        if not arguments.quern:
            parser.error("--all needs --quern")
        results = [against_golden(arguments, str(g).removesuffix(".golden.safetensors"), g,
                                  str(g.relative_to(VECTORS)).removesuffix(".golden.safetensors"))
                   for g in sorted(VECTORS.glob("*/*.golden.safetensors"))]
        print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
        return 0 if results and all(results) else 1
    if not arguments.model or not (arguments.quern or arguments.logits):
        parser.error("needs MODEL and either --quern or --logits")
    if arguments.logits and not arguments.quern and not (arguments.ids or arguments.golden):
        parser.error("--logits needs --ids, the prompt it was made from (or --golden)")
    if arguments.golden:
        return 0 if against_golden(arguments, arguments.model, arguments.golden, arguments.model) else 1
    return 0 if against_transformers(arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
