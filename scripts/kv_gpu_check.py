"""What scripts/kv_gpu_check.sh runs; it says what is measured. Usage: kv_gpu_check.py BINARIES JSON_FILE [CHECK...]"""
import json
import os
import subprocess
import sys
import time

MODEL = os.environ.get("MODEL", "--synthetic qwen3.6-35b-a3b --mix aeon -ngl all").split()
DEPTHS = [int(n) for n in os.environ.get("DEPTHS", "32768,131072,250000").split(",")]
TOGETHER = [int(n) for n in os.environ.get("TOGETHER", "32,12288").split(",")]
PROMPT = int(os.environ.get("PROMPT", 32768))
SERVER = os.environ.get("SERVER", "--synthetic qwen3.6-35b-a3b --mix aeon -ngl all -np 64 -c 40960 --cache-ram 16384")
TYPES = os.environ.get("TYPES", "bf16,fp8,nvfp4,tq4,k8v4").split(",")
# Wanted, as shares of BF16's tokens a second: after each of the depths, together, of a prompt. None: not asked.
WANTED = {
    "fp8": ([1.04, 1.2, 1.3], 1.12, 0.97),
    "nvfp4": ([1.056, 1.3, 1.5], None, 0.92),
    "tq4": ([1.023, None, 1.5], None, 0.85),
    "k8v4": ([None, None, None], None, None),
}
ACCEPT = "0.93,0.81,0.70"


class Report:
    def __init__(self):
        self.rows, self.failed, self.began = [], 0, time.time()

    def row(self, what: str, measured: str, wanted: str = "", good: bool = True) -> None:
        self.failed += not good
        self.rows.append({"what": what, "measured": measured, "wanted": wanted, "ok": good})
        print(f"{'ok  ' if good else 'FAIL'} {what:34s} {measured:28s} {wanted}", flush=True)


def bench(binary: str, kv: str, *flags) -> list:
    command = [binary, "bench", *MODEL, "-ctk", kv, "-o", "json", *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=420)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout)


def compare(report: Report, name: str, kv: str, speed: float, base: float, least) -> None:
    report.row(f"{name}, {kv}", f"{speed:.0f} tokens/s, {speed / base:.3f} of {TYPES[0]}", f">= {least}" if least else "",
               least is None or speed / base >= least)


def decode(binary: str, report: Report) -> None:
    base = {}
    for kv in TYPES:
        rows = bench(binary, kv, "-p", 0, "-n", 64, "-r", 3, "-d", ",".join(map(str, DEPTHS)))
        for i, depth in enumerate(DEPTHS):
            speed = next(r["median_ts"] for r in rows if r["n_depth"] == depth)
            compare(report, f"decode after {depth}", kv, speed, base.setdefault(depth, speed), WANTED.get(kv, ([None] * 3,))[0][i])


def one_speed(binary: str, report: Report, name: str, which: int, *flags) -> None:
    base = None
    for kv in TYPES:
        speed = bench(binary, kv, *flags)[0]["median_ts"]
        base = base or speed
        compare(report, name, kv, speed, base, WANTED[kv][which] if kv in WANTED else None)


def together(binary: str, report: Report) -> None:
    count, depth = TOGETHER
    one_speed(binary, report, f"{count} answers after {depth}", 1, "-p", 0, "-n", 32, "-r", 3, "-d", depth, "-np", count)


def prefill(binary: str, report: Report) -> None:
    one_speed(binary, report, f"prompt of {PROMPT}", 2, "-p", PROMPT, "-n", 0, "-r", 3)


def drafts(binary: str, report: Report) -> None:
    shares = {}
    for kv in TYPES:
        plain = bench(binary, kv, "-p", 0, "-n", 256, "-r", 1)[0]
        row = bench(binary, kv, "-p", 0, "-n", 256, "-r", 1, "--spec", "mtp", "--accept", ACCEPT, "--draft-max", 3)[0]
        shares[kv] = row["draft_n_accepted"] / max(row["draft_n"], 1)
        same = plain["output_hash"] == row["output_hash"]
        near = abs(shares[kv] - shares[TYPES[0]]) <= 0.02
        report.row(f"256 tokens with drafts, {kv}", f"{'the same' if same else 'OTHERS'}, {100 * shares[kv]:.1f} % accepted",
                   f"the same, {100 * shares[TYPES[0]]:.1f} +- 2 %", same and near)


def crowd(binary: str, report: Report) -> None:
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "serve_gpu_check.sh")
    for kv in TYPES[1:]:
        done = subprocess.run([script, "--bin", os.path.dirname(binary), "crowd"], capture_output=True, text=True,
                              env={**os.environ, "SERVER": f"{SERVER} -ctk {kv}"})
        good = done.returncode == 0
        report.row(f"64 alone and together, {kv}", "the same" if good else "not the same, or failed", "the same", good)
        if not good:
            print(done.stdout[-1500:] + done.stderr[-500:], flush=True)


def ops(binary: str, report: Report) -> None:
    tests = os.path.join(os.path.dirname(binary), "quern_tests")
    done = subprocess.run([tests, "--no-colors", "-ts=cuda", "-tc=gated_attention: packed*"], capture_output=True, text=True, timeout=400)
    summary = [line for line in done.stdout.splitlines() if "test cases:" in line or "assertions:" in line]
    report.row("ops over packed caches", " ".join(" ".join(s.replace("[doctest]", "").split()) for s in summary)[:120] or "no result",
               "all", done.returncode == 0 and bool(summary) and " 0 failed" in summary[0])


CHECKS = {"ops": ops, "decode": decode, "together": together, "prefill": prefill, "drafts": drafts, "crowd": crowd}


def main() -> None:
    folder, out, *names = sys.argv[1:]
    unknown = [n for n in names if n not in CHECKS]
    if unknown:
        sys.exit(f"kv-gpu-check: there is no check {unknown[0]}; there are {', '.join(CHECKS)}")
    report = Report()
    for name in names or CHECKS:
        try:
            CHECKS[name](os.path.join(folder, "quern"), report)
        except (RuntimeError, subprocess.TimeoutExpired, StopIteration, IndexError) as error:
            report.row(name, f"failed: {error}", "", False)
    with open(out, "w") as file:
        json.dump(report.rows, file)
    print(f"{len(report.rows) - report.failed} passed, {report.failed} failed; {time.time() - report.began:.0f} s")
    sys.exit(report.failed > 0)


if __name__ == "__main__":
    main()
