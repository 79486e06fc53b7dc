"""What scripts/serve_gpu_check.sh runs; it says what is measured. Usage: serve_gpu_check.py QUERN_BINARY JSON_FILE [CHECK...]"""
import concurrent.futures
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

SERVER = os.environ.get("SERVER", "--synthetic qwen3.6-35b-a3b --mix aeon -ngl all -np 64 -c 40960 --cache-ram 16384")
CONTEXT_TOKENS = int(os.environ.get("CONTEXT_TOKENS", 30000))
LONG_TOKENS = int(os.environ.get("LONG_TOKENS", 32768))
PEOPLE = [int(n) for n in os.environ.get("PEOPLE", "1,4,16,64").split(",")]
ANSWER_TOKENS = int(os.environ.get("ANSWER_TOKENS", 200))
REQUESTS = int(os.environ.get("REQUESTS", 2000))
# Of the check that answers do not depend on the requests beside them.
CROWD = int(os.environ.get("CROWD", 64))
CROWD_PROMPT = [int(n) for n in os.environ.get("CROWD_PROMPT", "40,1500").split(",")]
CROWD_ANSWER = int(os.environ.get("CROWD_ANSWER", 96))
# Of the check of replicas: how many there are, and how many times as many tokens a second they should write as one.
REPLICAS = int(os.environ.get("REPLICAS", 2))
REPLICAS_FACTOR = float(os.environ.get("REPLICAS_FACTOR", 1.9))
# Forms whose cost is measured. Random weights rarely propose what fits the second: each of its tokens is drawn from all logits.
FORMS = {"a long text of JSON": {"type": "string", "minLength": 100000},
         "a list of objects": {"type": "array", "minItems": 10000, "items": {
             "type": "object", "properties": {"name": {"type": "string", "minLength": 3, "maxLength": 30},
                                              "count": {"type": "integer"}, "kind": {"enum": ["stone", "grain"]}},
             "required": ["name", "count", "kind"]}}}
FORM_COST = float(os.environ.get("FORM_COST", 3))  # per cent, of the first
# What is wanted: milliseconds to the first token of a next turn and between tokens (p99), tokens a second together.
FOLLOW_UP_MS = float(os.environ.get("FOLLOW_UP_MS", 35))
GAP_MS = float(os.environ.get("GAP_MS", 45))
TOKENS_A_SECOND = float(os.environ.get("TOKENS_A_SECOND", 5514))
# As in Qwen's generation_config.json; random weights come without one.
SAMPLING = ["--temp", "0.6", "--top-k", "20", "--top-p", "0.95"]


class Server:
    def __init__(self, binary, *flags):
        begun = time.time()
        self.process = subprocess.Popen([binary, "serve", "--port", "0", "--log-format", "none", "--queue", "256",
                                         *SERVER.split(), *SAMPLING, *flags], stderr=subprocess.PIPE, text=True)
        self.url, self.said = None, []
        for line in self.process.stderr:
            self.said.append(line.rstrip())
            if found := re.search(r"at (http://\S+)", line):
                self.url = found[1]
                break
        if self.url is None:
            sys.exit("serve-gpu-check: the server did not start:\n" + "\n".join(self.said))
        self.start_seconds = time.time() - begun
        threading.Thread(target=lambda: self.said.extend(self.process.stderr), daemon=True).start()

    def call(self, path, body=None, seconds=60):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=seconds)

    def stop(self):
        begun = time.time()
        self.process.terminate()
        code = self.process.wait(60)
        return code, time.time() - begun


def ask(server, messages, answer_tokens, **fields):
    """Text of the answer, milliseconds to its first piece, usage."""
    body = {"messages": messages, "max_tokens": answer_tokens, "ignore_eos": True, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, **fields}
    begun, first, text, usage = time.time(), None, "", None
    with server.call("/v1/chat/completions", body) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                piece = (choice["delta"].get("reasoning") or "") + (choice["delta"].get("content") or "")
                if piece and first is None:
                    first = (time.time() - begun) * 1e3
                text += piece
    return text, first, usage


