#!/usr/bin/env python3
"""Many long conversations in host memory: every follow-up goes on from its own state, at once, with the tokens of a cold run.

  scripts/kept_states_check.py QUERN_BINARY [CONVERSATIONS [TOKENS]]

Reads CONVERSATIONS (100) prompts of TOKENS (30000) random token ids each, then asks each a follow-up, in another order: far more
than the contexts of the server hold, so the states come back from host memory. Prints one line a check; exit 1 if one fails.
Host memory of 0.7 GB a conversation of 30,000 tokens is needed for qwen3.6-35b-a3b. In the environment: SERVER (flags of quern
serve), WANTED_MS (100: the most milliseconds to the first token of a follow-up), BACK_MS (20: the most that the way from host memory
may take). On a CPU:

  SERVER="--synthetic tiny -np 4 -c 1024 --cache-ram 640" WANTED_MS=1000 BACK_MS=50 scripts/kept_states_check.py build/quern 60 923
"""
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
import urllib.request

SERVER = os.environ.get("SERVER", "--synthetic qwen3.6-35b-a3b --mix aeon -ngl all -np 2 -c 32768 --cache-ram 76000")
WANTED_MS = float(os.environ.get("WANTED_MS", 100))
BACK_MS = float(os.environ.get("BACK_MS", 20))
MORE = 50  # tokens of a follow-up


def main():
    binary = sys.argv[1]
    conversations = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    tokens = int(sys.argv[3]) if len(sys.argv) > 3 else 30000
    failed = 0

    def check(what, measured, good):
        nonlocal failed
        failed += not good
        print(f"  {'ok  ' if good else 'FAIL'} {what}: {measured}", flush=True)

    process = subprocess.Popen([binary, "serve", "--port", "0", "--log-format", "none", *SERVER.split()],
                               stderr=subprocess.PIPE, text=True)
    url = None
    for line in process.stderr:
        if found := re.search(r"at (http://\S+)", line):
            url = found[1]
            break
    if url is None:
        sys.exit("kept-states-check: the server did not start")

    def call(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=100)

    def ask(ids, answer=8, **fields):
        """Text, milliseconds to the first of it, tokens whose state was kept."""
        body = {"prompt": ids, "max_tokens": answer, "ignore_eos": True, "temperature": 0, "stream": True,
                "stream_options": {"include_usage": True}, "return_token_ids": True, **fields}
        data = json.dumps(body).encode()
        request = urllib.request.Request(url + "/v1/completions", data, {"Content-Type": "application/json"})
        begun, first, text, usage = time.time(), None, "", None
        with urllib.request.urlopen(request, timeout=100) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                if first is None:
                    first = (time.time() - begun) * 1e3
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                text += "".join(c["text"] for c in event["choices"])
        return text, first, usage["prompt_tokens_details"]["cached_tokens"]

    try:
        def prompt(i):
            draw = random.Random(i)
            return [draw.randrange(1000) for _ in range(tokens)]

        def follow_up(i):
            draw = random.Random(-1 - i)
            return prompt(i) + [draw.randrange(1000) for _ in range(MORE)]

        begun = time.time()
        read = [ask(prompt(i), 1)[1] for i in range(conversations)]
        print(f"  {conversations} prompts of {tokens} tokens read in {time.time() - begun:.1f} s, "
              f"the first {read[0]:.0f} ms, median {statistics.median(read):.0f} ms, slowest {max(read[1:]):.0f} ms", flush=True)
        order = list(range(conversations))
        random.Random(1).shuffle(order)
        answers, times, cached = {}, [], []
        for i in order:
            answers[i], first, found = ask(follow_up(i))
            times.append(first)
            cached.append(found)
        least = tokens // 64 * 64
        check("follow-ups that went on from their own state", f"{sum(c >= least for c in cached)} of {conversations}",
              min(cached) >= least)
        slow = [f"{t:.0f} ms as number {n + 1}" for n, t in enumerate(times) if t > WANTED_MS]
        times.sort()
        check(f"their first token, wanted: <= {WANTED_MS:g} ms each",
              f"quartiles {', '.join(f'{q:.1f}' for q in statistics.quantiles(times, n=4))} ms, p95 {times[int(0.95 * (len(times) - 1))]:.1f} ms, "
              f"slowest {times[-1]:.1f} ms", times[-1] <= WANTED_MS)
        if slow:
            print(f"    slower: {', '.join(slow[:8])}")
        last = order[-1]
        # The same work without it: other follow-ups of the last conversation, whose state is in the device's memory now.
        again = statistics.median(ask(prompt(last) + [i] * MORE)[1] for i in range(5))
        back = statistics.median(times) - again
        check(f"the way back from host memory, wanted: <= {BACK_MS:g} ms",
              f"{back:.1f} ms ({again:.1f} ms to the first token without it)", back <= BACK_MS)
        some = order[:3]
        cold = {i: ask(follow_up(i), cache_prompt=False)[0] for i in some}
        same = sum(cold[i] == answers[i] for i in some)
        check("answers of a cold run", f"{same} of {len(some)}", same == len(some))
        with call("/slots") as reply:
            states = json.load(reply)[0]["states"]
        print(f"  {len(states['kept'])} states, {states['host_bytes'] / 1e9:.1f} of {states['host_budget_bytes'] / 1e9:.1f} GB, "
              f"{len(states['dropped'])} dropped")
    finally:
        process.kill()
        process.wait()
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
