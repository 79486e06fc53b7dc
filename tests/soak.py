#!/usr/bin/env python3
"""Clients that come and go at every moment, against the real server with the demo checkpoint: `make soak`.

Usage: soak.py [--slow] QUERN_BINARY SECONDS [FLAGS OF QUERN SERVE...]. --slow: for a binary that is watched by a
sanitizer: fewer clients, and more patience. Needs no packages. Checks that /health answers within a second throughout, that
every request which was sent whole and waited for gets a proper answer (soak_requests.py: as the schema, expression, choice or
tool says that it asked for), that clients which do not read their answers lose them, and that afterwards nothing runs, no descriptor is open and memory is no more than after the first part. A
thousand connections are idle all the time.
"""
import json
import os
import random
import re
import resource
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.request

from soak_requests import make_request


class Soak:
    def __init__(self, slow, binary, seconds, *flags):
        self.slow = slow
        self.people, self.crowd_size, self.patience = (3, 100, 300) if slow else (12, 1000, 120)
        self.server = subprocess.Popen([binary, "serve", "--port", "0", "--cache-ram", "64", "--peer-connections", "0", "--log-format", "none", *flags],
                                       stderr=subprocess.PIPE, text=True)
        for line in self.server.stderr:
            if found := re.search(r"at (http://\S+:(\d+))", line):
                self.url, self.port = found[1], int(found[2])
                break
        self.end = time.time() + float(seconds)
        self.counts = {"answered": 0, "refused": 0, "left": 0, "silent": 0, "idle ended": 0}
        self.idle = 0
        self.faults = []
        self.lock = threading.Lock()

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=20) as reply:
            return reply.read().decode()

    def metric(self, name):
        """Of all replicas together."""
        values = re.findall(rf'^{name}(?:{{replica="\d+"}})? (\S+)$', self.get("/metrics"), re.M)
        return sum(map(float, values)) if values else None

    def state(self):
        with open(f"/proc/{self.server.pid}/status") as status:
            mib = int(re.search(r"VmRSS:\s+(\d+)", status.read())[1]) // 1024
        return len(os.listdir(f"/proc/{self.server.pid}/fd")), mib

    def request(self, rnd):
        asked, fault_of = make_request(rnd)
        body = json.dumps(asked).encode()
        head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n").encode()
        return head, body, fault_of

    def person(self, seed):
        rnd = random.Random(seed)
        while time.time() < self.end:
            head, body, fault_of = self.request(rnd)
            with socket.create_connection(("127.0.0.1", self.port), timeout=self.patience) as s:
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
                    continue
                fault = fault_of(text) if status == b"200" else text[:300]
                if fault is None:
                    self.count("answered")
                    continue
                with self.lock:
                    self.faults.append(fault)

    def unsent(self, s):
        """Bytes that the system has from the server for the client and cannot deliver."""
        server, client = f":{self.port:04X}", f":{s.getsockname()[1]:04X}"
        with open("/proc/net/tcp") as connections:
            for fields in map(str.split, connections):
                if fields[1].endswith(server) and fields[2].endswith(client):
                    return int(fields[4].split(":")[0], 16)
        return 0

    def silent(self):
        """Asks for long answers and does not read them: the server gives up, and its place is free."""
        body = json.dumps({"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 100000,
                           "ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 20,
                           "chat_template_kwargs": {"enable_thinking": False}}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        while time.time() < self.end:
            with socket.socket() as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                s.settimeout(60)
                s.connect(("127.0.0.1", self.port))
                s.sendall(head.encode() + body)
                before, limit = 0, time.time() + 150  # however slow the server is: until it has no more room for what it writes
                while time.time() < limit and ((unsent := self.unsent(s)) == 0 or unsent != before):
                    before = unsent
                    time.sleep(5)
                time.sleep(25)  # the server's patience and more
                text, limit = b"", time.time() + 20
                while time.time() < limit and (piece := s.recv(65536)):
                    text += piece
                if time.time() < limit and b"[DONE]" not in text:
                    self.count("silent")
                else:
                    with self.lock:
                        self.faults.append(f"a client that did not read went on: {len(text)} bytes")

    def crowd(self):
        """Connections that do nothing: half of them from the start, half after a first request."""
        watch, open_ones = select.poll(), {}
        while time.time() < self.end:
            for _ in range(min(50, self.crowd_size - len(open_ones))):
                s = socket.create_connection(("127.0.0.1", self.port), timeout=20)
                if len(open_ones) % 2:
                    s.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                open_ones[s.fileno()] = s
                watch.register(s, select.POLLRDHUP)
            for fd, _ in watch.poll(100):
                watch.unregister(fd)
                open_ones.pop(fd).close()
                self.count("idle ended")
            self.idle = max(self.idle, len(open_ones))
        for s in open_ones.values():
            s.close()

    def run(self):
        people = [threading.Thread(target=self.person, args=(seed,), daemon=True) for seed in range(self.people)]
        people.append(threading.Thread(target=self.crowd, daemon=True))
        if not self.slow:
            people.append(threading.Thread(target=self.silent, daemon=True))
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
            p.join(200)
        time.sleep(6)  # threads and connections that are idle end
        descriptors, mib = self.state()
        checks = {
            f"answers {self.counts}": not self.faults and self.counts["answered"] > 0,
            f"{self.idle} idle connections at once": self.idle == self.crowd_size,
            "clients that do not read lose their answers": self.slow or self.counts["silent"] > 0,
            f"slowest /health {slowest:.3f} s": slowest < (20 if self.slow else 1),
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
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # the server inherits it
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096 if most == resource.RLIM_INFINITY else min(4096, most), most))
    slow = sys.argv[1] == "--slow"
    soak = Soak(slow, *sys.argv[2 if slow else 1:])
    try:
        sys.exit(soak.run())
    finally:
        soak.server.kill()