def complete(server, prompt, **fields):
    """Text of the answer, the log-probabilities of its tokens if asked for, tokens whose state was kept."""
    body = {"prompt": prompt, "max_tokens": CROWD_ANSWER, "ignore_eos": True, **fields}
    with server.call("/v1/completions", body, 200) as reply:
        answer = json.load(reply)
    choice = answer["choices"][0]
    found = (choice.get("logprobs") or {}).get("token_logprobs")
    return choice["text"], found, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def parting(a, b):
    """Tokens that two answers with log-probabilities have in common at their beginning."""
    same = [x == y for x, y in zip(a[1], b[1])]
    return same.index(False) if False in same else len(same)


def at_once(server, requests):
    """The same of each (prompt, fields), all sent together."""
    with concurrent.futures.ThreadPoolExecutor(len(requests)) as people:
        return list(people.map(lambda r: complete(server, r[0], **r[1]), requests))


def decode_rate(server, prompt, people, fields):
    """Tokens a second of answers that are written together."""
    def one(seed):
        body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "seed": seed, **fields}
        with server.call("/v1/completions", body, 200) as reply:
            return json.load(reply)["timings"]
    with concurrent.futures.ThreadPoolExecutor(people) as pool:
        timings = list(pool.map(one, range(people)))
    return sum(t["predicted_n"] for t in timings) / max(t["predicted_ms"] for t in timings) * 1e3


def words(server, tokens):
    """A text of about so many tokens that does not repeat itself."""
    number = tokens // 8
    for _ in range(3):
        text = " ".join(f"grain {i} of {i * i}" for i in range(number))
        with server.call("/tokenize", {"content": text}) as reply:
            number = number * tokens // json.load(reply)["count"]
    return text


