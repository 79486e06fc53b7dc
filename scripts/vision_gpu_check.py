"""What scripts/vision_gpu_check.sh runs; it says what is measured. Usage: vision_gpu_check.py BINARIES [CHECK...]"""
import base64
import json
import os
import random
import re
import statistics
import struct
import subprocess
import sys
import threading
import time
import urllib.request
import zlib

SERVER = os.environ.get("SERVER", "--synthetic qwen3.6-35b-a3b+vision --mix aeon -ngl all -np 32 -c 32768 --cache-ram 8192")
SIDE, LARGE = int(os.environ.get("SIDE", 1024)), int(os.environ.get("LARGE", 4096))
PEOPLE = int(os.environ.get("PEOPLE", 31))
FIRST_MS, GAP_MS = float(os.environ.get("FIRST_MS", 45)), float(os.environ.get("GAP_MS", 45))
TOWER_MS = {("1", "1024"): 20, ("16", "512"): 60, ("1", "4096"): 1200}


def png(side: int, seed: int) -> str:
    """A data: URL of slopes and a few changed pixels: another picture for each seed."""
    row = bytes(v & 255 for x in range(side) for v in (x // 4, seed, x // 16))
    rows = bytearray((b"\0" + row) * side)
    for _ in range(64):
        at = random.randrange(side) * (3 * side + 1) + 1 + random.randrange(3 * side)
        rows[at] = random.randrange(256)

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(rows), 1)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(file).decode()


class Server:
    def __init__(self, binary: str):
        self.process = subprocess.Popen([binary, "serve", "--port", "0", "--log-format", "none", "--queue", "256", *SERVER.split()],
                                        stderr=subprocess.PIPE, text=True)
        self.url = None
        for line in self.process.stderr:
            if found := re.search(r"at (http://\S+)", line):
                self.url = found[1]
                break
        if self.url is None:
            sys.exit("vision-gpu-check: the server did not start")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def times(self, content, tokens: int) -> list:
        """When the request was sent, and when each piece of its answer came."""
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": tokens, "ignore_eos": True, "stream": True,
                "temperature": 0}
        request = urllib.request.Request(self.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        times = [time.perf_counter()]
        with urllib.request.urlopen(request, timeout=300) as reply:
            for line in reply:
                if line.startswith(b"data: {") and b'"delta"' in line and (b'content"' in line):
                    times.append(time.perf_counter())
        return times

    def stop(self):
        self.process.terminate()
        self.process.wait(60)


def about(image: str) -> list:
    return [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "What is this?"}]


class Report:
    failed = 0

    def row(self, what: str, measured: str, wanted: str = "", good: bool = True) -> None:
        self.failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {what:44s} {measured:28s} {wanted}", flush=True)


def tests(folder: str, report: Report) -> None:
    done = subprocess.run([os.path.join(folder, "quern_tests"), "--no-colors", "-ts=cuda",
                           "-tc=vision:*,tower:*,videos:*,linear_bias*,layer_norm*,grid_attention*,patch_values*"],
                          capture_output=True, text=True, timeout=300)
    summary = [" ".join(x.split()) for x in done.stdout.splitlines() if "test cases:" in x]
    report.row("tests", summary[0] if summary else "no result", "all", done.returncode == 0 and bool(summary))
    if done.returncode != 0:
        print("\n".join(x for x in done.stdout.splitlines() if "ERROR" in x or "values:" in x)[:3000])


def tower(folder: str, report: Report) -> None:
    done = subprocess.run([os.path.join(folder, "quern_tests"), "--no-colors", "-tc=vision: times of a full-size tower (CUDA)"],
                          capture_output=True, text=True, timeout=300)
    rows = re.findall(r"^\s*(\d+) x +(\d+) x +\d+: +([\d.]+) ms", done.stdout, re.M)
    for images, side, ms in rows:
        most = TOWER_MS.get((images, side))
        report.row(f"tower, {images} of {side} x {side}", f"{ms} ms", f"<= {most} ms" if most else "", most is None or float(ms) <= most)
    if not rows:
        report.row("tower", "no result", "", False)


def first(folder: str, report: Report) -> None:
    server = Server(os.path.join(folder, "quern"))
    try:
        for i in range(3):
            server.times(about(png(SIDE, 200 + i)), 2)
        ms = sorted(1e3 * (t[1] - t[0]) for t in (server.times(about(png(SIDE, i)), 2) for i in range(12)))
        median = statistics.median(ms)
        report.row(f"first token, {SIDE} x {SIDE}", f"{median:.1f} ms ({ms[0]:.1f} to {ms[-1]:.1f})", f"<= {FIRST_MS} ms", median <= FIRST_MS)
    finally:
        server.stop()


def gaps(folder: str, report: Report) -> None:
    server, seen, lock = Server(os.path.join(folder, "quern")), [], threading.Lock()

    def answer(number):
        times = server.times(f"Tell me story {number}.", 1200)
        with lock:
            seen.append(times)

    try:
        server.times(about(png(SIDE, 250)), 2)
        for what, side, count in ((f"{SIDE} x {SIDE}", SIDE, 12), (f"{LARGE} x {LARGE}", LARGE, 1)):
            seen.clear()
            images = [about(png(side, i)) for i in range(count)]
            people = [threading.Thread(target=answer, args=(i,)) for i in range(PEOPLE)]
            for p in people:
                p.start()
            time.sleep(1.5)
            begin = time.perf_counter()
            for image in images:
                server.times(image, 2)
            end = time.perf_counter()
            for p in people:
                p.join()
            during = sorted(1e3 * (b - a) for times in seen for a, b in zip(times[1:], times[2:]) if begin <= b <= end)
            if not during:
                report.row(f"gaps beside images of {what}", "answers ended before", "", False)
                continue
            p99 = during[int(0.99 * (len(during) - 1))]
            report.row(f"gaps beside images of {what}", f"p99 {p99:.1f} ms, most {during[-1]:.1f}; {(end - begin) / count:.2f} s each",
                       f"p99 <= {GAP_MS} ms", p99 <= GAP_MS)
    finally:
        server.stop()


CHECKS = {"tests": tests, "tower": tower, "first": first, "gaps": gaps}


def main() -> None:
    folder, *names = sys.argv[1:]
    unknown = [n for n in names if n not in CHECKS]
    if unknown:
        sys.exit(f"vision-gpu-check: there is no check {unknown[0]}; there are {', '.join(CHECKS)}")
    report, begun = Report(), time.time()
    for name in names or CHECKS:
        CHECKS[name](folder, report)
    print(f"{report.failed} failed; {time.time() - begun:.0f} s")
    sys.exit(report.failed > 0)


if __name__ == "__main__":
    main()
