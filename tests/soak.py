#!/usr/bin/env python3
"""Clients that come and go at every moment, against the real server with the demo checkpoint: `make soak`.

Usage: soak.py QUERN_BINARY SECONDS. Needs no packages. Checks that /health answers within a second throughout, that
every request which was sent whole and waited for gets a proper answer, and that afterwards nothing runs, no descriptor
is open and memory is no more than after the first part.
"""
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request


class Soak:
    def __init__(self, binary, seconds):
        self.server = subprocess.Popen([binary, "serve", "--port", "0", "--cache-ram", "64", "--log-format", "none"],
                                       stderr=subprocess.PIPE, text=True)
        for line in self.server.stderr:
            if found := re.search(r"at (http://\S+:(\d+))", line):
                self.url, self.port = found[1], int(found[2])
                break
        self.end = time.time() + seconds
        self.counts = {"answered": 0, "refused": 0, "left": 0}
        self.faults = []
        self.lock = threading.Lock()

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=20) as reply:
            return reply.read().decode()

    def metric(self, name):
        return float(re.search(rf"^{name} (\S+)$", self.get("/metrics"), re.M)[1])

    def state(self):
        with open(f"/proc/{self.server.pid}/status") as status:
            mib = int(re.search(r"VmRSS:\s+(\d+)", status.read())[1]) // 1024
        return len(os.listdir(f"/proc/{self.server.pid}/fd")), mib

    def request(self, rnd):
        words = "grain " * (rnd.randint(0, 60) if rnd.random() < 0.95 else 2000)
        body = json.dumps({"messages": [{"role": "user", "content": f"What is {rnd.randint(1, 99)} + 7? {words}"}],
                           "max_tokens": rnd.randint(1, 60), "stream": rnd.random() < 0.5,
                           "n": rnd.choice([1, 1, 1, 2])}).encode()
        head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n").encode()
        return head, body

    def person(self, seed):
        rnd = random.Random(seed)
        while time.time() < self.end:
            head, body = self.request(rnd)
            with socket.create_connection(("127.0.0.1", self.port), timeout=120) as s:
                fate = rnd.random()
                if fate < 0.2:  # leaves within the head or the body
                    whole = head + body
                    s.sendall(whole[:rnd.randint(0, len(whole) - 1)])
                    self.count("left")
                    continue
                s.sendall(head + body)
                if fate < 0.5:  # leaves while it waits, reads the prompt or answers
                    time.sleep(rnd.random() * 0.5)
                    self.count("left")
                    continue
                reply = b"".join(iter(lambda: s.recv(65536), b""))
                status, text = reply[9:12], reply.decode(errors="replace")
                if status == b"429":
                    self.count("refused")
                elif status == b"200" and ("[DONE]" in text or '"usage"' in text):
                    self.count("answered")
                else:
                    with self.lock:
                        self.faults.append(text[:300])

    def run(self):
        people = [threading.Thread(target=self.person, args=(seed,), daemon=True) for seed in range(12)]
        for p in people:
            p.start()
        slowest, middle, half = 0.0, None, time.time() + (self.end - time.time()) / 2
        while time.time() < self.end:
            begun = time.time()
            self.get("/health")
            slowest = max(slowest, time.time() - begun)
            if middle is None and time.time() > half:
                middle = self.state()
            time.sleep(0.2)
        for p in people:
            p.join(150)
        time.sleep(6)  # threads and connections that are idle end
        descriptors, mib = self.state()
        checks = {
            f"answers {self.counts}": not self.faults and self.counts["answered"] > 0,
            f"slowest /health {slowest:.3f} s": slowest < 1,
            "nothing runs": self.metric("quern_requests_running") == 0 and self.metric("quern_requests_queued") == 0,
            f"{descriptors} descriptors": descriptors < 20,
            f"{middle[1]} MiB in the middle, {mib} at the end": mib < middle[1] * 1.2 + 50,
        }
        self.server.terminate()
        checks["ends when told"] = self.server.wait(30) == 0
        for fault in self.faults[:5]:
            print(fault)
        for what, good in checks.items():
            print("ok     " if good else "FAILED ", what)
        return not all(checks.values())


if __name__ == "__main__":
    soak = Soak(sys.argv[1], float(sys.argv[2]))
    try:
        sys.exit(soak.run())
    finally:
        soak.server.kill()