class Check:
    def __init__(self, binary):
        self.binary = binary
        self.rows, self.failed, self.asked, self.failures = [], 0, 0, 0
        self.data = {"server": SERVER}

    def row(self, what, measured, wanted, good):
        self.rows.append((what, measured, wanted, "ok" if good else "FAIL"))
        self.failed += not good
        print(f"  {'ok  ' if good else 'FAIL'} {what}: {measured} (wanted: {wanted})", flush=True)

    def follow_up(self, server, name, cold):
        """Three different turns after the same conversation. The cold answers, if there are none yet, come after."""
        answers, times, cached, prompt = [], [], [], 0
        for question in range(3):
            text, first, usage = ask(server, self.turns + [{"role": "user", "content": f"Grain {question}?"}], 32)
            answers.append(text)
            times.append(first)
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            prompt = usage["prompt_tokens"]
        self.asked += 3
        if cold is None:
            cold, cold_times = [], []
            for question in range(3):
                text, first, _ = ask(server, self.turns + [{"role": "user", "content": f"Grain {question}?"}], 32,
                                     cache_prompt=False)
                cold.append(text)
                cold_times.append(first)
            self.asked += 3
            self.data["cold_ttft_ms"] = cold_times
        same = sum(a == b for a, b in zip(answers, cold))
        self.data[name] = {"ttft_ms": times, "cached": cached, "prompt": prompt, "same": same}
        self.row(f"{name}, {prompt} tokens, {min(cached)} kept: first token",
                 " ".join(f"{t:.0f}" for t in times) + " ms", f"<= {FOLLOW_UP_MS:g} ms each", max(times) <= FOLLOW_UP_MS)
        self.row(f"{name}: answers of a cold run", f"{same} of 3", "3 of 3", same == 3)
        return cold

    def conversation(self, directory):
        server = Server(self.binary, "--cache-dir", directory)
        self.data["start_seconds"] = server.start_seconds
        opening = [{"role": "user", "content": words(server, CONTEXT_TOKENS)}]
        answer, _, _ = ask(server, opening, 32)
        self.asked += 1
        self.turns = opening + [{"role": "assistant", "content": answer}]
        cold = self.follow_up(server, "follow-up", None)
        code, seconds = server.stop()
        self.row("ends when told, states saved", f"exit {code}, {seconds:.1f} s", "exit 0", code == 0)
        server = Server(self.binary, "--cache-dir", directory)
        self.data["restart"] = server.said
        self.follow_up(server, "follow-up after a restart", cold)
        return server

    def crowd(self, server):
        """The same requests alone and together; then follow-ups of the states that the crowd left."""
        draw = random.Random(7)
        prompts = [[draw.randrange(1000) for _ in range(draw.randint(*CROWD_PROMPT))] for _ in range(CROWD)]
        greedy = [(p, {"temperature": 0, "logprobs": 1}) for p in prompts]
        seeded = [(p, {"temperature": 1, "seed": i}) for i, p in enumerate(prompts[:16])]

        def cold(requests):
            self.asked += len(requests)
            return [complete(server, p, cache_prompt=False, **fields) for p, fields in requests]

        def compare(what, found, expected, parts):
            self.asked += len(found)
            same = sum(a[:parts] == b[:parts] for a, b in zip(found, expected))
            self.data[what] = same
            text = f"{same} of {len(expected)}"
            if same < len(expected) and parts > 1:
                at = sorted(parting(a, b) for a, b in zip(found, expected) if a[:parts] != b[:parts])
                text += f", parted after {at[0]} to {at[-1]} tokens, {at[len(at) // 2]} in the middle"
            self.row(what, text, "all", same == len(expected))

        alone, alone_seeded = cold(greedy), cold(seeded)
        compare("alone twice: answers and their log-probabilities", cold(greedy[:4]), alone[:4], 2)
        compare("two together: answers and their log-probabilities", at_once(server, greedy[:2]), alone[:2], 2)
        compare("alone and together: answers and their log-probabilities", at_once(server, greedy), alone, 2)
        compare("the same with the states that were left", at_once(server, greedy), alone, 2)
        compare("the same without asking for log-probabilities",
                at_once(server, [(p, {"temperature": 0}) for p, _ in greedy]), alone, 1)
        compare("alone and together: answers with a temperature and a seed", at_once(server, seeded), alone_seeded, 1)
        later = [(p + [draw.randrange(1000) for _ in range(50)], {"temperature": 0, "logprobs": 1})
                 for p in sorted(prompts, key=len)[-20:]]
        warm = [complete(server, p, **fields) for p, fields in later]
        compare("follow-ups of states that the crowd left: answers of a cold run", warm, cold(later), 2)
        reread = max(len(p) - 50 - cached for (p, _), (_, _, cached) in zip(later, warm))
        self.row("of their prompts read again", f"{reread} tokens at most", "<= 63", reread <= 63)

    def bench(self, server, people, requests, answer):
        out = subprocess.run([self.binary, "bench", "--serve", server.url, "-np", people, "-p", "100", "-n", str(answer),
                              "-o", "json", "--requests", str(requests)], capture_output=True, text=True, timeout=120)
        if out.returncode != 0:
            raise RuntimeError(out.stderr)
        rows = json.loads(out.stdout)
        for r in rows:
            self.asked += r["completed"] + r["failed"]
            self.failures += r["failed"]
        return rows

    def load(self, server):
        rows = [r for n in PEOPLE for r in self.bench(server, str(n), 4 * n, ANSWER_TOKENS)]
        self.data["load"] = rows
        most = rows[-1]
        self.row(f"{most['max_concurrency']} at once, {ANSWER_TOKENS}-token answers: tokens a second",
                 f"{most['output_throughput']:.0f}", f">= {TOKENS_A_SECOND:g}",
                 most["output_throughput"] >= TOKENS_A_SECOND)
        self.row(f"{most['max_concurrency']} at once: first token p95", f"{most['p95_ttft_ms']:.0f} ms", "<= 1000 ms",
                 most["p95_ttft_ms"] <= 1000)

    def structure(self, server):
        """What it costs that answers have a form: alternating runs, the median of their ratios."""
        self.data["structure"] = {}
        for people in (1, 16):
            for name, schema in FORMS.items():
                decode_rate(server, [5, 6, 7], people, {"json_schema": schema})  # compiles the form, starts the sizes
                pairs = [(decode_rate(server, [5, 6, 7], people, {}),
                          decode_rate(server, [5, 6, 7], people, {"json_schema": schema})) for _ in range(5)]
                self.asked += people * 11
                self.data["structure"][f"{name}, {people} at once"] = pairs
                cost = 100 * (1 - sorted(with_form / plain for plain, with_form in pairs)[2])
                limited = name == next(iter(FORMS))
                self.row(f"{name}, {people} at once, {sorted(p for p, _ in pairs)[2]:.0f} tokens a second without: costs",
                         f"{cost:.1f} %", f"<= {FORM_COST:g} %" if limited else "-", not limited or cost <= FORM_COST)

    def long_prompt(self, server):
        people, result = max(1, PEOPLE[-1] - 1), {}

        def intrude():
            time.sleep(2)
            text = words(server, LONG_TOKENS - 200)
            result["begun"] = time.time()
            _, result["first"], result["usage"] = ask(server, [{"role": "user", "content": text}], 8)

        health = {"slowest": 0.0, "on": True}

        def watch():
            while health["on"]:
                begun = time.time()
                server.call("/health", seconds=10).read()
                health["slowest"] = max(health["slowest"], time.time() - begun)
                time.sleep(0.1)

        threads = [threading.Thread(target=intrude), threading.Thread(target=watch)]
        for t in threads:
            t.start()
        row = self.bench(server, str(people), 4 * people, ANSWER_TOKENS)[0]
        threads[0].join()
        health["on"] = False
        threads[1].join()
        self.asked += 1
        self.data["long"] = {"others": row, "usage": result["usage"], "ttft_ms": result["first"],
                             "slowest_health_s": health["slowest"]}
        self.row(f"a prompt of {result['usage']['prompt_tokens']} tokens (first token {result['first']:.0f} ms) beside "
                 f"{people} others: their ITL p99", f"{row['p99_itl_ms']:.1f} ms", f"<= {GAP_MS:g} ms", row["p99_itl_ms"] <= GAP_MS)
        self.row("slowest /health under that load", f"{health['slowest'] * 1e3:.0f} ms", "<= 1000 ms",
                 health["slowest"] <= 1)

    def replicas(self):
        """People at once through several replicas and through one; who answers changes nothing. The replicas first and last: cards
        that warm up show."""
        draw = random.Random(8)
        most, each = PEOPLE[-1], PEOPLE[-1] * REPLICAS
        prompts = [[draw.randrange(1000) for _ in range(draw.randint(*CROWD_PROMPT))] for _ in range(CROWD)]
        greedy = [(p, {"temperature": 0, "logprobs": 1}) for p in prompts]
        later = [(p + [draw.randrange(1000) for _ in range(50)], {"temperature": 0, "logprobs": 1}) for p in prompts]

        def measure(replicas):
            server = Server(self.binary, "--data-parallel", str(replicas))
            try:
                self.bench(server, str(most), most, max(8, ANSWER_TOKENS // 4))  # starts the sizes
                speed = [self.bench(server, str(n), 4 * n, ANSWER_TOKENS)[0]["output_throughput"]
                         for n in ((most, each) if replicas > 1 else (most,))]
                first = at_once(server, greedy)
                second = at_once(server, later)
                self.asked += len(first) + len(second)
                code, _ = server.stop()
                return speed, first, second, code
            finally:
                server.process.kill()
                server.process.wait()

        several, one, again = measure(REPLICAS), measure(1), measure(REPLICAS)
        self.data["replicas"] = {"several": several[0], "one": one[0], "again": again[0]}
        for i, people in enumerate((most, each)):
            best = max(several[0][i], again[0][i])
            self.row(f"{people} at once through {REPLICAS} replicas, {most} through one: "
                     f"{several[0][i]:.0f}, {again[0][i]:.0f} and {one[0][0]:.0f} tokens a second",
                     f"{best / one[0][0]:.2f} times", f">= {REPLICAS_FACTOR:g}", best / one[0][0] >= REPLICAS_FACTOR)
        for what, part in (("answers and their log-probabilities", 1), ("follow-ups of what any of them has kept", 2)):
            same = sum(a[:2] == b[:2] == c[:2] for a, b, c in zip(several[part], one[part], again[part]))
            self.row(f"replicas and one: {what}", f"{same} of {CROWD}", "all", same == CROWD)
        kept = sum(cached > 0 for _, _, cached in several[2])
        self.row("of these follow-ups from a kept state", f"{kept} of {CROWD}", "most", 2 * kept >= CROWD)
        self.row("replicas end when told", f"exit {several[3]}, {again[3]}", "exit 0, 0", several[3] == again[3] == 0)

    def rest(self, server):
        left = REQUESTS - self.asked
        if left > 0:
            self.data["rest"] = self.bench(server, str(PEOPLE[-1]), left, max(8, ANSWER_TOKENS // 4))
        self.row("requests in all, failed", f"{self.asked}, {self.failures}", f"{REQUESTS}, 0",
                 self.failures == 0 and self.asked >= REQUESTS)

    def table(self):
        print("| people | requests/s | tokens/s | TTFT p50 / p95 ms | TPOT p50 ms | ITL p50 / p99 ms | failed |\n"
              "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for r in self.data.get("load", []) + self.data.get("rest", []):
            print(f"| {r['max_concurrency']} | {r['request_throughput']:.2f} | {r['output_throughput']:.0f} | "
                  f"{r['median_ttft_ms']:.0f} / {r['p95_ttft_ms']:.0f} | {r['median_tpot_ms']:.2f} | "
                  f"{r['median_itl_ms']:.2f} / {r['p99_itl_ms']:.2f} | {r['failed']} |")


CHECKS = ["follow-up", "crowd", "structure", "load", "long", "requests"]
ON_REQUEST = ["replicas"]  # need more than one GPU


def main():
    begun = time.time()
    wanted = sys.argv[3:] or CHECKS
    if unknown := set(wanted) - set(CHECKS + ON_REQUEST):
        sys.exit(f"serve-gpu-check: unknown check {', '.join(sorted(unknown))}: there are {', '.join(CHECKS + ON_REQUEST)}")
    check = Check(sys.argv[1])
    server = None
    with tempfile.TemporaryDirectory() as directory:
        try:
            if "replicas" in wanted:
                check.replicas()
            if "follow-up" in wanted:
                server = check.conversation(directory)
            elif set(wanted) & set(CHECKS):
                server = Server(check.binary)
            steps = {"crowd": check.crowd, "structure": check.structure, "load": check.load, "long": check.long_prompt, "requests": check.rest}
            for name, step in steps.items():
                if name in wanted:
                    step(server)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            check.row("the check itself", str(error)[:300], "no error", False)
        finally:
            if server is not None:
                check.data["metrics"] = server.call("/metrics").read().decode() if server.process.poll() is None else ""
                server.process.kill()
                server.process.wait()
    check.table()
    with open(sys.argv[2], "w") as file:
        json.dump(check.data, file, indent=1)
    print(f"{len(check.rows) - check.failed} of {len(check.rows)} in {time.time() - begun:.0f} s")
    return check.failed > 0


if __name__ == "__main__":
    sys.exit(main())
